"""Puts a proxy together: what it knows, how it decides, and the data plane that carries the bytes.

proxy = await Proxy.open(settings, view, host, name="ams-1", region="ams", token="...", worker="ams-1")
...
await proxy.close()
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from hawker.catalog.view import RowView
from hawker.core.metrics import Collector
from hawker.core.rendezvous import ranked
from hawker.errors import HawkerError, Invalid, StoreError
from hawker.host import Host
from hawker.model.values import host_port
from hawker.proxy.acme import Issuer
from hawker.proxy.app_delegator import AppDelegator
from hawker.proxy.app_table import AppTable
from hawker.proxy.background.idling import Idling
from hawker.proxy.background.liveness import Liveness
from hawker.proxy.background.measuring import Measuring
from hawker.proxy.background.ports import OpenPorts
from hawker.proxy.background.standby import Standbys
from hawker.proxy.base import Address
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.catalog_view.port_claims import PortClaims
from hawker.proxy.certificates import Certificates
from hawker.proxy.data_plane import DataPlane
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.upstreams import UpstreamPools
from hawker.proxy.health import Gauges, Health
from hawker.proxy.machines.calls import Own, Workers
from hawker.proxy.planes import Parts, end_left_programs, factory
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.settings import AcmeSettings, ProxySettings
from hawker.proxy.traces import Traces, endpoint_of

APPS_A_QUERY = 500


def check(settings: ProxySettings, files: Path) -> None:
    """Check what `Proxy.open` needs of this host, as far as that is to be seen without opening. Raises `Invalid`."""
    if settings.traces:
        endpoint_of("proxy.traces", settings.traces)
    if settings.certificates and not Path(settings.certificates).is_dir():
        raise Invalid("proxy.certificates", settings.certificates, "name a directory of certificates")
    factory(settings.engine).check(settings, files)
    if log := settings.embedded.access_log:
        there = Path(log)
        if not os.access(there if there.exists() else there.parent, os.W_OK) or there.is_dir():
            raise Invalid("proxy.embedded.access_log", log, "name a file that can be written")


async def _listening(field: str, at: Address, opening: Awaitable[Address]) -> Address:
    """Await `opening`. Raises `HawkerError` that names the field of the configuration."""
    try:
        return await opening
    except OSError as error:
        why = os.strerror(error.errno) if error.errno in _HINTS else error.strerror or str(error)
        raise HawkerError(
            f"{field}: cannot listen on {at[0]}:{at[1]}: {why}", hint=_HINTS.get(error.errno or 0, "")
        ) from error


def _not_there(view: RowView, apps: Collection[str]) -> list[str]:
    """Which of these apps are not there. Raises `StoreError`."""
    left, found = sorted(apps), set[str]()
    for first in range(0, len(left), APPS_A_QUERY):
        some = left[first : first + APPS_A_QUERY]
        rows = view.rows(f"select id from apps where id in ({','.join('?' * len(some))})", some)
        found.update(app for (app,) in rows)
    return [app for app in left if app not in found]


_HINTS = {
    errno.EADDRINUSE: "is another agent, or another server, running there? Give another address, or end it",
    errno.EADDRNOTAVAIL: "give an address of this host, or 0.0.0.0 for all of them",
    errno.EACCES: "ports below 1024 are for root, or for a socket of systemd; or give another one",
}


class Proxy:
    """`open`, then `close`. `listening` are the addresses of shared public ports, `backhaul` that for other proxies."""

    def __init__(self, settings: ProxySettings, unfit: Callable[[], str]) -> None:
        self.settings = settings
        self.plane: DataPlane
        self.listening: dict[int, Address] = {}
        self.backhaul: Address | None = None
        self.ports: OpenPorts | None = None
        self.issuer: Issuer | None = None
        self.traces: Traces | None = None
        self._idling: Idling | None = None
        self._unfit = unfit
        self._complete: Callable[[], bool] = lambda: True
        self._stack = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        settings: ProxySettings,
        view: RowView,
        host: Host,
        *,
        region: str,
        token: str,
        worker: str = "",
        name: str = "",
        own: Own | None = None,
        unfit: Callable[[], str] = lambda: "",
        complete: Callable[[], bool] = lambda: True,
        directory: Path | None = None,
    ) -> Proxy:
        """`worker` is whose machines' door this is, "" for none; `own` are its calls where it is in this process.
        `name` and `directory` are the agent's; below the latter are certificates by ACME, and HAProxy's files if
        `settings` say nothing of that. `unfit` says why this node should get no traffic, "" when it may
        (`hawker.catalog.read.api`), `complete` whether what the catalog does not show is not there
        (`hawker.catalog.gossip.readiness`).
        Raises `HawkerError` when an address is taken, `Invalid` where there is no HAProxy, `StoreError` when the
        catalog cannot be read."""
        proxy = cls(settings, unfit)
        proxy._complete = complete
        if settings.traces:
            proxy.traces = Traces(settings.traces, host, region=region, proxy=name or settings.worker or worker)
        async with AsyncExitStack() as stack:
            await proxy._open(stack, view, host, region, token, settings.worker or worker, own, directory)
            proxy._stack = stack.pop_all()
        return proxy

    async def retire(self) -> None:
        """Another process takes over the listening sockets: wait until little is under way that cannot wait, and serve
        what comes meanwhile. `close` comes after it."""
        if self._idling:
            await self._idling.close()
        await self.plane.retire()

    async def close(self) -> None:
        """Take no new requests, end what is in flight, then close. Machines run on. May be called again."""
        await self._stack.aclose()

    def collectors(self) -> tuple[Collector, ...]:
        """The proxy's metrics."""
        others = (each for each in (self.certificates, self.traces) if each is not None)
        return *self.plane.collectors(), Gauges(self.health), *others

    def health(self) -> Health:
        """How the proxy is. One that is behind in the catalog says so: whoever sends it traffic should send that
        elsewhere."""
        index, app_table = self.index, self.app_table
        return Health(
            reason=self._unfit(),
            skipped=index.skipped,
            bad={f"{table}/{key}": why for (table, key), why in index.bad.items()},
            apps=index.loaded,
            doors=len(app_table.doors),
            opening=sum(door.opening for door in app_table.doors.values()),
            certificates=self._certificate_problems(),
            closed=dict(self.ports.missing) if self.ports else {},
        )

    def _certificate_problems(self) -> dict[str, str]:
        found = dict(self.certificates.problems) if self.certificates else {}
        return found | self.issuer.problems if self.issuer else found

    async def _open(
        self,
        stack: AsyncExitStack,
        view: RowView,
        host: Host,
        region: str,
        token: str,
        worker: str,
        own: Own | None,
        files: Path | None,
    ) -> None:
        settings = self.settings
        shared = settings.shared_ports()
        self.index = index = CatalogIndex(view, region)
        stack.callback(index.close)
        self.claims = claims = PortClaims(view, shared)
        stack.callback(claims.close)
        self.workers = workers = Workers(token, worker, own)
        stack.push_async_callback(workers.close)
        random: Callable[[], float] = host.rng.random
        options: dict[str, Any] = {"region": region, "token": token}
        options |= {"trusted": settings.trusted, "proxy_protocol": settings.proxy_protocol}
        embedded = msgspec.structs.replace(settings.embedded, **options)
        upstreams = UpstreamPools(embedded, host.sockets)
        self.app_table = app_table = AppTable(
            index,
            workers,
            settings.routing,
            worker=worker,
            region=region,
            token=token,
            random=random,
            sockets=host.sockets,
            upstreams=upstreams,
        )
        if own is not None:
            own.on_rest.append(app_table.rests)
            stack.callback(own.on_rest.remove, app_table.rests)
        self.router = router = ProxyRouter(
            app_table,
            settings.routing,
            domain=settings.domain,
            claims=self._claimed,
            random=random,
            complete=self._complete,
        )
        stack.push_async_callback(router.close)
        self.measuring = Measuring(index, region, router.distances, random)
        if settings.listen or settings.tcp:  # else none of its requests go to other regions
            self.measuring.begin()
            stack.push_async_callback(self.measuring.close)
        self.standbys = Standbys(app_table, view, random)
        self.standbys.begin()
        stack.push_async_callback(self.standbys.close)
        if worker:
            self.idling = self._idling = Idling(app_table, view, random)
            self.idling.begin()
            stack.push_async_callback(self.idling.close)
        self.certificates = certificates = await self._certificates(stack, host, files)
        if settings.acme is not None and files is not None and certificates is not None:
            self.issuer = self._issuer(settings.acme, view, host, certificates, token, worker, files)
        plane_parts = PlaneParts(
            router=router,
            settings=embedded,
            host=host,
            upstreams=upstreams,
            certificates=certificates,
            challenges=self.issuer,
            traces=self.traces,
        )
        parts = Parts(embedded=plane_parts, proxy=settings, delegator=lambda: AppDelegator(app_table), files=files)
        self.plane = plane = factory(settings.engine).make(parts)
        if self.traces is not None:
            self.traces.begin()
            stack.push_async_callback(self.traces.close)  # after the last request
        stack.push_async_callback(plane.close)
        liveness = Liveness(app_table, upstreams)
        liveness.begin()
        stack.push_async_callback(liveness.close)
        if self.issuer is not None:
            await self.issuer.open()
            stack.push_async_callback(self.issuer.close)
        if files is not None:
            await end_left_programs(settings, files)
        for port, at in shared.items():
            self.listening[port] = await _listening(f"proxy.listen.{port}", at, plane.listen(*at, public=port))
        if settings.tcp:
            self.ports = OpenPorts(plane, claims, view, settings.tcp, worker)
            await self.ports.begin()
            stack.push_async_callback(self.ports.close)
        if settings.backhaul:
            field = "proxy.backhaul"
            at = host_port(field, settings.backhaul, named=True)
            self.backhaul = await _listening(field, at, plane.listen_backhaul(*at))

    async def _certificates(self, stack: AsyncExitStack, host: Host, files: Path | None) -> Certificates | None:
        settings = self.settings
        directories = [Path(settings.certificates)] if settings.certificates else []
        if settings.acme is not None and files is not None:
            directories.append(files / "acme" / "live")
        if not directories:
            return None
        found = Certificates(directories, host, default=settings.default_certificate)
        await found.open()
        stack.push_async_callback(found.close)
        return found

    def _issuer(
        self,
        settings: AcmeSettings,
        view: RowView,
        host: Host,
        certificates: Certificates,
        token: str,
        worker: str,
        files: Path,
    ) -> Issuer:
        def turn(name: str) -> int:
            """How many proxies come before this one in the order for this name, for a task that one of them is to
            do."""
            others = (each.name for each in self.index.workers.values() if each.proxy_port)
            return ranked(name, {worker, *others}).index(worker)

        def gone(apps: Collection[str]) -> Collection[str]:
            try:
                return _not_there(view, apps) if self._complete() else ()
            except StoreError:
                return ()

        domain, at = self.settings.domain, files / "acme"
        return Issuer(settings, at, host, certificates, token=token, domain=domain, turn=turn, gone=gone)

    def _claimed(self, port: int) -> str:
        return self.claims.ports.get(port, "")
