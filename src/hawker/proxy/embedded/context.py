"""What all connections and exchanges of a data plane share: each is given it, and knows nothing above it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import resource
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from hawker.core.connection_limits import ConnectionLimits, shares
from hawker.core.forwarding import Answer
from hawker.core.replay_cache import Cache
from hawker.core.trusted import Trusted
from hawker.host import Host
from hawker.proxy.base import Route, Router, ServicePort
from hawker.proxy.certificates import Certificates, SelfSigned
from hawker.proxy.embedded.access_log import AccessLog, RequestRecord
from hawker.proxy.embedded.body_budget import BodyBudget
from hawker.proxy.embedded.counters import Counters
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.tunnel import Tunnel
from hawker.proxy.embedded.uploads import Uploads
from hawker.proxy.embedded.upstreams import UpstreamPools

_ANSWERS_KEPT = 4096


class Connection(Protocol):
    """A client's connection, before it becomes a tunnel."""

    @property
    def busy(self) -> int:
        """How many requests are under way."""
        ...

    def drain(self, *, patiently: bool = False) -> None:
        """End the connection as soon as what is under way is answered; `patiently`: requests that may just come are
        answered, too."""
        ...

    def abort(self) -> None: ...


class Traces(Protocol):
    def add(self, record: RequestRecord) -> None:
        """A request is over that had to wait."""


class Challenges(Protocol):
    """Who orders certificates (`hawker.proxy.acme`)."""

    async def want(self, name: str) -> None:
        """See to it that this name has a certificate; returns when that was tried."""
        ...

    def answer(self, host: str, target: bytes) -> bytes | None:
        """The answer to a request that asks whether the name is ours; None: it asks for something else."""
        ...


class Observer(Protocol):
    """A data plane that stands before the embedded one, and learns from it what each app does."""

    def hinted(self, route: Route) -> None:
        """A machine has answered a request of this route with an interim answer first."""

    def handed_on(self, route: Route) -> None:
        """A machine has handed a request of this route on."""

    def secured(self, connection: Connection, port: int, name: str, route: Route) -> None:
        """TLS has begun for this name at a public port, and HTTP is spoken on this connection."""


class Unobserved:
    """The observer of an embedded plane that nothing stands before."""

    def hinted(self, route: Route) -> None: ...

    def handed_on(self, route: Route) -> None: ...

    def secured(self, connection: Connection, port: int, name: str, route: Route) -> None: ...


UNOBSERVED = Unobserved()


@dataclass(frozen=True, kw_only=True)
class PlaneParts:
    """What the embedded plane is made of. Without `certificates` only services that are content with self-signed ones
    are served over TLS. `traces` takes what requests waited for."""

    router: Router
    settings: Settings
    host: Host
    upstreams: UpstreamPools
    certificates: Certificates | None = None
    challenges: Challenges | None = None
    traces: Traces | None = None


class PlaneContext:
    """Made on the running loop."""

    def __init__(self, parts: PlaneParts, observer: Observer) -> None:
        host, settings = parts.host, parts.settings
        self.router = parts.router
        self.host = host
        self.upstreams = parts.upstreams
        self.challenges = parts.challenges
        self.traces = parts.traces
        self.observer = observer
        self.settings = settings
        self.certificates = parts.certificates
        self.trusted = Trusted(settings.trusted)
        self.self_signed = SelfSigned(host)
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.counters = Counters(self)
        self.access = AccessLog(settings.access_log, host, self.loop) if settings.access_log else None
        self.replays = Cache()
        self.remembers = False
        """Whether an app has ever asked that the way of its requests be remembered: most never do."""
        self.body_budget = BodyBudget(settings.replay_bytes_of_all)
        self.uploads = Uploads(settings, self.loop)
        self.limits = ConnectionLimits(
            settings.connections or shares(resource.getrlimit(resource.RLIMIT_NOFILE)[0])[1],
            settings.connections_of_one,
        )
        self.connections: dict[Connection, bytes] = {}
        """By connection the address that it is counted for."""
        self.tunnels: dict[Tunnel, bytes] = {}
        self.retiring: bool = False
        """Whether another process takes over: connections are not kept for further requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[int, tuple[ServicePort, Answer]] = {}
        self._one_left = asyncio.Event()
        self.prefix = f"{host.ulid()}".encode()
        self._numbers = itertools.count()
        self._suffix = b"-" + settings.region.encode() if settings.region else b""

    def address_of(self, transport: asyncio.Transport) -> bytes:
        """The address that a connection counts for; b"": it counts for nobody, as it brings many users, or is a part of
        another one."""
        address = b"" if transport.get_extra_info("socket") is None else peer_of(transport)
        return b"" if address in self.trusted else address

    def came(self, which: Connection | Tunnel, transport: asyncio.Transport, *, edge: bool = True) -> None:
        """This connection is open. Not `edge`: it is another proxy's."""
        address = self.address_of(transport) if edge else b""
        self.limits.count(address)
        if isinstance(which, Tunnel):
            self.tunnels[which] = address
        else:
            self.connections[which] = address

    def left(self, which: Connection | Tunnel) -> None:
        """This connection is closed, or another one goes on with what it had."""
        address = self.tunnels.pop(which, None) if isinstance(which, Tunnel) else self.connections.pop(which, None)
        if address is not None:
            self.limits.leave(address)
        self._one_left.set()

    async def left_by(self, remaining: Callable[[], object]) -> None:
        """Wait until none of those connections and tunnels remain; `remaining` is asked whenever one is closed."""
        while remaining():
            self._one_left.clear()
            await self._one_left.wait()

    async def close(self) -> None:
        """Wait for connections that were aborted, then end the tasks, and the access log."""
        await self.left_by(lambda: self.connections or self.tunnels)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.access is not None:
            self.access.close()
            self.access = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with the data plane."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def now_us(self) -> int:
        """The wall clock in microseconds since 1970."""
        return self.host.now_ms() * 1000

    def next_id(self) -> bytes:
        """The id of a request. It is unique, and no secret: which proxy and when it started, a number, the region."""
        return b"%b-%x%b" % (self.prefix, next(self._numbers), self._suffix)

    def websocket_key(self) -> bytes:
        """A key for a WebSocket of HTTP/1.1 whose other end speaks HTTP/2, which needs none (RFC 8441, 5.1)."""
        return base64.b64encode(self.host.rng.getrandbits(128).to_bytes(16, "big"))

    def answer_of(self, port: ServicePort) -> Answer:
        """What this public port changes in answers. There are few of these objects, and each lives with its app."""
        known = self._answers.get(id(port))
        if known is None or known[0] is not port:
            if len(self._answers) >= _ANSWERS_KEPT:
                self._answers.clear()
            answer = Answer(port.pristine, port.set_headers, port.removed_headers)
            known = self._answers[id(port)] = port, answer
        return known[1]


def peer_of(transport: asyncio.Transport) -> bytes:
    """The address that a connection comes from; an IPv4 address that is mapped into IPv6 as the IPv4 one."""
    peer = transport.get_extra_info("peername")
    text: str = peer[0] if peer else ""
    return text.removeprefix("::ffff:").encode()
