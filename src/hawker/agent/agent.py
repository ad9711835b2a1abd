"""An agent put together: the list of its services, in the order in which they start.

The simulator runs the same list over a simulated network, disk and driver, so nothing here touches the outside world
but through `host`, the running loop, and the makers that it is given.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from hawker.agent.listener import Bind, Listener, listen
from hawker.agent.settings import AgentSettings, BrokerRole, WorkerRole
from hawker.agent.worker_parts import MakeWorkerParts, Resolving, WorkerParts, live_worker_parts
from hawker.core.metrics import CONTENT_TYPE
from hawker.errors import NotFound
from hawker.host import Host
from hawker.http.app import Serving, Tokens, reply
from hawker.http.handlers import Route, unread
from hawker.model.agent_calls import ShowHealth, ShowMetrics, ShowProxyHealth
from hawker.model.values import host_port
from hawker.services import Service
from hawker.telemetry import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hawker.broker.api import Broker
    from hawker.catalog.base import Catalog, MakeCatalog
    from hawker.catalog.read.api import CatalogApi
    from hawker.http.call import Call
    from hawker.proxy.service import Proxy
    from hawker.proxy.settings import ProxySettings
    from hawker.worker.daemon import Worker
    from hawker.worker.settings import Way, WorkerSettings

JOIN_S = 3.0
"""How long a start waits for the first member that answers. A worker needs nobody to start its machines, but one that
was away for long should hear first which of them have gone elsewhere."""


class Agent:
    """`open` returns once every role serves; `failed` is set when the agent must end and be started again: its worker's
    database cannot be written. `close` leaves machines running unless the settings say otherwise. `recover` is as in
    `WorkerSettings`, for an agent without a directory to read it from."""

    def __init__(
        self,
        settings: AgentSettings,
        host: Host,
        *,
        make_worker_parts: MakeWorkerParts = live_worker_parts,
        make_catalog: MakeCatalog | None = None,
        bind: Bind | None = None,
        recover: Way = "",
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.failed = asyncio.Event()
        self._host = host
        self._make_worker_parts = make_worker_parts
        self._make_catalog = make_catalog
        self._bind = bind or self._listen
        self._recover = recover
        self.worker: Worker | None = None  # from the moment its database is open
        self.broker: Broker | None = None
        self.catalog: Catalog | None = None
        self.reading: CatalogApi | None = None
        self.proxy: Proxy | None = None
        self._restarting = False
        self._stack = AsyncExitStack()
        self._tokens = Tokens(settings.tokens.by_token())

    async def open(self) -> None:
        """Raises what keeps a role from starting; nothing of it runs on then."""
        async with AsyncExitStack() as stack, aclosing(self._services()) as services:
            async for service in services:
                await service.open()
                stack.push_async_callback(service.close)
                self.metrics.measured.append(service.measure)
            self._stack = stack.pop_all()

    async def retire(self) -> None:
        """Before `close`, when this agent is restarted in place: until little is under way that cannot wait. It takes
        all that comes meanwhile."""
        if self.proxy:
            await self.proxy.retire()

    async def close(self, *, restarting: bool = False) -> None:
        """Answer what was asked, then end the roles, the last one opened first. `restarting`: what runs without this
        process runs on. May be called again."""
        self._restarting = restarting
        await self._stack.aclose()

    # --- what it starts ----------------------------------------------------------------------------------------------

    async def _services(self) -> AsyncGenerator[Service]:
        """Every service, in order. Each is made once those before it are open."""
        settings, host = self.settings, self._host
        if settings.worker and host.vfs is None:
            yield _Lock(settings.directory)  # first: two daemons over one database would undo each other's machines
        listeners = [Listener(address, self._bind, host) for address in settings.listens]
        unserved = list(listeners)
        for listener in listeners:
            yield listener
        parts = None
        if settings.worker:
            from hawker.worker.daemon import Worker

            parts = await self._make_worker_parts(settings, settings.worker, host)
            yield parts
            worker = Worker(
                self._worker_settings(settings.worker), host, parts.drivers, self.metrics, parts.images, parts.network
            )
            await worker.open_store()
            self.worker = worker
            yield _Opened(worker.close_store)  # it closes last: the catalog publishes what the worker writes
        if self.worker or not (settings.broker and settings.broker.workers):
            from hawker.catalog.read.api import CatalogApi

            self.catalog = catalog = self._make_engine()
            yield _Opened(catalog.close, catalog.measure)
            self.reading = reading = CatalogApi(catalog, host)
            yield reading
            serving = Serving(host, self._tokens, self.metrics, settings.region)
            listeners[0].answer_early(serving.app(catalog.routes()))
            await catalog.open(await self.worker.check(catalog) if self.worker else None)
            await catalog.joined(within_s=JOIN_S)  # with nobody to ask, or nobody who answers, the worker starts anyway
            if self.worker and parts:
                app = await self.worker.open(self._tokens, catalog, self._routes(), reading, settings.tokens.cluster)
                yield _Opened(partial(self._close_worker, self.worker, parts), self.worker.measure)
                if parts.network is not None:
                    yield Resolving(parts.network, catalog.view, settings, host)
                yield _Watch(self.worker.failed, self.failed)
                unserved.pop(0).answer(app)
            if settings.proxy:
                self.proxy = await self._open_proxy(settings.proxy, catalog, reading)
                yield _Opened(self.proxy.close)
                for collector in self.proxy.collectors():
                    self.metrics.registry.register(collector)
        if not settings.proxy and (settings.directory / "haproxy").exists():
            await _end_data_plane(settings.directory)
        if settings.broker:
            self.broker = broker = self._make_broker(settings.broker)
            yield _Opened(broker.close)
            unserved.pop(0).answer(broker.app(self._tokens, self._routes()))
        if unserved and self.reading:
            unserved.pop(0).answer(self._reader_app(self.reading))
        yield Listeners(listeners, self.reading)

    async def _close_worker(self, worker: Worker, parts: WorkerParts) -> None:
        stopping = self.settings.stop_machines_on_exit and not worker.failed.is_set() and not self._restarting
        await worker.close(stop_machines=stopping)
        if stopping and parts.remove_network:
            await parts.remove_network()

    def _listen(self, address: str) -> socket.socket:
        first, *others = self._host.listening.take(*host_port("listen", address)) or [listen(address)]
        for sock in others:
            sock.close()
        return first

    def _worker_settings(self, role: WorkerRole) -> WorkerSettings:
        from hawker.worker.lost_database import asked
        from hawker.worker.settings import WorkerSettings

        settings = self.settings
        host, port = settings.advertised()
        return WorkerSettings(
            name=settings.name,
            region=settings.region,
            directory=settings.directory,
            capacity=role.resources(settings.directory),
            host=host,
            port=port,
            ports=role.port_range(),
            proxy_port=settings.proxy_port(),
            disk_scale=role.disk_scale,
            recover=asked(settings.directory) if self._host.vfs is None else self._recover,
            reserve_mib=role.reserve_mib,
            history_s=role.history_s,
            history_records=role.history_records,
            image_timeout_s=settings.images.timeout_s,
            validate=role.validate,
        )

    def _make_engine(self) -> Catalog:
        from hawker.catalog import engines
        from hawker.catalog.base import Site

        settings, given = self.settings, self.settings.catalog
        host, port = settings.advertised()
        bind, bind_port = host_port("listen", settings.listens[0])
        if self._host.vfs is None:
            settings.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        site = Site(
            name=settings.name,
            region=settings.region,
            host=host,
            port=port,
            bind=bind,
            bind_port=bind_port,
            cluster=given.cluster,
            secrets=tuple(given.keys or (settings.tokens.cluster,)),
            token=settings.tokens.cluster,
            roles=settings.roles,
            join=tuple(host_port("catalog.join", address) for address in given.join),
            path=settings.directory / "catalog.db",
            machine=self._host,
            metrics=self.metrics,
            settings=given.settings.get(given.engine, {}),
        )
        return self._make_catalog(site) if self._make_catalog else engines.make(given.engine, site)

    async def _open_proxy(self, proxy: ProxySettings, catalog: Catalog, reading: CatalogApi) -> Proxy:
        from hawker.proxy.service import Proxy

        settings, worker = self.settings, self.worker
        own = worker if worker and proxy.worker in ("", settings.name) else None
        return await Proxy.open(
            proxy,
            catalog.view,
            self._host,
            region=settings.region,
            token=settings.tokens.cluster,
            worker=settings.name if own else "",
            name=settings.name,
            own=own.parts.machine.waking if own else None,
            unfit=reading.unfit,
            complete=catalog.complete,
            directory=settings.directory,
        )

    def _make_broker(self, role: BrokerRole) -> Broker:
        from hawker.broker.api import Broker
        from hawker.broker.directory import Directory
        from hawker.broker.fleet import Fleet, parse_address
        from hawker.core.ranking import policy

        settings, catalog = self.settings, self.catalog
        fleet = Fleet([parse_address(text) for text in role.workers], settings.tokens.cluster, settings.region)
        return Broker(
            settings.name,
            fleet,
            self._host,
            policy(role.policy, role.image_weight),
            self.metrics,
            settings.region,
            Directory(catalog.view, fleet) if catalog and not role.workers else None,
            self.reading,
            settings.urls(),
        )

    # --- what it answers ---------------------------------------------------------------------------------------------

    def _routes(self) -> tuple[Route, ...]:
        """What every role answers beside its own calls."""
        catalog = self.catalog.routes() if self.catalog else ()
        return (*catalog, unread(ShowMetrics, self._tell_metrics), unread(ShowProxyHealth, self._tell_proxy))

    async def _tell_metrics(self, call: Call) -> Response:
        return Response(self.metrics.exposition(), media_type=CONTENT_TYPE)

    async def _tell_proxy(self, call: Call) -> Response:
        if self.proxy is None:
            raise NotFound("this agent has no proxy")
        return reply(self.proxy.health())

    def _reader_app(self, reading: CatalogApi) -> ASGIApp:
        """What an agent serves that has neither worker nor broker: the catalog, its health, its metrics."""
        from hawker.catalog.read.api import health

        async def tell_health(call: Call) -> Response:
            return health("proxy", self.settings.name, reading)

        serving = Serving(self._host, self._tokens, self.metrics, self.settings.region)
        return serving.app((*self._routes(), *reading.routes(), unread(ShowHealth, tell_health)))


class _Opened(Service):
    """A part that is open when it is made."""

    def __init__(
        self, close: Callable[[], Awaitable[None]], measure: Callable[[Metrics], None] = lambda metrics: None
    ) -> None:
        self._close = close
        self._measure = measure

    async def close(self) -> None:
        await self._close()

    def measure(self, metrics: Metrics) -> None:
        self._measure(metrics)


class _Lock(Service):
    """That no other agent has this directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held = ExitStack()

    async def open(self) -> None:
        from hawker.worker.lock import sole_holder

        self._held.enter_context(sole_holder(self._directory))

    async def close(self) -> None:
        self._held.close()


class _Watch(Service):
    """The agent ends when its worker has failed, for the service manager to start it again; its machines run on."""

    def __init__(self, failed: asyncio.Event, ends: asyncio.Event) -> None:
        self._failed = failed
        self._ends = ends
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="failed")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()

    async def _watch(self) -> None:
        await self._failed.wait()
        self._ends.set()


class Listeners(Service):
    """All of an agent's listeners. They come last in the list, so they close first: the agent answers what was asked,
    and then its parts end."""

    def __init__(self, listeners: Sequence[Listener], reading: CatalogApi | None) -> None:
        self._listeners = listeners
        self._reading = reading

    async def close(self) -> None:
        if self._reading:
            await self._reading.close()  # else servers wait for streams that never end by themselves
        for listener in reversed(self._listeners):  # the broker's first: its orders may be with this agent's worker
            await listener.close()


async def _end_data_plane(directory: Path) -> None:
    """End what this agent left running when it was a proxy, which it is no more."""
    from hawker.proxy.planes import end_left_programs
    from hawker.proxy.settings import ProxySettings

    await end_left_programs(ProxySettings(), directory)
