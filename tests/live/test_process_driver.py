"""The process driver: the conformance suite with and without cgroups, and kill -9 of its daemon and its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.kit import cgroups
from tests.kit.waiting import eventually
from tests.live.driver_conformance import Conformance, Opened, alive, opened, shell, spec, told

from hawker.worker.drivers.base import StartFailed
from hawker.worker.drivers.process import ProcessDriver
from hawker.worker.drivers.refusals import SupervisorLost


class TestWithoutCgroups(Conformance):
    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        async with opened(ProcessDriver(tmp_path / "driver", cgroups=False)) as it:
            yield it


@pytest.mark.root
class TestWithCgroups(Conformance):
    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        async with opened(ProcessDriver(tmp_path / "driver")) as it:
            yield it

    async def test_want_of_memory_is_told_apart(self, driver: Opened) -> None:
        one = spec("python3", "-c", "b = bytearray(400 << 20); print(len(b))")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert ended.oom_killed
        assert ended.signal == signal.SIGKILL

    async def test_a_fork_bomb_meets_its_limit(self, driver: Opened) -> None:
        one = shell("for i in $(seq 200); do sleep 65 & done; wait")
        await driver.driver.start(one)
        await driver.says(one.machine, "fork")  # the shell's complaint that it could not

    async def test_no_group_is_left(self, driver: Opened) -> None:
        assert isinstance(driver.driver, ProcessDriver)
        directory = driver.driver.supervisor.directory
        one = spec("sleep", "60")
        await driver.driver.start(one)
        assert len(cgroups.machine_groups(directory)) == 1
        await driver.driver.destroy(one.key, force=True)
        assert cgroups.machine_groups(directory) == set()
        assert cgroups.parents(directory)
        await driver.driver.stop_all(grace_s=0)
        await eventually(lambda: ungrouped(directory), "the parent group is removed")


async def ungrouped(directory: Path) -> bool:
    return not cgroups.parents(directory)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.root)], ids=["no-cgroups", "cgroups"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened(ProcessDriver(tmp_path / "driver", cgroups=request.param)) as it:
        yield it


async def supervisor(driver: Opened) -> int:
    assert isinstance(driver.driver, ProcessDriver)
    pid: int = (await driver.driver.supervisor.call_once("hello"))["pid"]
    return pid


async def test_programs_outlive_a_killed_supervisor_and_the_next_one_takes_over(driver: Opened) -> None:
    one = shell("while :; do echo tick; sleep 0.05; done")
    started = await driver.driver.start(one)
    await driver.says(one.machine, "tick")
    killed = await supervisor(driver)
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: replaced(driver, killed), "another supervisor serves")
    assert started.pid is not None
    assert alive(started.pid)
    assert (await driver.driver.inspect(one.key)).pid == started.pid
    before = len(await driver.lines(one.machine))

    async def goes_on() -> bool:
        return len(await driver.lines(one.machine)) > before

    await eventually(goes_on, "its output is kept again")
    ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=10)
    assert (ended.code, ended.signal) in {(None, signal.SIGTERM), (None, None)}  # seen, or lost with its parent
    assert not alive(started.pid)


async def test_calls_at_the_moment_a_supervisor_dies_are_answered_by_the_next(driver: Opened) -> None:
    one = spec("sleep", "60")
    await driver.driver.start(one)
    enough = asyncio.Event()

    async def keep_asking() -> int:
        asked = 0
        while not enough.is_set():
            await driver.driver.inspect(one.key)
            asked += 1
        return asked

    asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
    for _ in range(3):
        killed = await supervisor(driver)
        os.kill(killed, signal.SIGKILL)
        await eventually(partial(replaced, driver, killed), "another supervisor serves")
    enough.set()
    assert min(await asyncio.gather(*asking)) > 0


async def test_the_end_of_a_program_between_two_supervisors_is_told(driver: Opened) -> None:
    one = spec("sleep", "60")
    started = await driver.driver.start(one)
    assert started.pid is not None
    killed = await supervisor(driver)
    os.kill(killed, signal.SIGKILL)
    os.kill(started.pid, signal.SIGKILL)
    await eventually(lambda: told(driver, one), "the exit is told")
    assert driver.exits[one.key].status != 0


@pytest.mark.parametrize(("end", "code", "number"), [("exit 7", 7, None), ("kill -SEGV $$", None, signal.SIGSEGV)])
async def test_a_status_is_not_lost_with_the_supervisor_where_the_kernel_keeps_it(
    driver: Opened, end: str, code: int | None, number: int | None
) -> None:
    one = shell(f"trap '{end}' TERM; echo up; while :; do sleep 0.05; done")
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    killed = await supervisor(driver)
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: replaced(driver, killed), "another supervisor serves")
    ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=10)
    if kernel() >= (6, 15):
        assert (ended.code, ended.signal, ended.error) == (code, number, "")
    else:
        assert (ended.code, ended.signal) == (None, None)
        assert "lost" in ended.error


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


async def replaced(driver: Opened, old: int) -> bool:
    try:
        return await supervisor(driver) != old
    except SupervisorLost:
        return False


DAEMON = """
import asyncio, sys
from pathlib import Path
from hawker.worker.drivers.process import ProcessDriver
from tests.live.driver_conformance import spec

async def main():
    driver = ProcessDriver(Path(sys.argv[1]), cgroups=False)
    await driver.open(lambda exit_: None)
    one = await driver.start(spec("sleep", "60"))
    print(one.key, one.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_programs_outlive_a_killed_daemon_and_a_killed_supervisor_together(tmp_path: Path) -> None:
    directory = tmp_path / "driver"
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(directory)], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  # a real process to kill
    assert daemon.stdout is not None
    line = await asyncio.to_thread(daemon.stdout.readline)
    key, pid = line.split()
    async with opened(ProcessDriver(directory, cgroups=False)) as driver:
        second = await supervisor(driver)
        daemon.kill()
        os.kill(second, signal.SIGKILL)
        daemon.wait()
        daemon.stdout.close()
        await eventually(lambda: replaced(driver, second), "another supervisor serves")
        assert (await driver.driver.inspect(key)).pid == int(pid)
        assert alive(int(pid))


async def test_a_directory_deeper_than_a_socket_name_may_be_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    async with opened(ProcessDriver(deep / "driver", cgroups=False)) as driver:
        with pytest.raises(StartFailed):
            await driver.driver.start(spec("no-such-program"))
