"""The process driver: the conformance suite with and without cgroups, and kill -9 of its daemon and its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit import cgroups
from tests.kit.drivers import Opened, opened, shell, spec
from tests.kit.processes import PYTHON, marked, word
from tests.kit.unpacked import UnpackedImages
from tests.kit.waiting import eventually, until
from tests.live.conformance.abilities import Limited, Talking, Telling
from tests.live.conformance.every import Conformance
from tests.live.conformance.images import Imaged
from tests.live.conformance.kills import Killed, kernel
from tests.live.test_container_driver import programs

from hawker.init.place import shared
from hawker.supervisor import calls
from hawker.worker.drivers.base import Instance, InstanceSpec, Port, Refused, StartFailed, UnknownInstance
from hawker.worker.drivers.process import ProcessDriver
from hawker.worker.drivers.wire import RunningSupervisor


def without_cgroups(directory: Path) -> ProcessDriver:
    return ProcessDriver(directory / "driver", cgroups=False)


class Prespawning(ProcessDriver):
    """Asked as a worker asks it, which says what it will start before it may."""

    async def start(self, spec: InstanceSpec) -> Instance:
        if self._finding:
            await self._finding
        await self.supervisor.call(
            calls.Hello(), RunningSupervisor
        )  # a start is prespawned only where a supervisor is there
        if self.prespawn(spec):
            await self.supervisor.call(calls.Hello(), RunningSupervisor)
            self.release_start(spec)
        return await super().start(spec)


def with_cgroups(directory: Path) -> ProcessDriver:
    return Prespawning(directory / "driver", programs=shared())


@pytest.mark.full
class TestWithoutCgroups(Conformance, Telling, Talking, Killed):
    factory = "tests.live.test_process_driver:without_cgroups"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        async with opened(without_cgroups(tmp_path)) as it:
            yield it

    async def test_limits_cannot_be_changed(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        with pytest.raises(Refused, match="control groups"):
            await driver.resizing.resize(one.key, one.limits)


@pytest.mark.root
class TestWithCgroups(Conformance, Telling, Talking, Limited, Killed):
    factory = "tests.live.test_process_driver:with_cgroups"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        async with opened(with_cgroups(tmp_path)) as it:
            yield it

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


def from_image(directory: Path) -> ProcessDriver:
    return ProcessDriver(directory / "driver", images=UnpackedImages(directory / "images"), programs=programs())


class FromAnImage:
    factory = "tests.live.test_process_driver:from_image"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        images = UnpackedImages(tmp_path / "images")
        made = ProcessDriver(tmp_path / "driver", images=images, programs=programs())
        async with opened(made, "busybox", images.add) as it:
            yield it


@pytest.mark.full
@pytest.mark.root
class TestAllElseFromAnImage(FromAnImage, Conformance, Talking, Limited, Killed):
    """As without one."""


@pytest.mark.root
class TestFromAnImage(FromAnImage, Imaged):
    async def test_it_has_a_name(self, driver: Opened) -> None:
        """The host's."""
        assert await driver.run(driver.shell("hostname")) == [os.uname().nodename]

    async def test_programs_of_the_host_run_beside_it_and_see_the_hosts_files(self, driver: Opened) -> None:
        inside = driver.shell("cat /etc/passwd | wc -l; mount | grep -c ' / '")
        assert await driver.run(inside) == ["2", "1"]
        outside = await driver.run(shell("pwd; cut -d ' ' -f 5 /proc/self/mountinfo"))
        assert set(outside) - set(mounted()) == {outside[0], os.path.dirname(outside[0])}, (
            "where it runs is shown to it"
        )
        with pytest.raises(StartFailed, match="no images"):
            await ProcessDriver(Path("unused")).start(driver.shell("true"))


def mounted() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


async def test_a_driver_that_never_ran_a_machine_starts_no_supervisor_to_forget_it(tmp_path: Path) -> None:
    driver = without_cgroups(tmp_path)
    await driver.open(lambda ended: None)
    await driver.purge("m")
    assert driver.supervisor.unused
    assert await driver.recover() == []
    await driver.close()


async def test_a_prespawned_start_gets_the_process_that_waits(tmp_path: Path) -> None:
    async with opened(ProcessDriver(tmp_path / "driver", cgroups=False, programs=programs())) as it:
        driver, mark = it.driver, word()
        assert isinstance(driver, ProcessDriver)
        driver.stand_by()
        await until(lambda: not driver.supervisor.unused)
        await driver.recover()
        one = spec("sleep", mark)

        async def waits() -> bool:
            """It takes some time to compile what waits."""
            return driver.prespawn(one)

        await eventually(waits, "a process waits for the start")
        assert await driver.recover() == []
        assert driver.release_start(one) == "now"
        await until(lambda: bool(marked(mark)))
        [pid] = marked(mark)
        assert (await driver.start(one)).pid == pid


async def ungrouped(directory: Path) -> bool:
    return not cgroups.parents(directory)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.root)], ids=["no-cgroups", "cgroups"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened(ProcessDriver(tmp_path / "driver", cgroups=request.param)) as it:
        yield it


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
        await driver.kill_supervisor()
    enough.set()
    assert min(await asyncio.gather(*asking)) > 0


@pytest.mark.parametrize(("end", "code", "number"), [("exit 7", 7, None), ("kill -SEGV $$", None, signal.SIGSEGV)])
async def test_a_status_is_not_lost_with_the_supervisor_where_the_kernel_keeps_it(
    driver: Opened, end: str, code: int | None, number: int | None
) -> None:
    one = shell(f"trap '{end}' TERM; echo up; while :; do sleep 0.05; done")
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.kill_supervisor()
    ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=10)
    if kernel() >= (6, 15):
        assert (ended.code, ended.signal, ended.error) == (code, number, "")
    else:
        assert (ended.code, ended.signal) == (None, None)
        assert "lost" in ended.error


async def test_a_program_is_not_started_while_another_has_its_port_and_would_be_taken_for_it(driver: Opened) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        listens = [Port(protocol="tcp", internal_port=port, host_port=port)]
        serve = f"import socket; s = socket.create_server(('', {port})); print('up', flush=True); s.accept()[0].recv(1)"
        one = replace(spec(PYTHON, "-c", serve), listens=listens)
        with pytest.raises(StartFailed, match=rf"port {port}/tcp of this host is held by .* \(process {os.getpid()}\)"):
            await driver.driver.start(one)
        with pytest.raises(UnknownInstance):
            await driver.driver.inspect(one.key)
    started = await driver.driver.start(one)
    await driver.says(one.machine, "up")
    assert (await driver.driver.start(one)).pid == started.pid, "it has its port itself"


async def test_a_directory_deeper_than_a_socket_name_may_be_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    async with opened(ProcessDriver(deep / "driver", cgroups=False)) as driver:
        with pytest.raises(StartFailed):
            await driver.driver.start(spec("no-such-program"))
