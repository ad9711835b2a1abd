"""A container is written down before its program begins: a supervisor that is killed around that leaves none that
nobody knows of."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from tests.kit.drivers import Opened
from tests.kit.processes import gone, marked, word
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import InstanceSpec
from hawker.worker.drivers.supervised import SupervisedDriver


class Released:
    """For drivers of containers."""

    async def test_a_supervisor_killed_while_it_writes_a_container_down_leaves_none(self, driver: Opened) -> None:
        """A pipe in the place of the record holds it up at that very write."""
        mark = word()
        await _started_and_destroyed(driver, "true")  # so that there is a supervisor with its directories
        one = driver.spec("sleep", mark)
        record = _file(driver, one, "record")
        os.mkfifo(record)
        killed = await driver.supervisor()
        starting = asyncio.ensure_future(driver.driver.start(one))

        async def writes() -> bool:
            return _waits_in(killed) == "wait_for_partner"

        await eventually(writes, "the supervisor opens the record")
        os.unlink(record)
        os.kill(killed, signal.SIGKILL)
        started = await starting
        assert started.pid is not None
        await _runs_once(driver, one, mark)

    async def test_a_supervisor_killed_before_it_sees_a_program_begin_leaves_none(self, driver: Opened) -> None:
        """What a container wrote of its beginning is taken away: as if it had not got so far."""
        mark = word()
        one = driver.spec("sleep", mark)
        first = await driver.driver.start(one)
        killed = await driver.supervisor()
        os.kill(killed, signal.SIGSTOP)
        os.truncate(_file(driver, one, "status"), 0)
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: driver.replaced(killed), "another supervisor serves")
        await gone(mark, first.pid)
        assert await driver.driver.recover() == []
        again = await driver.driver.start(one)
        assert again.pid != first.pid
        await _runs_once(driver, one, mark)


async def _runs_once(driver: Opened, one: InstanceSpec, mark: str) -> None:
    async def once() -> bool:
        return len([pid for pid in marked(mark) if _is(pid, "sleep")]) == 1

    await eventually(once, "its program runs once")
    (found,) = await driver.driver.recover()
    assert (found.key, found.exit) == (one.key, None)
    known = _file(driver, one, "record").read_text()
    assert [json.loads(line)["pid"] for line in known.splitlines() if line] == [found.pid]
    await driver.driver.destroy(one.key, force=True)
    await gone(mark, found.pid)


async def _started_and_destroyed(driver: Opened, program: str) -> None:
    one = driver.spec(program)
    await driver.driver.start(one)
    await driver.driver.wait(one.key)
    await driver.driver.destroy(one.key)


def _file(driver: Opened, one: InstanceSpec, suffix: str) -> Path:
    assert isinstance(driver.driver, SupervisedDriver)
    return driver.driver.supervisor.directory / "run" / f"{one.key.replace('/', '.')}.{suffix}"


def _waits_in(pid: int) -> str:
    """What the kernel calls what a process waits for: here that somebody reads what it wants to write to."""
    return Path(f"/proc/{pid}/wchan").read_text()


def _is(pid: int, program: str) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode())
