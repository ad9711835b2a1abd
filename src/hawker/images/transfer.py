"""Fetches one blob from other workers, from mirrors, from the registry, until its bytes are those of its digest.

Whoever is asked goes on where the one before stopped. Bytes that turn out to be wrong are thrown away, all of them, for
nobody can tell whose they were; then the whole is asked for from one source alone.

Many may want a blob, each with a repository that has it. One source is asked, and left for the next when it brings less
than `SLOW_BYTES_PER_S` over `slow_timeout_s`: a source that trickles holds up no image that can have the blob from
another. When all sources are slow they are asked again in turns: the best one lately keeps its turn for longer each
time, and the others are tried in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from hawker.errors import HawkerError, ImageError, StoreError, Unreachable
from hawker.images.blobs import PIECE_BYTES, Blobs, CorruptBlob, Partial
from hawker.images.endpoint import Endpoint
from hawker.images.http import Again
from hawker.images.registry import Body, RangeRefused, Registries
from hawker.images.settings import ImageSettings
from hawker.model.image import Descriptor
from hawker.model.values import ImageRef
from hawker.telemetry import get_logger

_logger = get_logger()
T = TypeVar("T")

Peer = Callable[[str, int, int], Awaitable[AsyncIterator[bytes] | None]]
"""Somebody who may have a blob: `(digest, size, offset)` gives its bytes from `offset` on, or None. `size` 0: unknown,
which is so for manifests. Any exception counts as "no"."""

PROGRESS_BYTES = 64 << 10
"""The least that a source must bring within a read time-out, unless less is missing: trickling is no progress."""
SLOW_BYTES_PER_S = 64 << 10
"""A source that brings less is left for another one that may have the blob, if there is one."""
ROUNDS_MOST = 8
"""The longest turn of a slow source is `slow_timeout_s` doubled so often."""
SLOW_S = 60.0
"""For how long a registry that was left is asked after the others."""
SMALL_BYTES = 256 << 10
"""Such a blob does not wait for its turn: a configuration is asked for before anything else can be."""
_CORRUPT_MAX = 2
_PATIENCE_PEER_S = 10.0

Moved = Callable[[int], None]
"""Told how many bytes of a blob are here now."""


Repositories = Callable[[], Sequence[ImageRef]]
"""The repositories that may have a blob now: each image that comes to want the blob adds its own."""


class Rate:
    """Bytes per second of recent transfers, however many run side by side: an exponentially weighted mean. 0 before
    the first; `expected` has a guess for that."""

    _GUESS = 12.5e6
    """100 Mbit/s."""
    _WEIGHT = 0.3
    _SAMPLE_S = 0.5
    _SAMPLE_BYTES = 256 << 10

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._active = 0
        self._since = 0.0
        self._bytes = 0

    @property
    def expected(self) -> float:
        return self.bytes_per_s or self._GUESS

    def begin(self, now_s: float) -> None:
        if self._active == 0:
            self._since, self._bytes = now_s, 0
        self._active += 1

    def moved(self, count: int, now_s: float) -> None:
        self._bytes += count
        if now_s - self._since >= self._SAMPLE_S:
            self._sample(now_s)

    def end(self, now_s: float) -> None:
        self._active -= 1
        if self._active == 0:
            self._sample(now_s)

    def _sample(self, now_s: float) -> None:
        took_s = now_s - self._since
        if self._bytes >= self._SAMPLE_BYTES and took_s > 0:
            rate = self._bytes / took_s
            self.bytes_per_s += (rate - self.bytes_per_s) * (self._WEIGHT if self.bytes_per_s else 1.0)
        self._since, self._bytes = now_s, 0


class Slow(Exception):
    """A source brings hardly anything (`rate` bytes a second), and there is another. With None, the source's turn had
    not come yet."""

    def __init__(self, rate: float | None = None) -> None:
        super().__init__()
        self.rate = rate


@dataclass(frozen=True)
class _Source:
    """A peer, by its number, or an endpoint of a repository; `last`: the registry itself, no mirror of it."""

    peer: int = -1
    ref: ImageRef | None = None
    to: Endpoint | None = None
    last: bool = False

    @property
    def gate(self) -> str:
        return self.ref.registry if self.ref else ""


@dataclass
class _Fetch:
    """One blob on its way. `received`: bytes that came, from anybody. `patience_s`: with whoever is asked now."""

    blob: Descriptor
    partial: Partial
    moved: Moved
    received: int = 0
    patience_s: float = 0.0


class Transfers:
    """Blobs on their way to a host, of each registry `parallel` at once: a slow one holds up nobody else."""

    def __init__(self, blobs: Blobs, registries: Registries, peers: Sequence[Peer], settings: ImageSettings) -> None:
        self._blobs = blobs
        self._registries = registries
        self._peers = peers
        self._settings = settings
        self._gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by registry
        self._slow: dict[str, float] = {}  # until when, by origin
        self.rate = Rate()

    async def fetch(self, repositories: Repositories, blob: Descriptor, moved: Moved) -> None:
        """Have a blob. Without repositories only other workers may have it.

        Raises `ImageError`, `Unreachable`, `DiskFull`, `StoreError`. Bytes that came are kept when more may come later.
        """
        fetch = _Fetch(blob, Partial(self._blobs, blob.digest), moved)
        try:
            await self._from_any(fetch, repositories)
        except (StoreError, ImageError):
            fetch.partial.discard()  # gives the room back
            raise
        finally:
            fetch.partial.close()

    async def _from_any(self, fetch: _Fetch, repositories: Repositories) -> None:
        peers = list(self._peers)
        asked: set[_Source] = set()
        slow: dict[_Source, float] = {}  # what each brings a second
        turns: list[_Source] = []  # of those that were slow
        rounds = 0
        reason: HawkerError | None = None

        def others() -> list[_Source]:
            """The sources that were not asked yet. Registries that were slow lately come last."""
            found = [_Source(peer=number) for number in range(len(peers))]
            found += sorted(self._sources(repositories()), key=self._was_slow)
            return [source for source in found if source not in asked]

        while True:
            fetch.patience_s = self._settings.slow_timeout_s
            if found := others():
                source = found[0]
            elif turns:
                source = turns.pop(0)
            elif slow:
                source, *turns = sorted(slow, key=lambda each: -slow[each])
                slow.clear()
                rounds += 1
                fetch.patience_s *= 2 ** min(rounds, ROUNDS_MOST)
            else:
                raise reason or Unreachable(f"no other worker has {fetch.blob.digest}")
            asked.add(source)
            try:
                if await self._from(source, peers, fetch, partial(_elsewhere, others, [*turns, *slow])):
                    return
            except Slow as error:
                slow[source] = error.rate or 0.0
                if source.to and error.rate is not None:
                    now_s = self._now_s()
                    self._slow = {origin: until for origin, until in self._slow.items() if until > now_s}
                    self._slow[source.to.origin] = now_s + SLOW_S
                    _logger.info("image.source_slow", blob=fetch.blob.digest, source=source.to.host)
            except StoreError:
                raise
            except HawkerError as error:
                assert source.to is not None
                if source.last:
                    reason = reason or error
                else:
                    self._registries.passed_over(source.to, error)

    def _sources(self, repositories: Sequence[ImageRef]) -> list[_Source]:
        found: dict[tuple[Endpoint, str], _Source] = {}
        for ref in repositories:
            *mirrors, registry = self._registries.endpoints(ref)
            for to in mirrors:
                found.setdefault((to, ref.repository), _Source(ref=ref, to=to))
            found.setdefault((registry, ref.repository), _Source(ref=ref, to=registry, last=True))
        return list(found.values())

    def _was_slow(self, source: _Source) -> bool:
        return source.to is not None and self._slow.get(source.to.origin, 0.0) > self._now_s()

    async def _from(
        self, source: _Source, peers: Sequence[Peer], fetch: _Fetch, others: Callable[[], Sequence[_Source]]
    ) -> bool:
        """Whether it brought all that was missing; a registry that does not, raises. Raises `Slow`."""
        async with self._turn(source.gate, fetch, others):
            if source.ref is None or source.to is None:
                return await self._from_peer(peers[source.peer], fetch, lambda: any(other.to for other in others()))
            work = self._from_registry(source.ref, source.to, fetch, source.last)
            await self._unless_slow(work, fetch, lambda: bool(others()))
            return True

    @asynccontextmanager
    async def _turn(
        self, name: str, fetch: _Fetch, others: Callable[[], Sequence[_Source]]
    ) -> AsyncGenerator[None, None]:
        """Raises `Slow` when it does not come, and another source has a gate of its own."""
        gate = self._gates.setdefault(name, asyncio.Semaphore(self._settings.parallel))
        small = fetch.blob.size <= SMALL_BYTES
        while not small:
            try:
                async with asyncio.timeout(fetch.patience_s):
                    await gate.acquire()
                break
            except TimeoutError as error:
                if any(other.gate != name for other in others()):
                    raise Slow from error
        self.rate.begin(self._now_s())
        try:
            if not fetch.partial.is_open:
                await fetch.partial.open()
            yield
        finally:
            self.rate.end(self._now_s())
            if not small:
                gate.release()

    async def _unless_slow(self, work: Coroutine[None, None, T], fetch: _Fetch, elsewhere: Callable[[], bool]) -> T:
        """Raises `Slow` when it is, and `elsewhere` says that there is another source; then nothing of it goes on."""
        loop, every_s = asyncio.get_running_loop(), fetch.patience_s
        timer: asyncio.TimerHandle
        rate = 0.0

        def look(before: int) -> None:
            nonlocal timer, rate
            missing = fetch.partial.offset < fetch.blob.size
            rate = (fetch.received - before) / every_s
            if missing and rate < SLOW_BYTES_PER_S and elsewhere():
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(every_s, look, fetch.received)

        timer = loop.call_later(every_s, look, fetch.received)
        try:
            async with asyncio.timeout(None) as limit:
                return await work
        except TimeoutError as error:
            if limit.expired():
                raise Slow(rate) from error
            raise
        finally:
            timer.cancel()

    async def _from_peer(self, peer: Peer, fetch: _Fetch, elsewhere: Callable[[], bool]) -> bool:
        """Whether a peer brought all that was missing. No patience: there is a registry."""
        blob, file = fetch.blob, fetch.partial
        if file.offset > blob.size:
            await file.restart()
        try:
            async with asyncio.timeout(_PATIENCE_PEER_S):
                pieces = await peer(blob.digest, blob.size, file.offset)
            if pieces is None:
                return False
            await self._unless_slow(self._take(blob.digest, Body(file.offset, None, pieces), fetch), fetch, elsewhere)
            await file.finish()
            return True
        except (StoreError, Slow, asyncio.CancelledError):
            raise
        except CorruptBlob as error:
            _logger.warning("image.peer_corrupt", blob=blob.digest, found=error.found)
            await file.open()
        except Exception as error:  # a peer is a convenience: whatever is wrong with it, there are others to ask
            _logger.info("image.peer_failed", blob=blob.digest, problem=repr(error))
        return False

    async def _from_registry(self, ref: ImageRef, to: Endpoint, fetch: _Fetch, last: bool) -> None:
        blob, file = fetch.blob, fetch.partial
        patience = self._registries.patience(last)
        corrupt = 0
        while True:
            before = file.offset
            try:
                if file.offset > blob.size:
                    await file.restart()
                if file.offset < blob.size or blob.size == 0:
                    async with self._registries.blob(ref, to, blob.digest, file.offset) as body:
                        if body.total is not None and body.total != blob.size:
                            problem = f"{to.host} has {body.total} bytes of {blob.digest}, which has {blob.size}"
                            raise ImageError(str(ref), problem)
                        await self._take(str(ref), body, fetch)
                await file.finish()
                return
            except Again as error:
                if isinstance(error, RangeRefused):
                    await file.restart()
                if file.offset - before >= PROGRESS_BYTES:
                    patience.progress()
                await patience.wait(error)
            except CorruptBlob as error:
                corrupt += 1
                if corrupt >= _CORRUPT_MAX:
                    problem = f"{to.host} sends {blob.digest} with other bytes: they have the digest {error.found}"
                    raise ImageError(str(ref), problem) from error
                await file.open()

    async def _take(self, image: str, body: Body, fetch: _Fetch) -> None:
        """Write what comes; what is here already is skipped. Raises `Again` when it is less than the whole."""
        blob, file = fetch.blob, fetch.partial
        loop, most_s = asyncio.get_running_loop(), self._settings.read_timeout_s
        at, end = body.offset, file.offset  # of what was received, and of what is written or held
        began_s, began_at = loop.time(), at
        held = bytearray()
        async with aclosing(_timely(body.pieces, most_s)) as pieces:
            try:
                async for piece in pieces:
                    at += len(piece)
                    fetch.received += len(piece)
                    if at > blob.size:
                        raise ImageError(image, f"more than the {blob.size} bytes of {blob.digest} were sent")
                    if at > end:
                        held += piece[end - at :]
                        end = at
                    if len(held) >= PIECE_BYTES:
                        full, held = held, bytearray()
                        await self._write(fetch, full)
                    if (now_s := loop.time()) - began_s > most_s:
                        if at - began_at < PROGRESS_BYTES:
                            raise Again(f"a source of {blob.digest} sends hardly anything")
                        began_s, began_at = now_s, at
            finally:
                if held:
                    await self._write(fetch, held)
        if at < blob.size:
            raise Again(f"a source of {blob.digest} ended {blob.size - at} bytes early")

    async def _write(self, fetch: _Fetch, data: bytearray) -> None:
        await fetch.partial.write(data)
        self.rate.moved(len(data), self._now_s())
        fetch.moved(fetch.partial.offset)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _elsewhere(others: Callable[[], list[_Source]], left: Sequence[_Source]) -> list[_Source]:
    """The sources that may have it besides the one that is asked, including those that were left for it."""
    return [*others(), *left]


async def _timely(pieces: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the same pieces. Raises `Again` when one takes longer than `seconds`."""
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise Again(f"nothing came for {seconds:g} s") from error
            yield piece
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()
