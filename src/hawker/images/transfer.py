"""Getting one blob: from other workers, from mirrors, from the registry, until its bytes are those of its digest.

Whoever is asked goes on where the one before stopped. Bytes that turn out to be wrong are thrown away, all of them, for
nobody can tell whose they were; then the whole is asked for from one source alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, nullcontext
from weakref import WeakValueDictionary

from hawker.errors import HawkerError, ImageError, StoreError, Unreachable
from hawker.images.blobs import PIECE_BYTES, Blobs, CorruptBlob, Partial
from hawker.images.http import Again, Endpoint
from hawker.images.registry import Body, Patience, RangeRefused, Registries
from hawker.model.image import Descriptor
from hawker.model.values import ImageRef
from hawker.telemetry import get_logger

_logger = get_logger()

Peer = Callable[[str, int, int], Awaitable[AsyncIterator[bytes] | None]]
"""Somebody who may have a blob: `(digest, size, offset)` gives its bytes from `offset` on, or None. `size` 0: unknown,
which is so for manifests. What it raises is taken for "no"."""

PROGRESS_BYTES = 64 << 10
"""A source must bring so much, or the rest, within a read time-out: trickling is no progress."""
SMALL_BYTES = 256 << 10
"""Such a blob does not wait for its turn: a configuration is asked for before anything else can be."""
_CORRUPT_MAX = 2
_PATIENCE_PEER_S = 10.0

Moved = Callable[[int], None]
"""Told how many bytes of a blob are here now."""


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


class Transfers:
    """Blobs on their way to a host, of each registry `parallel` at once: a slow one holds up nobody else."""

    def __init__(
        self, blobs: Blobs, registries: Registries, peers: Sequence[Peer], parallel: int, read_timeout_s: float
    ) -> None:
        self._blobs = blobs
        self._registries = registries
        self._peers = peers
        self._parallel = parallel
        self._gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by registry
        self._read_timeout_s = read_timeout_s
        self.rate = Rate()

    async def fetch(self, ref: ImageRef | None, blob: Descriptor, moved: Moved) -> None:
        """Have a blob. `ref` names the repository it is in; None: only other workers may have it.

        Raises `ImageError`, `Unreachable`, `DiskFull`, `StoreError`. Bytes that came are kept when more may come later.
        """
        gate = self._gates.setdefault(ref.registry if ref else "", asyncio.Semaphore(self._parallel))
        async with gate if blob.size > SMALL_BYTES else nullcontext():
            partial = await self._blobs.begin(blob.digest)
            self.rate.begin(self._now_s())
            try:
                await self._fetch(ref, blob, partial, moved)
            except (StoreError, ImageError):
                partial.discard()  # gives the room back
                raise
            finally:
                partial.close()
                self.rate.end(self._now_s())

    async def _fetch(self, ref: ImageRef | None, blob: Descriptor, partial: Partial, moved: Moved) -> None:
        for peer in list(self._peers):
            if await self._from_peer(peer, blob, partial, moved):
                return
        if ref is None:
            raise Unreachable(f"no other worker has {blob.digest}")
        endpoints = self._registries.endpoints(ref)
        for number, to in enumerate(endpoints):
            last = number == len(endpoints) - 1
            if not partial.is_open:
                await partial.open()
            try:
                return await self._from_registry(ref, to, blob, partial, moved, self._registries.patience(last))
            except StoreError:
                raise
            except HawkerError as error:
                if last:
                    raise
                self._registries.passed_over(to, error)

    async def _from_peer(self, peer: Peer, blob: Descriptor, partial: Partial, moved: Moved) -> bool:
        """Whether a peer brought all that was missing. No patience: there is a registry."""
        if partial.offset > blob.size:
            await partial.restart()
        try:
            async with asyncio.timeout(_PATIENCE_PEER_S):
                pieces = await peer(blob.digest, blob.size, partial.offset)
            if pieces is None:
                return False
            await self._take(blob.digest, Body(partial.offset, None, pieces), blob, partial, moved)
            await partial.finish()
            return True
        except (StoreError, asyncio.CancelledError):
            raise
        except CorruptBlob as error:
            _logger.warning("image.peer_corrupt", blob=blob.digest, found=error.found)
            await partial.open()
        except Exception as error:  # a peer is a convenience: whatever is wrong with it, there are others to ask
            _logger.info("image.peer_failed", blob=blob.digest, problem=repr(error))
        return False

    async def _from_registry(
        self, ref: ImageRef, to: Endpoint, blob: Descriptor, partial: Partial, moved: Moved, patience: Patience
    ) -> None:
        corrupt = 0
        while True:
            before = partial.offset
            try:
                if partial.offset > blob.size:
                    await partial.restart()
                if partial.offset < blob.size or blob.size == 0:
                    async with self._registries.blob(ref, to, blob.digest, partial.offset) as body:
                        if body.total is not None and body.total != blob.size:
                            problem = f"{to.host} has {body.total} bytes of {blob.digest}, which has {blob.size}"
                            raise ImageError(str(ref), problem)
                        await self._take(str(ref), body, blob, partial, moved)
                await partial.finish()
                return
            except Again as error:
                if isinstance(error, RangeRefused):
                    await partial.restart()
                if partial.offset - before >= PROGRESS_BYTES:
                    patience.progress()
                await patience.wait(error)
            except CorruptBlob as error:
                corrupt += 1
                if corrupt >= _CORRUPT_MAX:
                    problem = f"{to.host} sends {blob.digest} with other bytes: they have the digest {error.found}"
                    raise ImageError(str(ref), problem) from error
                await partial.open()

    async def _take(self, image: str, body: Body, blob: Descriptor, partial: Partial, moved: Moved) -> None:
        """Write what comes; what is here already is skipped. Raises `Again` when it is less than the whole."""
        loop = asyncio.get_running_loop()
        at, end = body.offset, partial.offset  # of what was received, and of what is written or held
        began_s, began_at = loop.time(), at
        held = bytearray()
        async with aclosing(_timely(body.pieces, self._read_timeout_s)) as pieces:
            try:
                async for piece in pieces:
                    at += len(piece)
                    if at > blob.size:
                        raise ImageError(image, f"more than the {blob.size} bytes of {blob.digest} were sent")
                    if at > end:
                        held += piece[end - at :]
                        end = at
                    if len(held) >= PIECE_BYTES:
                        full, held = held, bytearray()
                        await self._write(partial, full, moved)
                    if (now_s := loop.time()) - began_s > self._read_timeout_s:
                        if at - began_at < PROGRESS_BYTES:
                            raise Again(f"a source of {blob.digest} sends hardly anything")
                        began_s, began_at = now_s, at
            finally:
                if held:
                    await self._write(partial, held, moved)
        if at < blob.size:
            raise Again(f"a source of {blob.digest} ended {blob.size - at} bytes early")

    async def _write(self, partial: Partial, data: bytearray, moved: Moved) -> None:
        await partial.write(data)
        self.rate.moved(len(data), self._now_s())
        moved(partial.offset)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _timely(pieces: AsyncIterator[bytes], seconds: float) -> AsyncGenerator[bytes, None]:
    """The same pieces; `Again` when one lets itself be waited for."""
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
