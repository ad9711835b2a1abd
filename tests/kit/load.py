"""A steady load on a proxy over raw sockets, on a schedule that waits for nobody, and an account of every request.

    async with steady(address, "web.localhost", rate=100) as load:
        await load.count(50)
        mark = load.now()
        ...  # a fault
        await load.flows(1.0)
    print(load.since(mark))

When request number n is sent follows from the rate alone, whatever became of the others. It goes over a connection that
is kept from one before it or a new one. Which method it has follows from its number. Each ends in one of these ways:

- `answered`: a whole answer, of whatever status;
- `cut`: the connection ended before the answer was whole;
- `refused`: no connection could be made, so that nothing was accepted;
- `stale`: a kept connection ended before a byte of the answer came. As browsers do, a request whose method is
  idempotent is then sent again on a new connection, and counts as what comes of that;
- `lost`: neither an answer nor an end within the limit.

Until then it is `waiting`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
from tests.kit.waiting import until

Address = tuple[str, int]
Outcome = Literal["waiting", "answered", "cut", "refused", "stale", "lost"]
Rate = float | Callable[[float], float]
"""Requests a second, or what they are so many seconds after the beginning."""
LIMIT_S = 30.0
SLOW_S = 0.25
"""An answer that takes longer is a sign that not all is well."""
IDEMPOTENT = frozenset(("GET", "HEAD", "PUT", "DELETE"))


class Sent(msgspec.Struct):
    """One request. `at` and `seconds` are of the load's clock, `by` is what the answer's body says."""

    number: int
    method: str
    at: float
    outcome: Outcome = "waiting"
    status: int = 0
    seconds: float = 0.0
    by: str = ""
    again: int = 0

    @property
    def fine(self) -> bool:
        return self.outcome == "answered" and self.status == 200

    @property
    def well(self) -> bool:
        """And at once."""
        return self.fine and self.seconds < SLOW_S


class Report(msgspec.Struct, frozen=True):
    """What became of requests. `failed` are idempotent ones that were accepted and got no 200, `recovered_s` the time
    from the mark to the last request that was not answered well and at once, `slowest_s` of those that were answered,
    `slowest_twice_s` of those that may be made twice."""

    sent: int
    fine: int
    failed: int
    cut: int
    stale: int
    refused: int
    lost: int
    statuses: dict[int, int]
    slowest_s: float
    slowest_twice_s: float
    slow: int
    recovered_s: float

    def __str__(self) -> str:
        others = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()) if status != 200)
        return (
            f"{self.sent} sent, {self.fine} fine, {self.slow} slow (most {self.slowest_s:.2f} s, of "
            f"idempotent ones {self.slowest_twice_s:.2f} s), {self.cut} cut, "
            f"{self.stale} stale, {self.refused} refused, {self.lost} lost, idempotent failed {self.failed}"
            f"{', ' + others if others else ''}; well after {self.recovered_s:.2f} s"
        )


class Load:
    """`all` are the requests so far, by number."""

    def __init__(self, address: Address, host: str, rate: Rate, methods: Sequence[str], limit_s: float) -> None:
        self.all: list[Sent] = []
        self._address = address
        self._host = host
        self._rate = rate
        self._methods = methods
        self._limit_s = limit_s
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._began = asyncio.get_running_loop().time()

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    async def count(self, number: int, seconds: float = LIMIT_S) -> None:
        """Until so many more were answered as they should be."""
        target = self._fine() + number
        await until(lambda: self._fine() >= target, seconds)

    async def flows(self, calm_s: float = 0.5, seconds: float = 60.0) -> None:
        """Until for so long no request has ended badly, and none that was sent before that is still under way."""

        def calm() -> bool:
            edge = self.now() - calm_s
            waiting = [one for one in self.all if one.outcome == "waiting" and one.at < self.now() - SLOW_S]
            ended = [one for one in self.all if one.outcome != "waiting" and one.at + one.seconds >= edge]
            return bool(ended) and not waiting and all(one.well for one in ended)

        loop = asyncio.get_running_loop()
        calm_at = loop.time() + calm_s
        await until(lambda: loop.time() >= calm_at and calm(), seconds)

    async def close(self) -> None:
        """Send no more, and wait for what is under way."""
        self._task.cancel()
        await asyncio.gather(self._task, *self._under_way, return_exceptions=True)
        for _, writer in self._kept:
            writer.close()

    def since(self, mark: float = 0.0) -> Report:
        """Of the requests that were under way at a moment, or were sent after it, and have ended."""
        those = [one for one in self.all if one.at + one.seconds >= mark and one.outcome != "waiting"]
        bad = [one for one in those if not one.well]
        outcomes = Counter(one.outcome for one in those)
        answered = [one for one in those if one.outcome == "answered"]
        return Report(
            sent=len(those),
            fine=sum(one.fine for one in those),
            failed=sum(one.method in IDEMPOTENT and one.outcome != "refused" and not one.fine for one in those),
            cut=outcomes["cut"],
            stale=outcomes["stale"],
            refused=outcomes["refused"],
            lost=outcomes["lost"],
            statuses=dict(Counter(one.status for one in answered)),
            slowest_s=max((one.seconds for one in answered), default=0.0),
            slowest_twice_s=max((one.seconds for one in answered if one.method in IDEMPOTENT), default=0.0),
            slow=sum(one.seconds >= SLOW_S for one in answered),
            recovered_s=max((max(one.at, mark) - mark for one in bad), default=0.0),
        )

    def by(self, mark: float = 0.0) -> Counter[str]:
        """How many answers each machine gave to requests that were sent after a moment."""
        return Counter(one.by for one in self.all if one.at >= mark and one.fine)

    def slowest(self, mark: float, method: str) -> float:
        """Seconds, of those that were under way at a moment, or were sent after it."""
        return max(one.seconds for one in self.all if one.method == method and one.at + one.seconds >= mark)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _fine(self) -> int:
        return sum(one.fine for one in self.all)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        number, due = 0, self._began
        while True:
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            one = Sent(number, self._methods[number % len(self._methods)], due - self._began)
            self.all.append(one)
            task = loop.create_task(self._send(one))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            number += 1
            due += 1 / (self._rate(due - self._began) if callable(self._rate) else self._rate)

    async def _send(self, one: Sent) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                one.outcome = await self._try(one)
                while one.outcome == "stale" and one.method in IDEMPOTENT:
                    one.again += 1
                    one.outcome = await self._try(one)
        except TimeoutError:
            one.outcome = "lost"
        one.seconds = self.now() - one.at

    async def _try(self, one: Sent) -> Outcome:
        kept = bool(self._kept) and not one.again
        try:
            reader, writer = self._kept.pop() if kept else await asyncio.open_connection(*self._address)
        except OSError:
            return "refused"
        heard = False
        try:
            body = b"0123456789" if one.method in ("POST", "PUT") else b""
            length = f"content-length: {len(body)}\r\n" if body else ""
            head = f"{one.method} /{one.number} HTTP/1.1\r\nhost: {self._host}\r\n{length}\r\n"
            writer.write(head.encode() + body)
            raw = await reader.readuntil(b"\r\n\r\n")
            heard = True
            status, fields = parsed(raw)
            one.by = (await reader.readexactly(int(fields.get("content-length", "0")))).decode()
            one.status = status
        except (OSError, EOFError) as error:
            writer.close()
            said = heard or bool(getattr(error, "partial", b""))
            return "cut" if said or not kept else "stale"
        except BaseException:
            writer.close()
            raise
        if fields.get("connection", "").lower() == "close" or reader.at_eof():
            writer.close()
        else:
            self._kept.append((reader, writer))
        return "answered"


def parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and fields of an answer's head, names in lower case."""
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first[9:12]), {name.lower(): value.strip() for name, _, value in pairs}


@asynccontextmanager
async def steady(
    address: Address, host: str, *, rate: Rate, methods: Sequence[str] = ("GET",), limit_s: float = LIMIT_S
) -> AsyncIterator[Load]:
    """Requests at a rate, to the block's end; those under way then are waited for."""
    load = Load(address, host, rate, methods, limit_s)
    try:
        yield load
    finally:
        await load.close()


async def at_once(addresses: Sequence[Address], host: str, count: int, limit_s: float = LIMIT_S) -> Counter[int]:
    """So many requests in one moment, at these addresses by turns, each on a connection of its own that is open before.
    Statuses; 0 for no answer."""
    pairs = [await asyncio.open_connection(*addresses[n % len(addresses)]) for n in range(count)]
    for _, writer in pairs:
        writer.write(f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    async with asyncio.timeout(limit_s):
        answers = await asyncio.gather(*(reader.read(-1) for reader, _ in pairs), return_exceptions=True)
    for _, writer in pairs:
        writer.close()
    return Counter(int(raw[9:12]) if isinstance(raw, bytes) and len(raw) > 12 else 0 for raw in answers)
