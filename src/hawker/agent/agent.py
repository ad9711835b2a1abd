"""An agent put together: its catalog member, its worker, its broker, in the order in which they start and stop.

The simulator runs the same class over a simulated network, disk and driver, so nothing here touches the outside
world but through `host`, the running loop, and the two makers it is given.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hawker.agent.outfit import MakeOutfit, live_outfit, open_resolver
from hawker.agent.settings import AgentSettings, BrokerRole, WorkerRole
from hawker.errors import HawkerError, NotFound
from hawker.host import Host
from hawker.http.app import Handler, Serving, Tokens, reply
from hawker.http.server import BACKLOG, Server, serve
from hawker.model.values import host_port
from hawker.telemetry import METRICS_CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from hawker.broker.api import Broker
    from hawker.catalog.base import Catalog, MakeCatalog, Source
    from hawker.catalog.read.api import CatalogApi
    from hawker.http.call import Call
    from hawker.network.base import HostNetwork
    from hawker.proxy.service import Proxy
    from hawker.proxy.settings import ProxySettings
    from hawker.worker.daemon import Worker
    from hawker.worker.settings import Way

Bound = socket.socket | tuple[str, int]
Bind = Callable[[str], Bound]
JOIN_S = 3.0
"""So long a start waits for the first member that answers. A worker needs nobody to start its machines, but one that
was away for long should hear first which of them have gone elsewhere."""


class Agent:
    """`open` returns once every role serves; `failed` is set when the agent must end and be started anew: its worker's
    database cannot be written. `close` leaves machines running unless the settings say otherwise."""

    def __init__(
        self,
        settings: AgentSettings,
        host: Host,
        *,
        make_outfit: MakeOutfit | None = None,
        make_catalog: MakeCatalog | None = None,
        bind: Bind | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.failed = asyncio.Event()
        self._host = host
        self._make_outfit = make_outfit or live_outfit
        self._make_catalog = make_catalog
        self._bind = bind or self._listen
        self._network: HostNetwork | None = None
        self._remove_network: Callable[[], Awaitable[None]] | None = None
        self.worker: Worker | None = None  # from the moment its database is open
        self.broker: Broker | None = None
        self.catalog: Catalog | None = None
        self.reading: CatalogApi | None = None
        self.proxy: Proxy | None = None
        self._servers: list[Server] = []
        self._restarting = False
        self.recover: Way = ""  # as in `WorkerSettings`, where there is no directory to read it from
        self._stack = AsyncExitStack()
        self._tokens = Tokens(settings.tokens.by_token())

    async def open(self) -> None:
        """Raises what keeps a role from starting; nothing of it runs on then."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            if settings.worker and self._host.vfs is None:
                # First of all: two daemons over one database would each undo the other's machines.
                from hawker.worker.lock import sole_holder

                stack.enter_context(sole_holder(settings.directory))
            fronts = [await self._front(stack, address) for address in settings.listens]
            if settings.worker:
                await self._open_store(stack, settings.worker)
            if self.worker or not (settings.broker and settings.broker.workers):
                await self._open_catalog(stack, fronts[0])
            if self.worker:
                await self._open_worker(stack, self.worker, fronts.pop(0))
            if settings.proxy:
                await self._open_proxy(stack, settings.proxy)
            elif (settings.directory / "haproxy").exists():
                await _end_data_plane(settings.directory)
            if settings.broker:
                await self._open_broker(stack, settings.broker, fronts.pop(0))
            if fronts and self.catalog and self.reading:
                fronts.pop().open(
                    reader_app(settings, self._host, self._tokens, self.metrics, self._routes(), self.reading)
                )
            self._stack = stack.pop_all()

    async def retire(self) -> None:
        """Before `close`, when this agent is begun anew at once: until little is under way that cannot wait. It takes
        all that comes meanwhile."""
        if self.proxy:
            await self.proxy.retire()

    async def close(self, *, restarting: bool = False) -> None:
        """Answer what was asked, then end the roles, the last one opened first. `restarting`: what runs without this
        process runs on. May be called again."""
        self._restarting = restarting
        if self.reading:
            await self.reading.close()  # else servers wait for streams that never end by themselves
        for server in reversed(self._servers):  # the broker's first: its orders may be with this agent's worker
            await server.close()
        await self._stack.aclose()

    def _listen(self, address: str) -> socket.socket:
        first, *others = self._host.listening.take(*host_port("listen", address)) or [listen(address)]
        for sock in others:
            sock.close()
        return first

    async def _front(self, stack: AsyncExitStack, address: str) -> Front:
        """Listen: what comes before the role is open waits."""
        bound = self._bind(address)
        if isinstance(bound, socket.socket):
            stack.callback(bound.close)
        front = Front()
        server = await serve(front, bound, self._host)
        self._servers.append(server)
        stack.push_async_callback(server.close)
        return front

    async def _open_store(self, stack: AsyncExitStack, role: WorkerRole) -> None:
        from hawker.worker.daemon import Worker
        from hawker.worker.lost_database import asked
        from hawker.worker.settings import WorkerSettings

        settings = self.settings
        host, port = settings.advertised()
        worker_settings = WorkerSettings(
            name=settings.name,
            region=settings.region,
            directory=settings.directory,
            capacity=role.resources(settings.directory),
            host=host,
            port=port,
            ports=role.port_range(),
            proxy_port=settings.proxy_port(),
            disk_scale=role.disk_scale,
            recover=asked(settings.directory) if self._host.vfs is None else self.recover,
            reserve_mib=role.reserve_mib,
            history_s=role.history_s,
            history_records=role.history_records,
            image_timeout_s=settings.images.timeout_s,
            validate=role.validate,
        )
        outfit = await self._make_outfit(settings, role, self._host)
        stack.push_async_callback(outfit.close)
        self._network, self._remove_network = outfit.network, outfit.remove_network
        worker = Worker(worker_settings, self._host, outfit.drivers, self.metrics, outfit.images, outfit.network)
        await worker.open_store()
        self.worker = worker
        stack.push_async_callback(worker.close_store)  # last of all: the node publishes what the worker writes

    async def _open_catalog(self, stack: AsyncExitStack, front: Front) -> None:
        """Take part in the catalog. With nobody to ask, or nobody who answers, the worker starts all the same."""
        from hawker.catalog import engines
        from hawker.catalog.base import Site
        from hawker.catalog.read.api import CatalogApi

        settings = self.settings
        host, port = settings.advertised()
        bind, bind_port = host_port("listen", settings.listens[0])
        given = settings.catalog
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
        if self._host.vfs is None:
            settings.directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        catalog = self._make_catalog(site) if self._make_catalog else engines.make(given.engine, site)
        self.catalog = catalog
        stack.push_async_callback(catalog.close)
        self.reading = CatalogApi(catalog, self._host)
        self.metrics.measured += (catalog.measure, self.reading.measure)
        stack.push_async_callback(self.reading.close)
        serving = Serving(self._host, self._tokens, self.metrics, settings.region)
        front.early = serving.app([], agent_routes=catalog.agent_routes())
        source: Source | None = await self.worker.check(catalog) if self.worker else None
        await catalog.open(source)
        await catalog.joined(within_s=JOIN_S)

    async def _open_worker(self, stack: AsyncExitStack, worker: Worker, front: Front) -> None:
        settings, catalog = self.settings, self.catalog
        assert catalog is not None  # every worker is a member

        async def close() -> None:
            stopping = settings.stop_machines_on_exit and not worker.failed.is_set() and not self._restarting
            await worker.close(stop_machines=stopping)
            if stopping and self._remove_network:
                await self._remove_network()

        app = await worker.open(self._tokens, catalog, self._routes(), self.reading, settings.tokens.cluster)
        stack.push_async_callback(close)
        if self._network is not None:
            await open_resolver(stack, self._network, catalog.view, settings, self._host)
        watching = asyncio.get_running_loop().create_task(self._watch(worker.failed), name="failed")
        stack.callback(watching.cancel)
        front.open(app)

    async def _open_broker(self, stack: AsyncExitStack, role: BrokerRole, front: Front) -> None:
        from hawker.broker.api import Broker
        from hawker.broker.directory import Directory
        from hawker.broker.fleet import Fleet, parse_address
        from hawker.core.ranking import policy

        settings, catalog = self.settings, self.catalog
        fleet = Fleet([parse_address(text) for text in role.workers], settings.tokens.cluster, settings.region)
        directory = None
        if catalog and not role.workers:
            directory = Directory(catalog.view, fleet)
            stack.callback(directory.close)
        self.broker = broker = Broker(
            settings.name,
            fleet,
            self._host,
            policy(role.policy, role.image_weight),
            self.metrics,
            settings.region,
            directory,
            self.reading,
            settings.urls(),
        )
        stack.push_async_callback(broker.close)
        front.open(broker.app(self._tokens, self._routes() if catalog else None))

    async def _open_proxy(self, stack: AsyncExitStack, proxy: ProxySettings) -> None:
        from hawker.proxy.service import Proxy

        settings, catalog, worker = self.settings, self.catalog, self.worker
        assert catalog is not None  # the settings are checked for it
        own = worker if worker and proxy.worker in ("", settings.name) else None
        self.proxy = await Proxy.open(
            proxy,
            catalog.view,
            self._host,
            region=settings.region,
            token=settings.tokens.cluster,
            worker=settings.name if own else "",
            name=settings.name,
            own=own.parts.machine.waking if own else None,
            unfit=self.reading.unfit if self.reading else _fit,
            complete=catalog.complete,
            directory=settings.directory,
        )
        stack.push_async_callback(self.proxy.close)
        for collector in self.proxy.collectors():
            self.metrics.registry.register(collector)

    def _routes(self) -> dict[tuple[str, str], Handler]:
        """Agents' own paths, but for metrics."""
        assert self.catalog is not None
        return {**self.catalog.agent_routes(), ("GET", "/health/proxy"): self._tell_proxy}

    async def _tell_proxy(self, call: Call) -> Response:
        if self.proxy is None:
            raise NotFound("this agent has no proxy")
        return reply(self.proxy.health())

    async def _watch(self, failed: asyncio.Event) -> None:
        """The agent ends for whoever watches over it to start it again; its machines run on."""
        await failed.wait()
        self.failed.set()


async def _end_data_plane(directory: Path) -> None:
    """End what this agent left running when it was a proxy, which it is no more."""
    from hawker.proxy.planes import end_left_programs
    from hawker.proxy.settings import ProxySettings

    await end_left_programs(ProxySettings(), directory)


def _fit() -> str:
    return ""


def reader_app(
    settings: AgentSettings,
    host: Host,
    tokens: Tokens,
    metrics: Metrics,
    own: dict[tuple[str, str], Handler],
    reading: CatalogApi,
) -> ASGIApp:
    """What an agent serves that has neither worker nor broker: the catalog, its health, its metrics."""
    from starlette.responses import Response

    from hawker.catalog.read.api import health
    from hawker.http.handlers import unread
    from hawker.model.calls import ShowHealth

    async def tell_health(call: Call) -> Response:
        return health("proxy", settings.name, reading)

    async def tell_metrics(call: Call) -> Response:
        return Response(metrics.exposition(), media_type=METRICS_CONTENT_TYPE)

    served = (*reading.routes(), unread(ShowHealth, tell_health))
    routes = {**own, ("GET", "/metrics"): tell_metrics}
    return Serving(host, tokens, metrics, settings.region).app(served, agent_routes=routes)


class Front:
    """The application of a listening address while its role comes up: `early` answers members of the catalog, whatever
    else comes waits until the role is open."""

    def __init__(self) -> None:
        self.early: ASGIApp | None = None
        self._app: ASGIApp | None = None
        self._opened = asyncio.Event()

    def open(self, app: ASGIApp) -> None:
        self._app = app
        self._opened.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and self.early and scope.get("path", "").startswith("/v1/catalog/"):
            await self.early(scope, receive, send)
            return
        try:
            await self._opened.wait()
        except asyncio.CancelledError:  # it does not come up, and says why itself
            from starlette.responses import PlainTextResponse

            await PlainTextResponse("this agent does not start\n", status_code=503)(scope, receive, send)
            return
        assert self._app is not None  # set before the event
        await self._app(scope, receive, send)


def listen(address: str) -> socket.socket:
    """A listening socket for `host:port`. Raises `HawkerError` when the port is taken."""
    name, port = host_port("listen", address)
    # The protocol must be named: asyncio switches Nagle's delay off only for sockets that say they are TCP, and with it
    # every answer waits 40 ms for an acknowledgement.
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((name, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise HawkerError(f"cannot listen on {address}: {error.strerror}", hint="is another agent running?") from error
    return sock
