"""Which images, blobs and trees go when room is needed, and which never do.

Three things never go: what somebody holds, what is being fetched, and what was used within the last minute, because the
caller that just asked for it is about to hold it. What broken fetches left, and no image needs, stays for a day so that
they can continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import msgspec

from hawker.images.known import ImageStore, Known
from hawker.images.pull import Pulls
from hawker.images.settings import MIB
from hawker.telemetry import get_logger

GRACE_MS = 60_000
ORPHANS_MS = 24 * 3600 * 1000

_logger = get_logger()


class Collected(msgspec.Struct, frozen=True):
    """Digests of images that are gone, and the bytes that came free."""

    images: tuple[str, ...]
    bytes: int


class Collecting:
    """Collects the garbage of one host. `held` has the digests that are held, by holder."""

    def __init__(self, store: ImageStore, pulls: Pulls, held: Mapping[str, str]) -> None:
        self._settings, self._host = store.settings, store.host
        self._blobs, self._trees, self._names = store.blobs, store.trees, store.names
        self._pulls = pulls
        self._held = held
        self._lock = asyncio.Lock()

    @property
    def total(self) -> int:
        """Bytes of everything here that is whole."""
        return self._blobs.total + self._trees.total

    def is_over(self) -> bool:
        return self.total > self._settings.keep_mib_max * MIB

    async def collect(self, room: int = 0) -> Collected:
        """Down to the lower limit if the upper one is passed; besides, free at least `room` bytes if that can be."""
        async with self._lock:
            await asyncio.to_thread(self._names.flush)
            before = self.total
            await self._orphans(ORPHANS_MS)
            least = self._settings.keep_mib_least * MIB if self.is_over() else before
            most = min(least, before - room)
            if self.total > most:
                await self._orphans(GRACE_MS)
            gone = []
            for known in reversed(self._names.all()):
                if self.total <= most:
                    break
                if self._may_go(known):
                    gone.append(known.image.digest)
                    await self._drop(known)
            collected = Collected(tuple(gone), before - self.total)
            if gone:
                _logger.info("image.collected", images=gone, bytes=collected.bytes)
            return collected

    async def drop(self, known: Known) -> bool:
        """Remove an image, and of what it is made of that which nobody else needs. False: somebody holds it."""
        async with self._lock:
            if known.image.digest in self._held.values():
                return False
            await self._drop(known)
            return True

    async def clean_up(self, blobs: Collection[str], trees: Collection[str] = ()) -> None:
        """Remove what an image that was refused has brought and nobody needs."""
        async with self._lock:
            await self._remove(blobs, trees)

    async def _drop(self, known: Known) -> None:
        self._names.drop(known.image.digest)
        await self._remove(known.blobs, known.chain)

    def _may_go(self, known: Known) -> bool:
        digest = known.image.digest
        # Also by a clock that was set back since: it must not keep an image for as long as it had been ahead.
        fresh = abs(self._host.now_ms() - known.record.used_ms) < GRACE_MS
        return not fresh and digest not in self._held.values() and digest not in self._pulls.wanted_blobs()

    async def _orphans(self, age_ms: int) -> None:
        """Remove what no image needs and nobody has used for this long."""
        before_s = (self._host.now_ms() - age_ms) / 1000
        for digest, (_, written_s) in (await asyncio.to_thread(self._blobs.partials)).items():
            if written_s < before_s and digest not in self._blobs.writing:
                self._blobs.discard_partial(digest)
                self._pulls.moved.pop(digest, None)
        needed = self._needed_blobs()
        blobs = [digest for digest in self._blobs if digest not in needed]
        old = [digest for digest in blobs if self._blobs.path(digest).stat().st_mtime < before_s]
        kept = self._needed_trees()
        trees = [chain_id for chain_id in self._trees.all() if chain_id not in kept]
        await self._remove(old, [chain_id for chain_id in trees if self._trees.changed_s(chain_id) < before_s])

    async def _remove(self, blobs: Collection[str], trees: Collection[str]) -> None:
        """Remove those that nobody needs. What is needed is asked anew after each removal, because time passes."""
        needed = self._needed_trees()
        for chain_id in trees:
            if chain_id not in needed:
                await self._trees.remove(chain_id)
                needed = self._needed_trees()
        needed = self._needed_blobs()
        for digest in blobs:
            if digest in self._blobs and digest not in needed and not self._pulls.is_fetched(digest):
                await self._blobs.remove_large(digest)
                needed = self._needed_blobs()

    def _needed_blobs(self) -> set[str]:
        return self._pulls.wanted_blobs().union(*(known.blobs for known in self._names.all()))

    def _needed_trees(self) -> set[str]:
        return self._pulls.wanted_trees().union(*(known.chain for known in self._names.all()))
