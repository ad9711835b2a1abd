"""What a data plane asks of routing, and what it is told.

    route = router.find(Asked(port=80, host="web.example", ...))
    lease = route.take(tried) or await route.obtain(tried, deadline)
    ... connect to lease.address, add lease.headers, pass the request on ...
    lease.release()                                     # or lease.failed(...), then the next one

Everything up to `take` is one look-up in memory without waiting: it lies on the path of every request. `obtain` may
hold the request while a machine starts.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec

from hawker.core.retrying import Failure as Failure
from hawker.core.routing import ANY as ANY
from hawker.core.routing import Wishes as Wishes
from hawker.errors import HawkerError
from hawker.model.services import ALPN, TLS_VERSIONS, ReplayCache

Address = tuple[str, int]
Header = tuple[bytes, bytes]
"""A field's name in lower case and its value, as they go over the wire."""


class Refused(HawkerError):
    """No machine takes the request. `status` is the answer's, `code` one of the proxy's own ("PR01" and so on, as in
    the documentation of Fly's proxy), `retry_after_s` goes into Retry-After."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Waiting(msgspec.Struct, frozen=True):
    """What those know of a request that start a machine for it: its id, and what it says of a trace (W3C `traceparent`,
    "" for nothing)."""

    id: str = ""
    trace: str = ""


NOBODY = Waiting()


class Lease(Protocol):
    """One request at one machine. It counts as in flight until `release` or `failed`, whichever comes first; after that
    both do nothing.

    `address` is the machine's own where this proxy is its worker's, else that of its worker's proxy. `headers` are the
    backhaul's: they are added to the request in place of any with the same names; a machine itself gets none. `phases`
    are the seconds that look-up, start, and readiness took, by name, for the answer's timing header.
    """

    machine: str
    region: str
    address: Address
    headers: tuple[Header, ...]
    phases: dict[str, float]

    @property
    def load(self) -> bytes:
        """What the machine has in flight, and its limits, in the form of `hawker-load`: b"3/20/25"; b"" if not
        known."""
        ...

    @property
    def others(self) -> int:
        """How many requests wait for room, if the machine has none left."""
        ...

    def heard(self, load: bytes) -> None:
        """`hawker-load` of an answer that came by way of the machine's proxy; b"" when the answer only said what became
        of the machine."""
        ...

    def release(self) -> None: ...

    def failed(self, how: Failure) -> None: ...


class Route(Protocol):
    """A service of an app, as one public port shows it. A route is valid for one request: ask again for the next."""

    app: str
    port: ServicePort

    def take(self, wishes: Wishes = ANY, tried: Collection[str] = ()) -> Lease | None:
        """Take a machine that runs and has room below its soft limit, at once. None: there is none, `obtain` one
        then."""
        ...

    async def obtain(
        self, wishes: Wishes = ANY, tried: Collection[str] = (), *, deadline: float, request: Waiting = NOBODY
    ) -> Lease:
        """Hold the request until a machine takes it, at most until `deadline` (of the loop's clock). Starts one where
        none can, and names `request` as the cause of that. Raises `Refused`; when it is cancelled, what it
        held is released."""
        ...


class ServicePort(msgspec.Struct, frozen=True, kw_only=True):
    """What a data plane needs to know of a service's public port. `handlers` are as in the machines' configuration;
    none: bytes pass as they come. Times are in seconds."""

    handlers: tuple[str, ...] = ()
    force_https: bool = False
    h2_backend: bool = False
    proxy_protocol: Literal["", "v1", "v2"] = ""
    idle_timeout_s: float = 60.0
    headers_read_timeout_s: float = 10.0
    pristine: bool = False
    compress: bool = False
    set_headers: tuple[Header, ...] = ()
    removed_headers: frozenset[bytes] = frozenset()
    alpn: tuple[str, ...] = ALPN
    tls_versions: tuple[str, ...] = TLS_VERSIONS
    self_signed: bool = False
    replay_cache: tuple[ReplayCache, ...] = ()


class Upstreams(Protocol):
    """The connections to machines and to other proxies that a proxy keeps, by their addresses."""

    def offer(self, address: Address, sock: socket.socket) -> None:
        """Keep this connection for the request that waits for the machine at `address`."""
        ...

    def let_go(self, address: Address, asleep: bool) -> None:
        """The machine at this address is put to rest: keep no connection to it. `asleep`: it answers nothing more."""
        ...

    def unanswered(self) -> Mapping[Address, float]:
        """Where requests wait for the first byte of an answer, and for how many seconds the longest."""
        ...

    def give_up(self, address: Address, problem: str, *, waited_s: float = 0.0, every: bool = False) -> None:
        """Nobody at this address answers: requests that have waited there for `waited_s`, and may be made elsewhere,
        are made elsewhere; `every`: the others get an error."""
        ...


class NoUpstreams:
    """The upstreams of a part that keeps no connections."""

    def offer(self, address: Address, sock: socket.socket) -> None:
        sock.close()

    def let_go(self, address: Address, asleep: bool) -> None: ...

    def unanswered(self) -> Mapping[Address, float]:
        return {}

    def give_up(self, address: Address, problem: str, *, waited_s: float = 0.0, every: bool = False) -> None: ...


NO_UPSTREAMS = NoUpstreams()


class Router(Protocol):
    """Finds routes. `find` raises `Refused` (404 for a host or a port that nobody serves)."""

    def find(self, port: int, host: str) -> Route | None:
        """The route of `host` (without its port, lower case; for bytes the server name of TLS, or "") at a public port.
        None: this app was not asked for before; `await load(port, host)` gives it then."""
        ...

    async def load(self, port: int, host: str) -> Route: ...

    async def other(self, route: Route, app: str) -> Route:
        """The route of another app at the same public port, to which a machine of `route` hands a request on
        (`fly-replay: app=`). Raises `Refused`: PA04 there is none, PA05 it is not that organization's."""
        ...

    def inner(self, app: str, port: int, machine: str) -> Route:
        """The route of a request that came over the backhaul, for this app and public port, and for this machine of
        this worker; with an empty machine this proxy chooses within the region. Raises `Refused` with code "elsewhere"
        when the machine is not this worker's, or is gone."""
        ...
