"""What survives when the power goes, the disk fails or it is full: every place in a scripted workload, a few seeds.

The disk is simulated (`hawker.sim.platform.disk`), SQLite and the store are real. A trial runs the workload until the
fault, loses power, reads the disk back and compares it with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import apsw
import pytest
from tests.kit.tiers import full

from hawker.errors import DiskFull, StoreError
from hawker.host import Host
from hawker.model.rows import LeaseRow
from hawker.sim.platform.disk import CrashDisk
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.store.verify import verify

ROUNDS = 12


class Refused(Exception):
    """Raised by changes that are to leave nothing."""


@dataclass
class Outcome:
    """Operations by their number: in the order they were submitted, and how each was answered."""

    submitted: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    in_doubt: list[str] = field(default_factory=list)


def an_open_store(disk: CrashDisk, synchronous: str = "") -> Store:
    """As the worker opens it, but for another setting of `synchronous` if one is given."""
    store = Store.open("worker.db", Host(lambda: 1.0, random.Random(1)), vfs=disk.name)
    if synchronous:
        store._db.execute(f"pragma synchronous = {synchronous}")
    store._db.execute("pragma wal_autocheckpoint = 0")  # see `checkpoint`
    return store


def checkpoint(store: Store) -> None:
    """What SQLite does within a commit once the write-ahead log is long, and ignores when it fails.

    Here it has its own call: apsw cannot ignore what a VFS in Python raises, and would call the commit failed.
    """
    with suppress(apsw.Error):
        store._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def a_change(operation: str, n: int) -> Callable[[Tx], str]:
    """Writes or deletes one of a few rows, of one byte to three pages; every seventh is refused after its write."""

    def change(tx: Tx) -> str:
        tx.record("lease.taken", operation, cause="test", data={"n": n})
        key = f"machine-{n % 5}"
        if n % 4 == 3:
            tx.delete(LeaseRow, key)
        else:
            nonce = f"{n}." * (1 + n * 2654435761 % 4000)
            tx.put(LeaseRow(machine=key, nonce=nonce, owner="", description=operation, expires_at_ms=n))
        if n % 7 == 6:
            raise Refused
        return operation

    return change


async def work(store: Store, disk: CrashDisk, outcome: Outcome) -> None:
    """Rounds of one to three submits at once, until the end or until the power goes."""
    n = 0
    for at in range(ROUNDS):
        operations = []
        for _ in range(1 + at % 3):
            operations.append((f"op-{n}", a_change(f"op-{n}", n)))
            n += 1
        outcome.submitted += [operation for operation, _ in operations]
        answers = await asyncio.gather(*(store.submit(c) for _, c in operations), return_exceptions=True)
        for (operation, _), answer in zip(operations, answers, strict=True):
            match answer:
                case str():
                    outcome.acknowledged.append(operation)
                case Refused() | DiskFull():
                    outcome.refused.append(operation)
                case StoreError():
                    outcome.in_doubt.append(operation)
                case BaseException():
                    raise answer
        if at % 3 == 2:
            checkpoint(store)
        if disk.off:
            break


async def run(disk: CrashDisk, synchronous: str = "") -> Outcome:
    """The workload on a fresh disk, until it ends or the disk does not answer any more."""
    outcome = Outcome()
    try:
        store = an_open_store(disk, synchronous)
    except StoreError:
        return outcome
    await work(store, disk, outcome)
    if disk.off:
        store.abandon()
    else:
        await store.close()
    return outcome


async def survivors(disk: CrashDisk) -> list[str]:
    """After the power is back: the operations in the log. Everything that must hold of any database is asserted."""
    store = an_open_store(disk)
    found = store.read.query("select seq, resource from log order by seq")
    assert [seq for seq, _ in found] == list(range(1, len(found) + 1))
    assert store.read.query("pragma integrity_check") == [("ok",)]
    await store.submit(a_change("afterwards", 0))
    await store.close()
    report = verify("worker.db", vfs=disk.name)
    assert report.faults == []
    assert report.records == len(found) + 1
    return [operation for _, operation in found]


def assert_kept(outcome: Outcome, survived: list[str]) -> None:
    assert not set(outcome.refused) & set(survived)
    possible = [op for op in outcome.submitted if op not in outcome.refused]
    assert survived == [op for op in possible if op in survived], "in the order of the submits, each once"
    lost = [op for op in outcome.acknowledged if op not in survived]
    assert not lost, f"acknowledged and lost: {lost}"


async def calls_of_the_workload() -> int:
    with CrashDisk(0) as disk:
        outcome = await run(disk)
        assert_kept(outcome, await survivors(disk))
        assert outcome.acknowledged
        assert outcome.refused
        assert not outcome.in_doubt
        assert sorted(disk.files) == ["worker.db"]
        return disk.calls


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *full(1, 2)])
async def test_whenever_the_power_goes_every_acknowledged_operation_survives(seed: int) -> None:
    calls = await calls_of_the_workload()
    ended_by: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    acknowledged = in_doubt_kept = in_doubt_lost = 0
    for cut_at in range(1, calls):
        with CrashDisk(seed * 1000 + cut_at) as disk:
            disk.cut_at = cut_at
            outcome = await run(disk)
            if not disk.off:  # closing the database does without its last call or two
                continue
            disk.power_on()
            survived = await survivors(disk)
            assert_kept(outcome, survived)
            ended_by += disk.ended_by
            fates += disk.fates
            acknowledged += len(outcome.acknowledged)
            in_doubt_kept += len(set(outcome.in_doubt) & set(survived))
            in_doubt_lost += len(set(outcome.in_doubt) - set(survived))
    print(f"{ended_by.total()} power cuts at {calls - 1} places: {dict(ended_by)}")
    print(f"unsynced writes: {dict(fates)}; acknowledged and kept: {acknowledged}")
    print(f"in doubt: {in_doubt_kept} kept, {in_doubt_lost} lost")
    assert ended_by.total() > (calls - 1) * 0.95
    for what in ("write of wal", "sync of wal", "write of database", "sync of database", "delete of journal"):
        assert ended_by[f"cut {what}"] >= 1
    assert min(fates["kept"], fates["lost"], fates["torn"]) > 35
    assert acknowledged > 350
    assert min(in_doubt_kept, in_doubt_lost) > 0  # both ends of a doubt were seen


@pytest.mark.slow
async def test_with_less_than_full_synchronisation_the_same_cuts_do_lose_operations() -> None:
    """The test above can fail: what it holds does not hold without the syncs."""
    calls = await calls_of_the_workload()
    cuts = lost = 0
    for cut_at in range(60, calls, 3):
        with CrashDisk(cut_at) as disk:
            disk.cut_at = cut_at
            outcome = await run(disk, synchronous="normal")
            disk.power_on()
            survived = await survivors(disk)
            cuts += 1
            lost += bool(set(outcome.acknowledged) - set(survived))
    print(f"synchronous=normal: acknowledged operations lost in {lost} of {cuts} power cuts")
    assert lost > cuts / 5


@pytest.mark.slow
async def test_a_call_that_fails_once_loses_nothing_acknowledged_and_keeps_nothing_refused() -> None:
    calls = await calls_of_the_workload()
    ended_by: Counter[str] = Counter()
    stopped = 0
    for fail_at in range(1, calls):
        with CrashDisk(fail_at) as disk:
            disk.fail_at = fail_at
            outcome = Outcome()
            try:
                store = an_open_store(disk)
            except StoreError:
                pass  # it failed while it was being opened
            else:
                await work(store, disk, outcome)
                stopped += bool(store.failed)
                assert bool(store.failed) == bool(outcome.in_doubt)
                store.abandon()
            ended_by += disk.ended_by
            disk.power_on()
            assert_kept(outcome, await survivors(disk))
    print(f"{ended_by.total()} failed calls: {dict(ended_by)}; the store stopped after {stopped}")
    assert ended_by.total() > (calls - 1) * 0.9
    assert stopped >= ended_by["failed sync of wal"] > 0


async def test_after_a_commit_of_unknown_outcome_nothing_is_written_until_the_database_is_opened_anew() -> None:
    with CrashDisk(1) as disk:
        store = an_open_store(disk)
        await store.submit(a_change("op-0", 0))
        disk.fail_at = disk.calls + await syncing_call()
        with pytest.raises(StoreError, match="restart the worker"):
            await store.submit(a_change("op-1", 1))
        assert disk.ended_by == {"failed sync of wal": 1}
        assert store.full
        with pytest.raises(StoreError, match="restart the worker"):
            await store.submit(a_change("op-2", 2))
        assert store.read.get(LeaseRow, "machine-0") is not None
        store.abandon()
        again = an_open_store(disk)
        await again.submit(a_change("op-2", 2))
        await again.close()


async def syncing_call() -> int:
    """Which call of the second change is its sync: how many it makes without a fault."""
    with CrashDisk(1) as disk:
        store = an_open_store(disk)
        await store.submit(a_change("op-0", 0))
        before = disk.calls
        await store.submit(a_change("op-1", 1))
        calls = disk.calls - before
        await store.close()
        return calls


@pytest.mark.slow
async def test_on_a_full_disk_changes_are_refused_whole_and_it_works_again_once_there_is_room() -> None:
    full = refused = 0
    with CrashDisk(0) as disk:
        opened = an_open_store(disk)
        least = sum(len(content.seen) for content in disk.files.values())
        opened.abandon()
    for room in range(least, least + 400_000, 8_000):
        with CrashDisk(room) as disk:
            store = an_open_store(disk)
            disk.room = room
            outcome = Outcome()
            await work(store, disk, outcome)
            assert not outcome.in_doubt
            refused += len([op for op in outcome.refused if int(op[3:]) % 7 != 6])
            full += store.full
            assert store.read.query("select count(*) from log") == [(len(outcome.acknowledged),)]
            disk.room = None
            await store.submit(a_change("with room", 1))
            assert not store.full
            outcome.submitted.append("with room")
            outcome.acknowledged.append("with room")
            store.abandon()
            disk.power_on()
            assert_kept(outcome, await survivors(disk))
    print(f"{full} stores ended full, {refused} changes found no room")
    assert full > 5
    assert refused > 50
