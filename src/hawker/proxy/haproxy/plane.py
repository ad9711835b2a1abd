"""The data plane with HAProxy before the shared public ports that speak HTTP, and the embedded one behind it.

    plane = HaproxyPlane(parts, delegator, settings, directory)
    await plane.listen("0.0.0.0", 80, public=80)

On ports with TLS HAProxy ends TLS for some names, and the embedded plane for all others. The embedded plane alone
serves ports of one app, and the backhaul.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hawker.core.metrics import Collector
from hawker.errors import HawkerError
from hawker.proxy.base import Address, Refused, Route
from hawker.proxy.delegation import Delegator
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.context import Connection, PlaneParts
from hawker.proxy.embedded.plane import EmbeddedPlane
from hawker.proxy.embedded.protocol_sniffing import ProtocolSniffer
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.access_records import SOCKET, AccessRecords
from hawker.proxy.haproxy.activator import ActivatorIngress
from hawker.proxy.haproxy.backends import BackendTable, Key
from hawker.proxy.haproxy.config import PLAIN, USUAL, Config, Frontend, map_of
from hawker.proxy.haproxy.config_text import text
from hawker.proxy.haproxy.metrics import CarriedRequests
from hawker.proxy.haproxy.process import Process, Reserved, connections_most
from hawker.proxy.haproxy.reconciler import Reconciler
from hawker.proxy.haproxy.runtime import Workers
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.sockets import bound
from hawker.proxy.haproxy.tls_config import sniffer_of
from hawker.proxy.haproxy.tls_names import TlsNames
from hawker.telemetry import get_logger


class HaproxyPlane:
    """A `hawker.proxy.data_plane.DataPlane`. `delegator` says which machines HAProxy may give requests to, `directory`
    is HAProxy's own. `activator` is the embedded plane behind it."""

    def __init__(self, parts: PlaneParts, delegator: Delegator, haproxy: HaproxySettings, directory: Path) -> None:
        """Raises `Invalid` when there is no HAProxy."""
        settings, certificates = parts.settings, parts.certificates
        self.activator = EmbeddedPlane(parts, self)
        self._context = context = self.activator.context
        self.counters = context.counters
        self.carried_requests = CarriedRequests()
        self._settings = settings
        self._delegator = delegator
        self._logs = bool(settings.access_log) and haproxy.log
        self._haproxy = haproxy
        self._process = Process(haproxy, directory, settings.name, lambda: self._reconciler.stir())
        self._runtime = self._process.runtime
        self._table = table = BackendTable()
        self._tls_names: TlsNames | None = None
        self._tls = () if certificates is None else tuple(port for port in haproxy.tls if port not in haproxy.plain)
        if certificates is not None and self._tls:
            self._tls_names = TlsNames(
                directory, self._tls, certificates, self._runtime, delegator, self.counters, context.now
            )
        self._reconciler = Reconciler(
            self._process,
            table,
            delegator,
            self.carried_requests.add,
            haproxy,
            self._serve,
            self._tls_names,
            context.connections,
        )
        self._sought = False
        self._frontends: dict[int, Frontend] = {}

    def collectors(self) -> tuple[Collector, ...]:
        return self.counters, self.carried_requests

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        if public not in (*self._haproxy.plain, *self._tls):
            return await self.activator.listen(host, port, public=public)
        async with self._reconciler.lock:
            if not self._sought:
                self._sought = True
                await self._find()
                await self._listen_to_lines()
            await self._listen_behind(public)
            address = await self._downstream(host, port, public)
        self._reconciler.begin()
        return address

    async def listen_own(self, host: str, port: int, *, public: int) -> Address:
        return await self.activator.listen_own(host, port, public=public)

    async def listen_backhaul(self, host: str, port: int) -> Address:
        return await self.activator.listen_backhaul(host, port)

    def stop(self, address: Address) -> None:
        self.activator.stop(address)

    async def retire(self) -> None:
        await self.activator.retire()

    @property
    def carried(self) -> frozenset[Key]:
        """The apps and public ports whose requests HAProxy forwards by itself."""
        table = self._table.backends.values()
        return frozenset(each.key for each in table if each.hosts - each.untold[0] and each.open)

    @property
    def writing(self) -> frozenset[Key]:
        """Those of `carried` whose requests it forwards whatever their method is."""
        table = self._table.backends.values()
        return frozenset(each.key for each in table if each.writing - each.untold[1] and each.open)

    def opened(self, public: int) -> frozenset[str]:
        """The server names for which HAProxy ends TLS at a public port."""
        return self._tls_names.open(public) if self._tls_names is not None and public in self._tls else frozenset()

    async def workers(self) -> Workers:
        """The processes of HAProxy. Raises `Unreachable`."""
        return await self._runtime.refresh()

    async def close(self) -> None:
        """Close all, whatever HAProxy says: it raises nothing."""
        if await self._reconciler.close():
            if self._haproxy.stays or self._context.retiring:
                self._process.leave()
            else:
                await self._process.end(self._settings.drain_s)
                if self._tls_names is not None:
                    self._tls_names.keyring.remove()
            for backend in self._table.backends.values():
                for name in backend.machines:
                    self._delegator.filled(*backend.key, name, 0, 0, False)
        await self.activator.close()

    async def _find(self) -> None:
        """Find an HAProxy that serves since before this process, and take over what it has."""
        self._process.prepare()
        pending = (*self._haproxy.plain, *self._tls)
        config = await self._process.find([*map(str, pending), *map(sniffer_of, self._tls)])
        if config is None:
            return
        _logger.info("haproxy.found", directory=config.directory, cause="the proxy is opened")
        self._table.restore(config.kinds)
        self._frontends = {each.public: each for each in config.frontends if each.public in pending}
        addresses = await self._runtime.addresses()
        usage = await self._runtime.usage(addresses)
        for frontend in config.frontends:
            by_id: dict[str, set[str]] = {}
            for name, backend_id in (await self._runtime.map(map_of(config.directory, frontend.public))).items():
                by_id.setdefault(backend_id, set()).add(name)
            writing = await self._runtime.map(map_of(config.directory, frontend.public, writing=True))
            for backend_id, hosts in by_id.items():
                key = await self._whose(frontend.public, sorted(hosts)[0])
                backend = self._table.adopt(key, backend_id)
                backend.hosts, backend.writing = hosts, hosts & writing.keys()
                backend.adopt(addresses.get(backend_id, {}), usage.get(backend_id, {}))
        if self._tls_names is not None and any(frontend.tls for frontend in config.frontends):
            await self._tls_names.adopt(self._whose)
            await self._tls_names.follow(self._table.backends, self._context.connections)

    async def _whose(self, port: int, host: str) -> Key:
        """The app that a host belongs to. An app that is gone has no name, and nothing is delegated of it."""
        try:
            route = self._context.router.find(port, host) or await self._context.router.load(port, host)
        except Refused:
            return f"?{host}", port
        return route.app, port

    async def _listen_behind(self, public: int) -> None:
        answered, tls = self._reconciler.answered, public in self._tls

        def requests() -> ClientConnection:
            return ClientConnection(
                self._context, lambda _: ActivatorIngress(self._context, public, answered, secure=tls)
            )

        await self.activator.listen_unix(requests, self._process.sockets[str(public)])
        if tls:
            sock = self._process.sockets[sniffer_of(public)]
            await self.activator.listen_unix(lambda: ProtocolSniffer(self._context, public, behind=True), sock)

    async def _listen_to_lines(self) -> None:
        access = self._context.access
        if access is None or not self._logs:
            return
        path = self._process.directory / SOCKET
        sock = bound(path)
        self._process.admit(path, 0o660)
        await self.activator.listen_unix(lambda: AccessRecords(access, self._app_of), sock)

    def _app_of(self, backend_id: str) -> str:
        backend = self._table.by_id.get(backend_id)
        return backend.key[0] if backend else "-"

    async def _downstream(self, host: str, port: int, public: int) -> Address:
        """Have HAProxy listen at this address. Raises `OSError`, `NotStarted`."""
        before = self._process.config
        known = next((each for each in before.frontends if each.public == public), None) if before else None
        if known is not None and known.host == host and port in (0, known.port):
            self._frontends[public] = known
            config = self._config()
            assert before is not None
            pending = {each.public for each in before.frontends} <= self._frontends.keys()
            if pending and config.times == before.times and self._written() == text(before):
                return host, known.port
            await self._serve()
            return host, known.port
        self._context.host.listening.leave(host, port)  # there was no HAProxy, or at another address
        reserved = Reserved(host, port)
        try:
            tls = public in self._tls
            self._frontends[public] = Frontend(public=public, host=host, port=reserved.address[1], tls=tls)
            usual = USUAL if tls else PLAIN
            if self._table.kind_of(public, usual) is None:
                self._table.grow(public, usual, self._haproxy.backends)
            await self._serve()
        except HawkerError:
            del self._frontends[public]
            raise
        finally:
            reserved.close()
        return reserved.address

    def _written(self) -> str:
        try:
            return (self._process.directory / "haproxy.cfg").read_text()
        except OSError:
            return ""

    def _config(self) -> Config:
        process = self._process
        return Config(
            directory=str(process.directory),
            root=process.root,
            user=self._haproxy.user,
            threads=self._haproxy.threads,
            connections=connections_most(),
            region=self._settings.region,
            prefix=process.config.prefix if process.config else self._context.prefix.decode(),
            frontends=tuple(self._frontends.values()),
            kinds=tuple(self._table.kinds),
            servers=self._table.servers(),
            times=self._times(),
            sockets=process.numbers,
            logged=self._logs,
            joined=process.joins,
        )

    def _times(self) -> Settings:
        """The embedded plane's settings without the cluster's token: what HAProxy is to serve lies in a file, in its
        own directory."""
        return msgspec.structs.replace(self._settings, token="")

    async def _serve(self) -> None:
        if self._tls_names is not None:
            self._tls_names.write()
        await self._process.serve(self._config(), self._table.hosts())
        await self._runtime.refresh()

    def secured(self, connection: Connection, port: int, name: str, route: Route) -> None:
        self._reconciler.secured(connection, port, name, route)

    def hinted(self, route: Route) -> None:
        """HAProxy damages answers that follow an interim one (`ActivatorIngress`)."""
        self._reconciler.avoid(route.app)

    def handed_on(self, route: Route) -> None:
        """All requests of the app pass the activator from now on."""
        self._reconciler.avoid(route.app)


_logger = get_logger()
