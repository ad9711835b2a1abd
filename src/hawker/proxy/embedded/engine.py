"""The embedded data plane as a whole: its listeners, what they share, and how it ends.

engine = Engine(router, Settings(region="ams", token="..."))
await engine.listen("0.0.0.0", 8080, public=80)
await engine.listen_backhaul("0.0.0.0", 4290)
...
await engine.close()
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from hawker.core.forwarding import Answer
from hawker.core.replay_cache import Cache
from hawker.host import Host
from hawker.listening import close_gently
from hawker.proxy.base import Address, Route, Router, ServicePort
from hawker.proxy.certificates import Certificates, SelfSigned
from hawker.proxy.embedded.access import AccessLog
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.counters import Counters
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.greeting import Greeter
from hawker.proxy.embedded.h2_client import H2Connection
from hawker.proxy.embedded.h2_machine import H2Pool
from hawker.proxy.embedded.inlets import Backhaul, Inlet, Public, answer_of, peer_of
from hawker.proxy.embedded.plain import PlainConnection
from hawker.proxy.embedded.pool import Pool
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.tunnel import Tunnel

_ANSWERS_KEPT = 4096
PATIENCE_S = 1.0
"""How long a connection may be silent that is to end, so that what its client sends in this moment is answered."""
BACKLOG = 4096
"""Connections that wait to be accepted, bounded by net.core.somaxconn: a sleeping app gets a thousand at once."""


class Connection(Protocol):
    """A client's, before it becomes a tunnel."""

    @property
    def busy(self) -> int:
        """How many requests are under way."""
        ...

    def drain(self, *, patiently: bool = False) -> None:
        """End it, as soon as what is under way is answered; `patiently`: what may just come, too."""
        ...

    def abort(self) -> None: ...


class Engine:
    """Made on the running loop. What it shares with its connections is public, for them only."""

    def __init__(
        self, router: Router, settings: Settings, host: Host, certificates: Certificates | None = None
    ) -> None:
        """Without `certificates` TLS is spoken for services alone that are content with certificates of no worth."""
        self.router = router
        self.settings = settings
        self.certificates = certificates
        self.self_signed = SelfSigned(host)
        self.issue: Callable[[str], Awaitable[None]] | None = None
        """Sees to it that a name has a certificate, and returns when that is tried."""
        self.challenged: Callable[[str, bytes], bytes | None] | None = None
        """What a host's target is answered that asks whether the name is ours; None: it asks for something else."""
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.counters = Counters(self)
        self.access = AccessLog(settings.access_log, host, self.loop) if settings.access_log else None
        self.replays = Cache()
        self.remembers = False
        """Whether an app has ever asked that the way of its requests be remembered: most never do."""
        self.kept_bytes = 0
        """Of requests' bodies, to be sent once more."""
        self.pool = Pool(settings, self.loop)
        self.h2_pool = H2Pool(settings, self.loop)
        self.connections: dict[Connection, None] = {}
        self.tunnels: dict[Tunnel, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._at: dict[Address, list[asyncio.Server]] = {}
        self.retiring: bool = False
        """Whether another one takes its place at once: connections are not kept for further requests."""
        self._leaving: dict[Connection | Tunnel, None] = {}
        self._answers: dict[int, tuple[ServicePort, Answer]] = {}
        self._one_left = asyncio.Event()
        self._host = host
        self._prefix = f"{host.ulid()}".encode()
        self._numbers = itertools.count()
        self._suffix = b"-" + settings.region.encode() if settings.region else b""

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        """Serve users at this address as the public port `public`, which apps share. `port` 0: any. Returns the
        address. What a connection speaks is seen by what it says."""
        return await self._listen(lambda: Greeter(self, public), host, port)

    async def listen_own(self, host: str, port: int, *, public: int) -> Address:
        """The same for a public port that one app has to itself."""
        return await self._listen(lambda: Greeter(self, public, own=True), host, port)

    async def listen_plain(self, host: str, port: int, *, public: int) -> Address:
        """Pass bytes between whoever connects here and the machines that serve the public port `public`."""
        return await self._listen(lambda: PlainConnection(self, public), host, port)

    async def listen_backhaul(self, host: str, port: int) -> Address:
        """Serve other proxies of the cluster at this address."""

        def inlet(transport: asyncio.Transport) -> Inlet:
            return Backhaul(self, peer_of(transport))

        return await self._listen(lambda: ClientConnection(self, inlet), host, port)

    def http1(self, public: int, *, secure: bool, app: str = "") -> ClientConnection:
        """For a connection that speaks HTTP/1.1; over TLS, made for `app`."""
        return ClientConnection(self, lambda transport: Public(self, public, peer_of(transport), secure, app))

    def http2(self, public: int, *, secure: bool, app: str = "") -> H2Connection:
        """For one that speaks HTTP/2."""
        return H2Connection(self, public, secure, app)

    async def _listen(self, made: Callable[[], asyncio.Protocol], host: str, port: int) -> Address:
        servers = await self._host.listening.serve(made, host, port, backlog=BACKLOG)
        self._servers += servers
        address = _address(servers[0])
        self._at[address] = servers
        return address

    def stop(self, address: Address) -> None:
        """Take no more connections at this address. Those that are open stay."""
        for server in self._at.pop(address, []):
            server.close()
            self._servers.remove(server)

    async def retire(self) -> None:
        """Before `close`, when another one takes the listening sockets over: end the connections that there are within
        the settings' `drain_s`. New ones are served meanwhile, each for one request: nobody waits for those that take
        long."""
        self.retiring = True
        self._leaving = dict.fromkeys((*self.connections, *self.tunnels))
        try:
            for connection in list(self.connections):
                connection.drain(patiently=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(PATIENCE_S, self.settings.drain_s)):
                    await self._all_left(self._leaving)
            for left in list(self._leaving):
                if not isinstance(left, Tunnel):
                    left.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_s - PATIENCE_S):
                    await self._all_left(self._leaving)
        except asyncio.CancelledError:
            self.retiring = False  # there is no other one
            raise

    async def close(self) -> None:
        """Take no more connections, finish what is in flight within the settings' `drain_s`, then cut the rest. After
        `retire` it is a matter of `pause_s`, in which new connections wait, and tunnels have had their time."""
        await close_gently(self._servers)
        if self.retiring:
            for connection in list(self.connections):
                connection.drain(patiently=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(PATIENCE_S, self.settings.pause_s)):
                    await self._all_left(self.connections)
        for connection in list(self.connections):
            connection.drain()
        self.pool.close()
        self.h2_pool.close()
        with suppress(TimeoutError):
            if self.retiring:
                async with asyncio.timeout(self.settings.pause_s):
                    await self._all_left(self.connections)
            else:
                async with asyncio.timeout(self.settings.drain_s):
                    await self._all_left(self.connections, self.tunnels)
        for connection in list(self.connections):
            connection.abort()
        for tunnel in list(self.tunnels):
            tunnel.abort()
        await self._all_left(self.connections, self.tunnels)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.access is not None:
            self.access.close()
            self.access = None

    async def _all_left(self, *those: Collection[Any]) -> None:
        while any(those):
            self._one_left.clear()
            await self._one_left.wait()

    # --- for connections and exchanges -------------------------------------------------------------------------------

    def left(self, which: Connection | Tunnel) -> None:
        """This one is closed."""
        self._leaving.pop(which, None)
        if isinstance(which, Tunnel):
            self.tunnels.pop(which, None)
        else:
            self.connections.pop(which, None)
        self._one_left.set()

    def now_us(self) -> int:
        """Wall clock, microseconds since 1970."""
        return self._host.now_ms() * 1000

    def next_id(self) -> bytes:
        """Of a request: unique, no secret. Which proxy and when it started, a number, the region."""
        return b"%b-%x%b" % (self._prefix, next(self._numbers), self._suffix)

    def websocket_key(self) -> bytes:
        """For a WebSocket of HTTP/1.1 whose other end is one of HTTP/2, which needs none (RFC 8441, 5.1)."""
        return base64.b64encode(self._host.rng.getrandbits(128).to_bytes(16, "big"))

    def answer_of(self, port: ServicePort) -> Answer:
        """What this public port does to answers. There are few of them, each an object that lives with its app."""
        known = self._answers.get(id(port))
        if known is None or known[0] is not port:
            if len(self._answers) >= _ANSWERS_KEPT:
                self._answers.clear()
            known = self._answers[id(port)] = port, answer_of(port)
        return known[1]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def let_go(self, address: Address, asleep: bool) -> None:
        """The machine at this address is put to rest: keep no connection to it. `asleep`: it answers nothing more."""
        self.pool.let_go(address, asleep)
        self.h2_pool.let_go(address)

    def unanswered(self) -> dict[Address, float]:
        """Where requests wait for the first byte of an answer, and for how many seconds the longest."""
        return self.pool.unanswered()

    def give_up(self, address: Address) -> None:
        """The proxy at this address says nothing at all."""
        self.pool.give_up(address, "its worker's proxy says nothing")

    def handed_on(self, route: Route) -> None:
        """A machine has handed a request of this route on."""

    def done(self, exchange: Exchange) -> None:
        """A request is over."""
        first_s = exchange.first - exchange.begun if exchange.first else -1.0
        self.counters.answered(exchange.status, first_s)
        if self.access is not None:
            total_s = self.now() - exchange.begun
            self.access.add(
                exchange.client,
                exchange.request,
                exchange.request_id,
                exchange.status,
                exchange.bytes,
                exchange.app,
                exchange.machine,
                first_s,
                total_s,
            )


def _address(server: asyncio.Server) -> Address:
    address: Address = server.sockets[0].getsockname()[:2]
    return address
