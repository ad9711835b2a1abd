"""Following a machine's log: every line once, over rotations, and an end when the machine has one."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, a_worker
from tests.kit.virtual_time import virtual_time

from hawker.supervisor.output import MachineWriter
from hawker.worker.drivers.base import LogLine
from hawker.worker.drivers.logs import follow_lines, tail_lines
from hawker.worker.machine.wait import until_destroyed


def line(text: str) -> LogLine:
    return LogLine(at_ms=1, stream="stdout", text=text)


def written(text: str) -> bytes:
    return f"1 o key {text}\n".encode()


class Following:
    """`follow_lines` on a log of our own, with what it has given so far."""

    def __init__(self, path: Path) -> None:
        _, position = tail_lines(path, 0)
        self.wakeup = asyncio.Event()
        self.lines = follow_lines(path, position, self.wakeup)
        self.seen: list[str] = []
        self._next: asyncio.Future[LogLine] | None = None

    async def look(self) -> list[str]:
        """Everything seen once a wake-up has been dealt with."""
        self.wakeup.set()
        while True:
            self._next = self._next or asyncio.ensure_future(anext(self.lines))
            await asyncio.wait({self._next}, timeout=0.01)
            if not self._next.done():
                return self.seen
            self.seen.append(self._next.result().text)
            self._next = None

    async def close(self) -> None:
        if self._next:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)


@virtual_time
async def test_lines_are_followed_over_a_rotation_and_a_removal(tmp_path: Path) -> None:
    path = tmp_path / "m1"
    log = MachineWriter(str(path), file_bytes_max=40)
    following = Following(path)  # before there is a log
    assert await following.look() == []
    log.write(written("one"))
    assert await following.look() == ["one"]
    log.write(written("two"))
    log.write(written("fills the file beyond its size"))  # and is rotated away with it
    log.write(written("three"))
    assert await following.look() == ["one", "two", "fills the file beyond its size", "three"]
    log.write(written("last"))
    path.unlink()
    assert (await following.look())[-1] == "last"
    await following.close()


@virtual_time
async def test_who_begins_to_follow_after_a_rotation_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m1"
    log = MachineWriter(str(path), file_bytes_max=20)
    log.write(written("one"))
    following = Following(path)
    log.write(written("two is too long"))
    log.write(written("three"))
    assert await following.look() == ["two is too long", "three"]
    await following.close()


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(bytes(4096), id="zeros of a power cut before a line"),
        pytest.param(bytes(64) + b"\n", id="a line of zeros"),
        pytest.param(b"1 o\n", id="a line that was cut off"),
        pytest.param(b"1700000000000", id="a number that was cut off"),
        pytest.param(b"1 o \xff\xfe text\n", id="a key that is none"),
        pytest.param(b"\n", id="nothing"),
        pytest.param(b"\xc3\x28" * 9 + b"\n", id="anything"),
    ],
)
@virtual_time
async def test_a_torn_line_keeps_nobody_from_those_around_it(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m1"
    log = MachineWriter(str(path))
    following = Following(path)
    log.write(written("before"))
    with path.open("ab") as file:
        file.write(torn)
    log.write(written("next"))
    log.write(written("after"))
    wanted = ["before", "next", "after"] if torn != b"1700000000000" else ["before", "after"]
    assert [line.text for line in tail_lines(path, 100)[0]] == wanted
    assert await following.look() == wanted
    await following.close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m1"
    log = MachineWriter(str(path))
    log.write(written("one"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = path.stat().st_size + len(written("two")) + len("1 o ke")
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # beyond it a write is cut off, as on a full disk
    try:
        log.write(written("two") + written("three"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.write(written("four"))
    assert path.read_bytes() == written("one") + written("two") + written("four")


@virtual_time
async def test_a_followed_log_ends_after_its_last_line_once_the_machine_is_destroyed(tmp_path: Path) -> None:
    told: asyncio.Queue[LogLine] = asyncio.Queue()

    async def lines() -> AsyncIterator[LogLine]:
        while True:
            yield await told.get()

    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        following = until_destroyed(lines(), worker.store, worker.log, machine)
        told.put_nowait(line("first"))
        assert (await anext(following)).text == "first"
        rest = asyncio.ensure_future(_all(following))
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        await asyncio.sleep(60)
        assert not rest.done(), "a machine that is stopped may be started again"
        told.put_nowait(line("last"))
        await worker.machines.destroy(APP.name, machine, worker.request())
        await worker.at_rest(machine)
        assert await rest == ["last"]
        again = until_destroyed(lines(), worker.store, worker.log, machine)
        assert await _all(again) == [], "one that is gone already ends at once"
        assert worker.log._listeners == {}


async def _all(lines: AsyncIterator[LogLine]) -> list[str]:
    return [one.text async for one in lines]
