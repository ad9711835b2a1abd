"""What a replica does with a version, and how far it is from an owner's log: in order, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core import ownerlog
from hawker.core.ownerlog import (
    BUCKETS,
    COALESCE_MS,
    EPOCH_BITS,
    HELD_MS,
    LINEAGE_MOST,
    REORDER_MOST,
    Budget,
    Reorder,
    Verdict,
    bucket_of,
    differing,
    digest,
    fits,
    is_due,
    judge,
    lineage_after,
    next_epoch,
)
from hawker.model.catalog import NOTHING, Origin, Position, Version


def version(number: int, epoch: int = 7) -> Version:
    return Version("a", "region", epoch, number, ())


def origin(epoch: int, head: int, floor: int = 0, *lineage: tuple[int, int]) -> Origin:
    return Origin("a", "region", epoch, head, floor, tuple(Position(*each) for each in lineage))


@pytest.mark.parametrize(
    ("epoch", "number", "verdict"),
    [(7, 10, "old"), (7, 11, "next"), (7, 12, "hole"), (6, 11, "other_epoch"), (8, 11, "other_epoch")],
)
def test_a_version_is_next_only_behind_the_head_of_its_epoch(epoch: int, number: int, verdict: Verdict) -> None:
    assert judge(Position(7, 10), version(number, epoch)) == verdict


@pytest.mark.parametrize(
    ("at", "log", "fit"),
    [
        ((7, 10), origin(7, 10), "current"),
        ((7, 9), origin(7, 10), "range"),
        ((7, 11), origin(7, 10), "ahead"),
        ((7, 4), origin(7, 10, 5), "snapshot"),  # tombstones that it needs are gone
        ((7, 5), origin(7, 10, 5), "range"),
        ((0, 0), origin(7, 10), "snapshot"),
        ((6, 8), origin(7, 10, 0, (6, 8)), "range"),  # the end of an epoch that this log continued
        ((6, 9), origin(7, 10, 0, (6, 8)), "snapshot"),  # beyond it: a future that a backup does not know
        ((6, 8), origin(7, 10), "snapshot"),
        ((5, 3), origin(7, 10, 0, (5, 4), (6, 8)), "range"),
        ((5, 3), origin(7, 10, 4, (5, 4), (6, 8)), "snapshot"),
        ((6, 10), origin(7, 10, 0, (6, 10)), "range"),  # a range without rows: only the epoch is new
        ((8, 1), origin(7, 10), "ahead"),
    ],
)
def test_what_brings_a_replica_up_to_date(at: tuple[int, int], log: Origin, fit: str) -> None:
    assert fits(Position(*at), log) == fit


@given(st.permutations(range(11, 11 + REORDER_MOST)))
def test_versions_in_any_order_are_applied_in_theirs(numbers: list[int]) -> None:
    waiting, at, applied = Reorder(), Position(7, 10), []
    for number in numbers:
        waiting.hold(version(number))
        ready = waiting.ready(at)
        applied += [each.number for each in ready]
        at = ready[-1].position if ready else at
    assert applied == sorted(numbers)
    assert len(waiting) == 0


def test_of_too_many_that_wait_the_lowest_numbers_are_kept() -> None:
    waiting = Reorder()
    for number in range(200, 100, -1):
        waiting.hold(version(number))
    assert len(waiting) == REORDER_MOST
    assert len(waiting.ready(Position(7, 100))) == REORDER_MOST


def test_what_waits_belongs_to_the_newest_epoch() -> None:
    waiting = Reorder()
    waiting.hold(version(12, epoch=7))
    waiting.hold(version(13, epoch=8))
    waiting.hold(version(14, epoch=7))
    assert waiting.ready(Position(7, 11)) == []
    assert waiting.ready(Position(8, 12)) == [version(13, epoch=8)]


def test_what_waits_for_what_nobody_has_is_given_up() -> None:
    waiting = Reorder(now_ms=1000)
    assert not waiting.in_vain(1000 + HELD_MS - 1)
    assert waiting.in_vain(1000 + HELD_MS)
    assert waiting.in_vain(999)


def test_what_waits_for_an_epoch_that_was_skipped_is_dropped() -> None:
    waiting = Reorder()
    waiting.hold(version(12, epoch=7))
    assert waiting.ready(Position(8, 11)) == []
    assert len(waiting) == 0


@given(
    stored=st.integers(0, 1 << 61),
    above=st.integers(0, 1 << 61),
    now_ms=st.integers(0, 1 << 41),
    draw=st.integers(0, (1 << EPOCH_BITS) - 1),
)
def test_an_epoch_is_above_all_before_it_and_fits_64_bits(stored: int, above: int, now_ms: int, draw: int) -> None:
    assert max(stored, above) < next_epoch(stored, above, now_ms, draw) < 1 << 62


def test_two_databases_of_one_backup_begin_different_epochs_at_the_same_time() -> None:
    assert next_epoch(1 << 40, 0, 5, draw=1) != next_epoch(1 << 40, 0, 5, draw=2)


def test_a_lineage_is_bounded_and_keeps_the_newest() -> None:
    lineage: tuple[Position, ...] = ()
    for epoch in range(1, 40):
        lineage = lineage_after(lineage, Position(epoch, epoch))
    assert lineage == tuple(Position(epoch, epoch) for epoch in range(40 - LINEAGE_MOST, 40))
    assert lineage_after(lineage, NOTHING) == lineage


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 4000)), max_size=60))
def test_what_is_published_stays_within_the_budget(offers: list[tuple[int, int]]) -> None:
    budget = Budget(versions_per_s=10, bytes_per_s=1000, versions_at_once=5, bytes_at_once=2000)
    bucket, now, sent, size_sent, largest = ownerlog.full(budget, 0), 0, 0, 0, 0
    for pause_ms, size in offers:
        now += pause_ms
        bucket = ownerlog.refilled(budget, bucket, now)
        if ownerlog.affords(bucket):
            bucket = ownerlog.spent(bucket, size)
            sent, size_sent, largest = sent + 1, size_sent + size, max(largest, size)
    assert sent <= 5 + now / 1000 * 10 + 1e-6
    assert size_sent <= 2000 + now / 1000 * 1000 + largest + 1e-6


@given(size=st.integers(0, 10_000), versions=st.integers(1, 5))
def test_after_the_wait_the_budget_affords_a_version(size: int, versions: int) -> None:
    budget = Budget(versions_per_s=10, bytes_per_s=1000, versions_at_once=5, bytes_at_once=2000)
    bucket = ownerlog.full(budget, 0)
    for _ in range(versions):
        bucket = ownerlog.spent(bucket, size)
    wait_ms = ownerlog.wait_ms(budget, bucket)
    assert ownerlog.affords(ownerlog.refilled(budget, bucket, wait_ms))
    assert wait_ms == 0 or not ownerlog.affords(ownerlog.refilled(budget, bucket, wait_ms - 2))


def test_a_clock_that_goes_back_gives_no_budget_and_holds_nothing_back() -> None:
    budget = Budget()
    bucket = ownerlog.spent(ownerlog.full(budget, 10_000), 0)
    assert ownerlog.refilled(budget, bucket, 0).versions == bucket.versions
    assert is_due(since_ms=10_000, now_ms=0)
    assert is_due(0, COALESCE_MS)
    assert not is_due(0, COALESCE_MS - 1)


POSITIONS = st.dictionaries(st.text(), st.builds(Position, st.integers(1, 9), st.integers(0, 9)), max_size=30)


@given(POSITIONS)
def test_equal_knowledge_has_equal_digests_in_any_order(positions: dict[str, Position]) -> None:
    shuffled = dict(sorted(positions.items(), reverse=True))
    assert differing(digest(positions), digest(shuffled)) == []


@given(POSITIONS, st.text(), st.builds(Position, st.integers(10, 19), st.integers(0, 9)))
def test_a_log_that_differs_is_in_a_bucket_that_differs(
    positions: dict[str, Position], owner: str, at: Position
) -> None:
    assert differing(digest(positions), digest({**positions, owner: at})) == [bucket_of(owner)]


def test_a_digest_of_another_kind_differs_everywhere() -> None:
    assert differing(digest({}), b"") == list(range(BUCKETS))


def test_buckets_are_the_same_on_every_node() -> None:
    assert [bucket_of(owner) for owner in ("ord-1", "ord-2", "ams-1")] == [252, 108, 7]
