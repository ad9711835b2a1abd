"""What must outlive the death of the daemon, of the supervisor, and of the host."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace
from tests.kit.drivers import Opened, opened, told
from tests.kit.processes import alive, gone, marked, word
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import Root
from hawker.worker.drivers.driver import Driver
from hawker.worker.drivers.supervised import SupervisedDriver


class Killed:
    """For drivers with a supervisor. `factory` is `module:function`, which makes the driver of a directory."""

    factory: ClassVar[str]

    async def test_it_runs_on_when_its_daemon_is_killed(self, driver: Opened, tmp_path: Path) -> None:
        module, _, function = self.factory.partition(":")
        place = tmp_path / "elsewhere"
        code = DAEMON.format(module=module, function=function)
        with subprocess.Popen(  # noqa: ASYNC220  # a real process to kill
            [sys.executable, "-c", code, str(place), driver.image], stdout=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stdout is not None
            line = await asyncio.to_thread(daemon.stdout.readline)
            daemon.kill()
        key, machine, pid = line.split()
        made: Driver = getattr(__import__(module, fromlist=[function]), function)(place)
        async with opened(made, driver.image) as it:
            (found,) = await it.driver.recover()
            assert (found.key, found.pid) == (key, int(pid))
            assert alive(int(pid))
            await it.says(machine, "here")
            ended = await it.driver.stop(key, signal=signal.SIGTERM, grace_s=20)
            assert (ended.code, ended.signal) == (5, None)

    async def test_it_runs_on_when_its_supervisor_is_killed(self, driver: Opened) -> None:
        """One whose output goes through pipes, and one with a terminal."""
        script = "trap 'exit 5' TERM; while :; do echo tick; sleep 0.05; done"
        both = [driver.shell(script), replace(driver.shell(script), tty=True)]
        started = [await driver.driver.start(one) for one in both]
        for one in both:
            await driver.says(one.machine, "tick")
        await driver.kill_supervisor()
        assert all(instance.pid and alive(instance.pid) for instance in started)
        assert sorted(await driver.driver.recover(), key=lambda instance: instance.key) == started
        before = {one.machine: len(await driver.lines(one.machine)) for one in both}

        async def go_on() -> bool:
            return all([len(await driver.lines(machine)) > count for machine, count in before.items()])

        await eventually(go_on, "their output is kept again")
        for one, instance in zip(both, started, strict=True):
            assert (await driver.driver.exec(one.key, ["echo", "hello"], timeout_s=20)).stdout == b"hello\n"
            ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=10)
            if self.keeps_status():
                assert (ended.code, ended.signal, ended.error) == (5, None, "")
            assert instance.pid
            assert not alive(instance.pid)

    async def test_what_is_killed_with_its_supervisor_is_told_as_ended(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        started = await driver.driver.start(one)
        assert started.pid is not None
        os.kill(await driver.supervisor(), signal.SIGKILL)
        os.kill(started.pid, signal.SIGKILL)
        await eventually(lambda: told(driver, one), "the exit is told")
        assert driver.exits[one.key].status != 0
        await driver.driver.destroy(one.key)
        assert await driver.driver.recover() == []

    async def test_after_a_reboot_nothing_runs_and_what_is_kept_is_there(self, driver: Opened) -> None:
        mark = word()
        one = replace(driver.shell(f"echo a > kept; echo up; sleep {mark}"), root=Root(persist=True))
        other = driver.shell(f"echo up; sleep {mark}")
        for each in (one, other):
            await driver.driver.start(each)
            await driver.says(each.machine, "up")
        await self.reboot(driver, mark)
        await driver.driver.open(driver.on_exit)
        assert [instance for instance in await driver.driver.recover() if instance.exit is None] == []
        for each in (one, other):
            await driver.driver.destroy(each.key, force=True)
        again = replace(driver.shell("cat kept"), root=one.root, machine=one.machine)
        again = replace(again, key=f"{again.key}2")
        assert await driver.run(again) == ["a"]

    async def reboot(self, driver: Opened, mark: str) -> None:
        """Everything gone at once: the daemon's connection, the supervisor, the machines, what is in memory."""
        assert isinstance(driver.driver, SupervisedDriver)
        place = driver.driver.supervisor.directory
        pids = [await driver.supervisor(), *[i.pid for i in await driver.driver.recover() if i.pid]]
        await driver.driver.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            await gone(pid=pid)
        for pid in marked(mark):  # without cgroups nobody else would: the kernel of this host goes on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await gone(mark)
        if (place / "run").is_symlink():
            shutil.rmtree((place / "run").readlink())

    def keeps_status(self) -> bool:
        """Whether the status of a program that is no child of the supervisor can be known."""
        return kernel() >= (6, 15)


DAEMON = """
import asyncio, sys
from pathlib import Path
from {module} import {function} as make
from tests.kit.drivers import shell

async def main():
    driver = make(Path(sys.argv[1]))
    await driver.open(lambda exit_: None)
    one = shell("trap 'exit 5' TERM; echo here; while :; do sleep 0.05; done", image=sys.argv[2])
    started = await driver.start(one)
    while not [line async for line in driver.logs(one.machine)]:
        await asyncio.sleep(0.01)
    print(one.key, one.machine, started.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
