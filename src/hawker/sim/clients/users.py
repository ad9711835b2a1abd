"""Users of apps in a simulation: requests at edges, at times that do not depend on the answers.

Load comes as a saw-tooth, with pauses in which machines fall asleep, and in bursts at one instant at several edges.
Each request is one connection. It ends with one answer, or visibly without one, within `END_S`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hawker.sim.clients.messages import message

DOMAIN = "apps.example"
PORT = 80
WAIT_S = 10.0
"""How long proxies hold a request."""
SILENT_S = 10.0
"""How long proxies wait for a machine that says nothing, for all services here."""
WORK_S = 6.0
"""The most that a request occupies its machine."""
END_S = WAIT_S + 3 * (WAIT_S + SILENT_S) + 30.0
"""How long a request may take to its end: held once, sent three times to a worker's proxy that holds it, too, and for
as many attempts to connect."""
RISE_S, PAUSE_S = 10.0, 12.0
LEAVE = 0.03
"""Share of users that do not wait for their answers."""


class Wish(NamedTuple):
    """A request to come."""

    at_s: float
    id: str
    edge: str
    app: str
    method: str
    work_s: float
    streamed: bool = False
    leaves_s: float = 0.0


@dataclass
class Outcome:
    """The outcome of one request. `status` 0: no answer came. `sent`: its edge took the connection. `over`: its edge
    has ended it."""

    wish: Wish
    sent_s: float
    ended_s: float = 0.0
    status: int = 0
    body: str = ""
    sent: bool = False
    over: bool = False
    left: bool = False
    more: bytes = b""  # what came after the answer
    cut: bool = False  # the answer broke off


def wishes(seed: str, app: str, edges: Sequence[str], seconds: float, peak: float) -> list[Wish]:
    """The load of one app: `peak` requests a second at the top of each tooth, and a burst in each pause and each
    rise."""
    rng = random.Random(f"{seed}/requests/{app}")
    times: list[tuple[float, str]] = []
    at_s, shift_s = 0.0, rng.uniform(0, RISE_S + PAUSE_S)
    while (at_s := at_s + rng.expovariate(peak)) < seconds:
        up = (at_s + shift_s) % (RISE_S + PAUSE_S) / RISE_S
        if rng.random() < (up if up < 1 else 0.0):
            times.append((at_s, rng.choice(edges)))
    at_s = 0.0
    while (at_s := at_s + rng.uniform(3, 14)) < seconds:
        times += [(at_s, edge) for edge in edges for _ in range(rng.randrange(1, 4))]
    found = []
    for number, (at_s, edge) in enumerate(sorted(times)):
        found.append(
            Wish(
                at_s=at_s,
                id=f"{app}-{number}",
                edge=edge,
                app=app,
                method=rng.choice(("GET", "GET", "POST", "PUT")),
                work_s=min(WORK_S, rng.choice((0.0, 0.01, rng.expovariate(4), rng.expovariate(1)))),
                streamed=rng.random() < 0.2,
                leaves_s=rng.uniform(0.01, 2) if rng.random() < LEAVE else 0.0,
            )
        )
    return found


def untimely(rng: random.Random, number: int, app: str, edges: Sequence[str]) -> Wish | None:
    """Draw a request that comes just when a machine of its app is being stopped or started, or a moment later."""
    if rng.random() < 0.4:
        return None
    return Wish(
        at_s=rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 1.0))),
        id=f"{app}-untimely-{number}",
        edge=rng.choice(edges),
        app=app,
        method=rng.choice(("GET", "POST")),
        work_s=rng.choice((0.0, rng.expovariate(4))),
    )


def early(rng: random.Random, number: int, app: str, edge: str) -> Wish:
    """Draw a request that comes just when an edge is started, or has begun to serve, or a moment later."""
    at_s = rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 1.0)))
    return Wish(at_s, f"{app}-early-{number}", edge, app, rng.choice(("GET", "POST")), 0.0)


class Users:
    """The users on one host. `outcomes` by request, in the order in which they were made."""

    def __init__(self, edges: Mapping[str, tuple[str, int]]) -> None:
        self._edges = edges
        self.outcomes: dict[str, Outcome] = {}

    async def run(self, wishes: Sequence[Wish]) -> None:
        """Make all requests, and wait for their ends. `at_s` counts from now."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asking = []
        for wish in wishes:
            if (wait_s := began_s + wish.at_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            asking.append(loop.create_task(self.ask(wish)))
        await asyncio.gather(*asking)

    async def ask(self, wish: Wish) -> None:
        loop = asyncio.get_running_loop()
        found = self.outcomes[wish.id] = Outcome(wish, loop.time())
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(wish.leaves_s or END_S):
                _, connection = await loop.create_connection(lambda: _Connection(wish), *self._edges[wish.edge])
                found.sent = True
                await connection.done
                found.over = True
        except TimeoutError:
            found.left = wish.leaves_s > 0
        except OSError:
            found.over = True  # its edge is not there
        found.ended_s = loop.time()
        if connection is not None:
            connection.tell(found)
            connection.transport.abort()

    def counts(self) -> Counter[str]:
        """Count requests by what the user saw."""
        return Counter(
            "left" if found.left else "cut" if found.cut else f"{found.status or 'no answer'}"
            for found in self.outcomes.values()
        )


class _Connection(asyncio.Protocol):
    """A user's connection for one request. `done` is set when the edge has closed it."""

    def __init__(self, wish: Wish) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._wish = wish
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        wish = self._wish
        body = wish.id.encode() if wish.method != "GET" else b""
        fields = [
            f"{wish.method} /{wish.id} HTTP/1.1",
            f"Host: {wish.app}.{DOMAIN}",
            f"X-Id: {wish.id}",
            f"X-App: {wish.app}",
            f"X-Work: {wish.work_s:.6f}",
            "Connection: close",
            *(["X-Streamed: yes"] if wish.streamed else []),
            *([f"Content-Length: {len(body)}"] if body else []),
        ]
        transport.write("\r\n".join(fields).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        self._came += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def tell(self, found: Outcome) -> None:
        whole = message(self._came)
        if whole is None:
            return
        lines, _, length, rest = whole
        found.status = int(lines[0].split(" ")[1])
        found.body, found.more = rest[:length].decode(), rest[length:]
        found.cut = len(rest) < length
