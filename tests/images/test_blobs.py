"""Blobs by content, runs of work that are shared, and the rate that transfers have."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hawker.errors import StoreError
from hawker.images.blobs import Blobs, CorruptBlob, write_durably
from hawker.images.manifest import digest_of
from hawker.images.singleflight import Singleflight, to_its_end
from hawker.images.transfer import Rate

DATA = os.urandom(3 << 20)
DIGEST = digest_of(DATA)


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


async def test_a_blob_appears_when_all_its_bytes_are_there(blobs: Blobs, tmp_path: Path) -> None:
    partial = await blobs.begin(DIGEST)
    await partial.write(DATA[:1000])
    assert DIGEST not in blobs
    assert not blobs.path(DIGEST).exists()
    partial.close()
    again = await Blobs(tmp_path / "blobs").begin(DIGEST)
    assert again.offset == 1000
    await again.write(DATA[1000:])
    path = await again.finish()
    assert path.read_bytes() == DATA
    reopened = Blobs(tmp_path / "blobs")
    assert reopened.size(DIGEST) == reopened.total == len(DATA)
    assert reopened.partials() == {}


async def test_other_bytes_are_refused_and_gone(blobs: Blobs) -> None:
    partial = await blobs.begin(DIGEST)
    await partial.write(DATA[1:] + b"x")
    with pytest.raises(CorruptBlob):
        await partial.finish()
    assert blobs.partials() == {}
    await partial.open()
    assert partial.offset == 0
    partial.discard()


async def test_a_writer_that_is_cancelled_leaves_a_beginning_that_is_right(blobs: Blobs) -> None:
    for cut in range(8):
        partial = await blobs.begin(DIGEST)
        writing = asyncio.ensure_future(partial.write(DATA[partial.offset :]))
        for _ in range(cut):
            await asyncio.sleep(0)  # let it get so far
        writing.cancel()
        await asyncio.wait([writing])
        partial.close()
        kept = blobs.partial_path(DIGEST).read_bytes()
        assert DATA.startswith(kept)
    partial = await blobs.begin(DIGEST)
    await partial.write(DATA[partial.offset :])
    await partial.finish()


async def test_a_blob_that_the_disk_has_damaged_is_found_out(blobs: Blobs) -> None:
    for damaged in (b"", b"x" * 3):
        assert await blobs.put(b"abc") == digest_of(b"abc")
        assert await blobs.is_sound(digest_of(b"abc"))
        blobs.path(digest_of(b"abc")).write_bytes(damaged)
        assert not await blobs.is_sound(digest_of(b"abc"))
        assert digest_of(b"abc") not in blobs
    await blobs.put(b"abc")
    blobs.path(digest_of(b"abc")).write_bytes(b"x")
    with pytest.raises(StoreError, match="damaged"):
        blobs.read(digest_of(b"abc"))
    with pytest.raises(StoreError):
        blobs.read(digest_of(b"abc"))


async def test_a_blob_is_streamed_from_any_byte_on(blobs: Blobs) -> None:
    await blobs.put(DATA)
    assert b"".join([piece async for piece in blobs.stream(DIGEST, 5)]) == DATA[5:]
    assert b"".join([piece async for piece in blobs.stream(DIGEST, 5, 10)]) == DATA[5:15]
    assert [piece async for piece in blobs.stream(DIGEST, len(DATA))] == []
    with pytest.raises(StoreError):
        [piece async for piece in blobs.stream(digest_of(b""))]


def test_a_small_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"1")
    write_durably(path, b"2")
    assert path.read_bytes() == b"2"
    assert list(tmp_path.iterdir()) == [path]


# Shared runs


async def test_all_who_ask_get_the_outcome_of_one_run() -> None:
    flights: Singleflight[int] = Singleflight()
    runs: list[int] = []
    gate = asyncio.Event()

    async def work() -> int:
        runs.append(1)
        await gate.wait()
        return len(runs)

    asking = [asyncio.ensure_future(flights.join("a", work)) for _ in range(20)]
    await asyncio.sleep(0)
    assert "a" in flights
    gate.set()
    assert await asyncio.gather(*asking) == [1] * 20
    assert len(flights) == 0
    assert await flights.join("a", work) == 2  # it has ended: this is another


async def test_what_a_run_raises_all_of_them_get() -> None:
    flights: Singleflight[int] = Singleflight()

    async def work() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    outcomes = await asyncio.gather(*(flights.join("a", work) for _ in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no"] * 3


async def test_the_last_to_leave_ends_the_run_and_waits_for_what_it_undoes() -> None:
    flights: Singleflight[None] = Singleflight()
    undone: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            undone.append("done")

    first, last = (asyncio.ensure_future(flights.join("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert "a" in flights
    last.cancel()
    await asyncio.wait([last])
    assert undone == ["done"]
    assert "a" not in flights


async def test_who_comes_while_a_run_is_being_undone_gets_a_new_one() -> None:
    flights: Singleflight[str] = Singleflight()
    log: list[str] = []
    undoing, undo = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        log.append("begin")
        if len(log) > 1:
            return "new"
        try:
            await asyncio.Event().wait()
        finally:
            undoing.set()
            await undo.wait()
            log.append("undone")
        return "old"

    leaver = asyncio.ensure_future(flights.join("a", work))
    await asyncio.sleep(0)
    leaver.cancel()
    await undoing.wait()
    comer = asyncio.ensure_future(flights.join("a", work))
    await asyncio.sleep(0)
    undo.set()
    assert await comer == "new"
    assert log == ["begin", "undone", "begin"]


async def test_work_goes_to_its_end_though_its_caller_is_cancelled() -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.to_thread(done.append, 1)

    caller = asyncio.ensure_future(to_its_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [1]


# The rate


def test_the_rate_is_that_of_all_transfers_together() -> None:
    rate = Rate()
    assert rate.bytes_per_s == 0
    assert rate.expected > 0
    rate.begin(10.0)
    rate.begin(10.0)
    for at in (10.1, 10.2, 10.3, 10.4):
        rate.moved(1_000_000, at)
    rate.end(10.4)
    assert rate.bytes_per_s == 0  # one still runs
    rate.end(10.5)
    assert rate.bytes_per_s == pytest.approx(8_000_000)
    rate.begin(100.0)  # the pause does not count
    rate.moved(16_000_000, 101.0)
    rate.end(101.0)
    assert rate.bytes_per_s == pytest.approx(8_000_000 * 0.7 + 16_000_000 * 0.3)


def test_a_small_transfer_says_nothing_of_the_rate() -> None:
    rate = Rate()
    rate.begin(0.0)
    rate.moved(1000, 0.001)
    rate.end(0.001)
    assert rate.bytes_per_s == 0
