"""What a replica does with what it is told of an owner's log, and how an owner limits what it tells. No I/O.

One owner's versions are applied strictly in order, so a replica always shows exactly what that owner had committed at
some number. What comes too early waits in a small buffer while the hole before it is asked for; what comes twice is
dropped. `catalog.gossip.replica`, `catalog.publish.outbox` and `catalog.publish.owner_log` do what is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Literal

import msgspec

from hawker.model.catalog import Origin, Position, Version

Verdict = Literal["next", "old", "hole", "other_epoch"]
Fit = Literal["current", "range", "snapshot", "ahead"]

REORDER_MOST = 64
"""At most so many versions of one log wait for a hole to be filled, because a range is cheaper than more of them."""
HELD_MS = 30_000
"""Versions wait at most so long. Perhaps nobody has what they wait for, because their owner was restored to a time
before them."""
LINEAGE_MOST = 16
"""A log remembers so many epochs. A replica that missed more restarts of the owner takes a snapshot."""
COALESCE_MS = 150
"""A change that nobody waits for is held back so long, so that it goes out together with others of the same row."""
EPOCH_BITS = 20
BUCKETS = 256
_HASH_BYTES = 8


def judge(at: Position, version: Version) -> Verdict:
    """What a replica that stands at `at` does with a version."""
    if version.epoch != at.epoch:
        return "other_epoch"
    if version.number == at.head + 1:
        return "next"
    return "old" if version.number <= at.head else "hole"


def fits(at: Position, origin: Origin) -> Fit:
    """What brings a replica that stands at `at` to where `origin` is; "ahead" when the replica holds more than that.

    An owner that hears of a replica ahead of it has come back from the past: its disk, or a backup of it, is older than
    what the owner once published. It must raise its epoch above `at.epoch`.
    """
    if at.epoch == origin.epoch:
        if at.head == origin.head:
            return "current"
        if at.head > origin.head:
            return "ahead"
        return "range" if at.head >= origin.floor else "snapshot"
    if at.epoch > origin.epoch:
        return "ahead"
    prefix = any(at.epoch == epoch and at.head <= end for epoch, end in origin.lineage)
    return "range" if prefix and at.head >= origin.floor else "snapshot"


def next_epoch(stored: int, above: int, now_ms: int, draw: int) -> int:
    """An epoch above both. The wall time in ms is its upper part; `draw` gives `EPOCH_BITS` random bits below.

    Time alone would do, but for a backup that is brought back while the clock is wrong: then the same database begins
    its next epoch twice, and both must not look the same.
    """
    return max((max(stored, above) >> EPOCH_BITS) + 1, now_ms) << EPOCH_BITS | draw


def lineage_after(lineage: tuple[Position, ...], ended: Position) -> tuple[Position, ...]:
    """The lineage once the epoch of `ended` is over. An epoch in which nothing was written needs no place."""
    return (*lineage, ended)[-LINEAGE_MOST:] if ended.head else lineage


class Reorder:
    """Versions of one log that arrived before the ones that they follow. It holds the lowest numbers of the newest
    epoch."""

    def __init__(self, now_ms: int = 0) -> None:
        self._held: dict[int, Version] = {}
        self._epoch = 0
        self._since_ms = now_ms

    def __len__(self) -> int:
        return len(self._held)

    def in_vain(self, now_ms: int) -> bool:
        """Whether they have waited for too long. A clock that goes back does not make them wait longer."""
        return not 0 <= now_ms - self._since_ms < HELD_MS

    def hold(self, version: Version) -> None:
        if version.epoch < self._epoch:
            return
        if version.epoch > self._epoch:
            self._held.clear()
            self._epoch = version.epoch
        self._held[version.number] = version
        if len(self._held) > REORDER_MOST:
            del self._held[max(self._held)]

    def ready(self, at: Position) -> list[Version]:
        """Take out what now follows `at` without a hole, in order. What is behind `at` is dropped."""
        if not self._held or self._epoch > at.epoch:
            return []
        if self._epoch < at.epoch:
            self._held.clear()
            return []
        for number in [number for number in self._held if number <= at.head]:
            del self._held[number]
        found = []
        number = at.head + 1
        while (version := self._held.pop(number, None)) is not None:
            found.append(version)
            number += 1
        return found


class Budget(msgspec.Struct, frozen=True):
    """What one node may publish in the long run, and at once. A fleet's load is its nodes' writes times its nodes."""

    versions_per_s: float = 50.0
    bytes_per_s: float = 64_000.0
    versions_at_once: float = 200.0
    bytes_at_once: float = 512_000.0


class Bucket(msgspec.Struct, frozen=True):
    """What is left of a budget at `at_ms`. Bytes may be owed: a version that is larger than what is left goes out, and
    the next one waits."""

    versions: float
    bytes: float
    at_ms: int


def full(budget: Budget, now_ms: int) -> Bucket:
    return Bucket(budget.versions_at_once, budget.bytes_at_once, now_ms)


def refilled(budget: Budget, bucket: Bucket, now_ms: int) -> Bucket:
    """The bucket at `now_ms`. A clock that goes back gives nothing and takes nothing."""
    passed_s = max(0, now_ms - bucket.at_ms) / 1000
    return Bucket(
        min(budget.versions_at_once, bucket.versions + passed_s * budget.versions_per_s),
        min(budget.bytes_at_once, bucket.bytes + passed_s * budget.bytes_per_s),
        now_ms,
    )


def affords(bucket: Bucket) -> bool:
    """Whether a version may go out now."""
    return bucket.versions >= 1 and bucket.bytes > 0


def spent(bucket: Bucket, size: int, versions: int = 1) -> Bucket:
    return Bucket(bucket.versions - versions, bucket.bytes - size, bucket.at_ms)


def wait_ms(budget: Budget, bucket: Bucket) -> int:
    """How long until the next version may go out."""
    short_s = max((1 - bucket.versions) / budget.versions_per_s, -bucket.bytes / budget.bytes_per_s, 0.0)
    return 0 if affords(bucket) else int(short_s * 1000 + 1e-6) + 1  # a rounded time is not one too early


def due_at_once(now_ms: int) -> int:
    """The time since which an urgent change counts as waiting: it waits for budget alone, not for other changes of its
    row."""
    return now_ms - COALESCE_MS


def is_due(since_ms: int, now_ms: int) -> bool:
    """Whether a change has waited long enough for others of its row. A change that is dated in the future has, since
    the clock went back."""
    return not 0 <= now_ms - since_ms < COALESCE_MS


def bucket_of(owner: str) -> int:
    """The bucket of a digest that an owner's log counts in. The same on every node and in every version of Python."""
    return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=1).digest()[0]


def digest(positions: Mapping[str, Position]) -> bytes:
    """A hash per bucket over owner, epoch and head of one tier's logs: 2 KiB, whatever their number. The hashes of the
    logs in a bucket are added bit by bit, so their order does not matter."""
    sums: dict[int, int] = {}  # most buckets of most clusters are empty, and this is asked for after every change
    for owner, (epoch, head) in positions.items():
        raw = b"%d.%d." % (epoch, head) + owner.encode("utf-8", "surrogatepass")
        bucket = bucket_of(owner)
        sums[bucket] = sums.get(bucket, 0) ^ int.from_bytes(blake2b(raw, digest_size=_HASH_BYTES).digest(), "big")
    whole = bytearray(BUCKETS * _HASH_BYTES)
    for bucket, each in sums.items():
        whole[bucket * _HASH_BYTES : (bucket + 1) * _HASH_BYTES] = each.to_bytes(_HASH_BYTES, "big")
    return bytes(whole)


def differing(ours: bytes, theirs: bytes) -> list[int]:
    """The buckets in which two digests differ; all of them when the other side counts in another way."""
    if len(ours) != len(theirs):
        return list(range(BUCKETS))
    size = _HASH_BYTES
    return [n for n in range(BUCKETS) if ours[n * size : (n + 1) * size] != theirs[n * size : (n + 1) * size]]


def in_buckets(owners: Iterable[str], buckets: Iterable[int]) -> list[str]:
    wanted = frozenset(buckets)
    return sorted(owner for owner in owners if bucket_of(owner) in wanted)
