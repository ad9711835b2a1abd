"""The container driver: the conformance suite with crun and runc, and what only containers have."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, opened, shell
from tests.kit.unpacked import UnpackedImages
from tests.live.conformance.abilities import Limited, Talking, Telling
from tests.live.conformance.every import Conformance
from tests.live.conformance.images import Imaged
from tests.live.conformance.kills import Killed
from tests.live.conformance.releasing import Released

from hawker.worker.drivers.base import Mount, Network, Port, Root, StartFailed
from hawker.worker.drivers.container.driver import ContainerDriver, users_of_before
from hawker.worker.drivers.users import Users

pytestmark = pytest.mark.root


@functools.cache
def programs() -> Path:
    """Compiled once for all these tests."""
    place = Path(tempfile.mkdtemp(prefix="programs-"))
    atexit.register(shutil.rmtree, place)
    return place


def driver_of(directory: Path, runtime: str) -> tuple[ContainerDriver, UnpackedImages]:
    images = UnpackedImages(directory / "images")
    return ContainerDriver(directory / "driver", images, runtime=runtime, programs=programs()), images


def crun(directory: Path) -> ContainerDriver:
    return driver_of(directory, "crun")[0]


def runc(directory: Path) -> ContainerDriver:
    return driver_of(directory, "runc")[0]


class Containers(Conformance, Telling, Talking, Limited, Imaged, Killed, Released):
    async def test_the_output_of_a_machine_configured_with_a_terminal_is_logged(self, driver: Opened) -> None:
        assert await driver.run(replace(driver.shell("echo $TERM"), tty=True)) == ["xterm"]

    async def test_its_root_is_nobody_on_the_host(self, driver: Opened) -> None:
        started = await driver.driver.start(driver.spec("sleep", "60"))
        uid = os.stat(f"/proc/{started.pid}").st_uid
        assert uid >= 1 << 20
        assert (await driver.driver.exec(started.key, ["id", "-u"], timeout_s=20)).stdout == b"0\n"

    async def test_a_command_beside_the_program_may_do_no_more_than_the_program(self, driver: Opened) -> None:
        # What is true of both: rights, filter, groups, bounds, namespaces, and that nothing of ours is open in it.
        looks = """
            grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid|Gid|Groups)' /proc/self/status
            cat /proc/self/cgroup /proc/self/limits
            for kind in cgroup ipc mnt net pid user uts; do readlink /proc/self/ns/$kind; done
            ls /proc/$$/fd > /fds; grep -vxE '0|1|2|10|255' /fds || echo nothing open  # a pipe would be one more
            unshare -U true 2>/dev/null && echo a user namespace
            cd /proc/1/fd
            for fd in *; do true 2>/dev/null >> /proc/1/fd/$fd && echo a descriptor of the init; done
            true"""
        one = driver.shell(f"{looks}; echo over; sleep 60")
        await driver.driver.start(one)
        own: list[str] = []
        async for line in driver.driver.logs(one.machine, follow=True):
            if line.text == "over":
                break
            own.append(line.text)
        done = await driver.driver.exec(one.key, ["sh", "-c", looks], timeout_s=20)
        assert done.stdout.decode().splitlines() == own
        assert "nothing open" in own
        assert {"NoNewPrivs:\t1", "Seccomp:\t2"} <= set(own)
        assert not {"a user namespace", "a descriptor of the init"} & set(own)

    async def test_a_volume_is_shared_with_the_host_and_belongs_to_the_machines_root(
        self, driver: Opened, tmp_path: Path
    ) -> None:
        volume = tmp_path / "volume"
        volume.mkdir()
        (volume / "given").write_text("hello\n")
        one = driver.shell("cat /data/given; echo back > /data/taken; echo no > /fixed/new || echo refused")
        mounts = [Mount(source=str(volume), path="/data"), Mount(source=str(volume), path="/fixed", read_only=True)]
        lines = await driver.run(replace(one, mounts=mounts))
        assert "hello" in lines
        assert "refused" in lines
        assert (volume / "taken").read_text() == "back\n"
        assert (volume / "taken").stat().st_uid == 0


class TestCrun(Containers):
    factory = "tests.live.test_container_driver:crun"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        made, images = driver_of(tmp_path, "crun")
        async with opened(made, "busybox", images.add) as it:
            yield it


async def test_a_machine_that_was_made_before_users_were_noted_keeps_its_own(tmp_path: Path) -> None:
    one = replace(shell("echo mine > /kept", image="busybox"), root=Root(persist=True))
    noted = tmp_path / "driver/users"
    Users(noted).keep({one.machine: users_of_before(one.machine)})
    made, images = driver_of(tmp_path, "crun")
    async with opened(made, "busybox", images.add) as it:
        await it.run(one)
        await it.driver.destroy(one.key)
        noted.unlink()
    made, images = driver_of(tmp_path, "crun")
    async with opened(made, "busybox", images.add) as it:
        again = replace(it.shell("cat /kept; stat -c %U /kept; sleep 60"), machine=one.machine, root=one.root)
        started = await it.driver.start(again)
        assert os.stat(f"/proc/{started.pid}").st_uid == users_of_before(one.machine)
        await it.says(one.machine, "root")
        await it.driver.destroy(again.key, force=True)
        await it.driver.purge(one.machine)
        assert one.machine not in json.loads(noted.read_bytes())["machines"]


@pytest.mark.full
class TestRunc(Containers):
    factory = "tests.live.test_container_driver:runc"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        made, images = driver_of(tmp_path, "runc")
        async with opened(made, "busybox", images.add) as it:
            yield it


async def test_what_a_machine_writes_is_bounded_also_where_its_configuration_does_not_say(tmp_path: Path) -> None:
    images = UnpackedImages(tmp_path / "images")
    driver = ContainerDriver(tmp_path / "driver", images, root_mib=16, programs=programs())
    async with opened(driver, "busybox", images.add) as it:
        fills = it.shell("head -c 64000000 /dev/zero > /big 2>/dev/null || echo full; wc -c < /big")
        full, size = (await it.run(fills))[-2:]
        assert full == "full"
        assert 4 << 20 < int(size) < 16 << 20


async def test_a_machine_whose_ports_could_not_be_reached_is_not_started(tmp_path: Path) -> None:
    images = UnpackedImages(tmp_path / "images")
    async with opened(ContainerDriver(tmp_path / "driver", images, programs=programs()), "busybox", images.add) as it:
        network = Network(number=7, address="fdaa:0:7:1:2:3:4:2")
        assert await it.run(replace(it.shell("echo up"), network=network)) == ["up"]
        port = Port(protocol="tcp", internal_port=80, host_port=20080)
        with pytest.raises(StartFailed, match="hawker doctor"):
            await it.driver.start(replace(it.shell("true"), network=replace(network, publish=[port])))


async def test_finding_out_what_a_host_can_run_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    place = tmp_path / "programs"
    for name in ("first", "second"):
        driver = ContainerDriver(tmp_path / name, UnpackedImages(tmp_path / "images"), programs=place)
        await driver.open(lambda ended: None)
        try:
            assert (await driver.fingerprint()).healthy
            assert driver.supervisor.unused
            assert list((tmp_path / name).iterdir()) == []
            assert not [line for line in _command_lines() if str(tmp_path) in line]
        finally:
            await driver.close()


async def test_machines_start_after_somebody_cleared_the_cache(tmp_path: Path) -> None:
    images = UnpackedImages(tmp_path / "images")
    driver = ContainerDriver(tmp_path / "driver", images, programs=tmp_path / "programs")
    async with opened(driver, "busybox", images.add) as it:
        await driver.fingerprint()
        await asyncio.to_thread(shutil.rmtree, tmp_path / "programs")
        assert await it.run(it.shell("echo here")) == ["here"]


def _command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found
