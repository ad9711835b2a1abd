"""An agent put together: its catalog member, its worker, its broker, in the order in which they start and stop.

The simulator runs the same class over a simulated network, disk and driver, so nothing here touches the outside
world but through `host`, the running loop, and the two makers it is given.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

from hawker.agent.settings import AgentSettings, BrokerRole, WorkerRole, host_capacity, host_port
from hawker.errors import HawkerError, Invalid
from hawker.host import Host
from hawker.http.app import AGENT, Tokens
from hawker.http.server import BACKLOG, serve
from hawker.telemetry import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from hawker.worker.drivers.base import Driver

MakeDriver = Callable[[AgentSettings, WorkerRole], "Driver"]
Bound = socket.socket | tuple[str, int]
Bind = Callable[[str], Bound]


class Agent:
    """`open` returns once every role serves; `failed` is set when the agent must end and be started anew: its worker's
    database cannot be written. `close` leaves machines running unless the settings say otherwise."""

    def __init__(
        self,
        settings: AgentSettings,
        host: Host,
        *,
        make_driver: MakeDriver | None = None,
        bind: Bind | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.failed = asyncio.Event()
        self._host = host
        self._make_driver = make_driver or process_driver
        self._bind = bind or listen
        self._stack = AsyncExitStack()
        users = {token: owner for owner, token in settings.tokens.users.items()}
        self._tokens = Tokens({settings.tokens.cluster: AGENT, **users})

    async def open(self) -> None:
        """Raises what keeps a role from starting; nothing of it runs on then."""
        settings = self.settings
        async with AsyncExitStack() as stack:
            if settings.worker:
                await self._open_worker(stack, settings.worker)
            if settings.broker:
                await self._open_broker(stack, settings.broker)
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """In the opposite order. May be called again."""
        await self._stack.aclose()

    async def _open_worker(self, stack: AsyncExitStack, role: WorkerRole) -> None:
        from hawker.worker.daemon import Worker, WorkerSettings

        settings = self.settings
        worker_settings = WorkerSettings(
            name=settings.name,
            region=settings.region,
            directory=settings.directory,
            capacity=role.capacity or host_capacity(),
        )
        if self._host.vfs is None:
            # First of all: two daemons over one database would each undo the other's machines.
            from hawker.worker.lock import sole_holder

            stack.enter_context(sole_holder(settings.directory))
        bound = stack.enter_context(self._bound(role.listen))
        self.worker = worker = Worker(worker_settings, self._host, self._make_driver(settings, role), self.metrics)
        app = await worker.open(self._tokens)

        async def close() -> None:
            await worker.close(stop_machines=settings.stop_machines_on_exit and not worker.failed.is_set())

        stack.push_async_callback(close)
        watching = asyncio.get_running_loop().create_task(self._watch(worker.failed), name="failed")
        stack.callback(watching.cancel)
        await self._serve(stack, app, bound)

    async def _open_broker(self, stack: AsyncExitStack, role: BrokerRole) -> None:
        from hawker.broker.api import Broker
        from hawker.broker.fleet import Fleet, parse_address
        from hawker.core.ranking import policy

        settings = self.settings
        addresses = [parse_address(text) for text in role.workers]
        if not addresses:
            raise Invalid("broker.workers", [], "list at least one worker: name@region=host:port")
        bound = stack.enter_context(self._bound(role.listen))
        fleet = Fleet(addresses, settings.tokens.cluster, settings.region)
        broker = Broker(settings.name, fleet, self._host, policy(role.policy), self.metrics, settings.region)
        stack.push_async_callback(broker.close)
        await self._serve(stack, broker.app(self._tokens), bound)

    async def _serve(self, stack: AsyncExitStack, app: ASGIApp, bound: Bound) -> None:
        server = await serve(app, bound, self._host)
        stack.push_async_callback(server.close)

    async def _watch(self, failed: asyncio.Event) -> None:
        """The agent ends for whoever watches over it to start it again; its machines run on."""
        await failed.wait()
        self.failed.set()

    @contextmanager
    def _bound(self, address: str) -> Iterator[Bound]:
        bound = self._bind(address)
        try:
            yield bound
        finally:
            if isinstance(bound, socket.socket):
                bound.close()


def process_driver(settings: AgentSettings, role: WorkerRole) -> Driver:
    from hawker.worker.drivers.process import ProcessDriver

    return ProcessDriver(settings.directory / "process", cgroups=role.cgroups)


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
