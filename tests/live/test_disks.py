"""How much machines read and write a second, as the kernel counts it at the disk: never more than they may."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit import disks
from tests.kit.cgroups import parents
from tests.kit.drivers import Opened, opened, spec
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms, warmed
from tests.kit.waiting import eventually
from tests.live.test_container_driver import programs

from hawker.supervisor.disks import whole
from hawker.worker.drivers.base import InstanceSpec, Root
from hawker.worker.drivers.container.driver import ContainerDriver
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.qemu import MARGIN_S, Qmp
from hawker.worker.drivers.process import ProcessDriver

pytestmark = pytest.mark.root

MIB = 1 << 20
BLKIO = Path("/sys/fs/cgroup/blkio")
DIRECT = "while :; do dd if=/dev/zero of={0} bs=128k count=64 conv=notrunc oflag=direct; done 2>/dev/null"
LATER = "while :; do dd if=/dev/zero of={0} bs=128k count=64 conv=notrunc; done 2>/dev/null"
READING = """
    dd if=/dev/zero of={0} bs=128k count=8 oflag=direct 2>/dev/null; echo written
    while :; do dd if={0} of=/dev/null bs=128k iflag=direct; done 2>/dev/null"""


@pytest.fixture
async def containers(tmp_path: Path) -> AsyncIterator[Opened]:
    images = UnpackedImages(tmp_path / "images")
    driver = ContainerDriver(tmp_path / "driver", images, runtime="crun", root_mib=32, programs=programs())
    async with opened(driver, "busybox", images.add) as it:
        yield it


def bounded(one: InstanceSpec, mib: int, operations: int = 0) -> InstanceSpec:
    return replace(one, limits=dataclasses.replace(one.limits, disk_bytes=mib * MIB, disk_operations=operations))


@pytest.mark.parametrize("script", [DIRECT, LATER, READING], ids=["writing", "written later", "reading"])
async def test_a_container_is_held_back_on_the_disk_of_its_own(containers: Opened, tmp_path: Path, script: str) -> None:
    one = bounded(containers.shell(script.format("/f")), 8)
    await containers.driver.start(one)
    if script == READING:
        await containers.says(one.machine, "written")
    device = disks.loop_of(tmp_path / "driver", one.machine)
    assert await disks.most_a_second(lambda: disks.through(device), 2 * MIB) <= 8 * MIB


async def test_a_resize_is_true_of_what_is_written_at_once_and_later(containers: Opened, tmp_path: Path) -> None:
    one = bounded(containers.shell(f"({DIRECT.format('/f')}) & {LATER.format('/g')}"), 64)
    await containers.driver.start(one)
    device = disks.loop_of(tmp_path / "driver", one.machine)
    await disks.most_a_second(lambda: disks.through(device), 2 * MIB)
    await containers.resizing.resize(one.key, bounded(one, 2).limits)
    assert await disks.most_a_second(lambda: disks.through(device), 2 * MIB) <= 2 * 2 * MIB  # 2 at once and 2 later


async def test_operations_are_counted_as_well_as_bytes(containers: Opened, tmp_path: Path) -> None:
    small = "while :; do dd if=/dev/zero of=/f bs=4k count=64 conv=notrunc oflag=direct; done 2>/dev/null"
    one = bounded(containers.shell(small), 64, 100)
    await containers.driver.start(one)
    device = disks.loop_of(tmp_path / "driver", one.machine)
    assert await disks.most_a_second(lambda: disks.operations(device), 80) <= 2 * 100  # as many at once as later


async def test_a_process_is_held_back_on_the_disk_of_its_host(tmp_path: Path) -> None:
    disk = whole(os.stat(tmp_path).st_dev)
    assert disk, "the tests' directory is on no disk that can be limited"
    async with opened(ProcessDriver(tmp_path / "driver", programs=programs())) as processes:
        one = bounded(processes.shell(DIRECT.format("f")), 8)
        await processes.driver.start(one)
        assert await disks.most_a_second(lambda: disks.by_group(tmp_path / "driver", disk), 2 * MIB) <= 8 * MIB


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("guests")
async def test_a_microvm_is_held_back_by_its_hypervisor_once_it_has_used_up_its_margin(tmp_path: Path) -> None:
    images = UnpackedImages(tmp_path / "images")
    async with opened(microvms(tmp_path / "driver", images), "busybox", images.add) as machines:
        assert isinstance(machines.driver, MicrovmDriver)
        await warmed(machines.driver, tmp_path / "driver", spec().limits)
        one = machines.shell(DIRECT.format("/f"))
        await machines.driver.start(replace(one, limits=dataclasses.replace(one.limits, disk_bytes=MIB // 4)))
        (socket,) = (tmp_path / "driver" / "vms").glob("*/qmp")
        hypervisor = await Qmp.connect(socket)

        async def written() -> int:
            shown = await hypervisor.run("query-blockstats")
            return sum(each["stats"]["wr_bytes"] for each in shown)

        seen: list[tuple[float, int]] = []

        async def is_slow() -> bool:
            """For most of a second: emulated, it would write three MiB and more in a second."""
            seen.append((time.monotonic(), await written()))
            recent = [count for at, count in seen if at >= seen[-1][0] - 0.6]
            return len(recent) < len(seen) and recent[-1] - recent[0] <= MIB / 4 * (0.6 + disks.SLICE_S)

        async def margin_is_used() -> bool:
            return await written() > MARGIN_S * MIB // 4

        await eventually(margin_is_used, "the margin is used", 100.0)  # emulated, on a busy host
        await eventually(is_slow, "it is held back", 60.0)
        await hypervisor.close()


async def test_what_a_machine_reads_of_its_image_is_limited_at_the_disk_that_the_image_is_on(
    containers: Opened, tmp_path: Path
) -> None:
    one = bounded(containers.shell("echo up; sleep 60"), 8, 500)
    await containers.driver.start(one)
    own, below = disks.number(disks.loop_of(tmp_path / "driver", one.machine)), whole(os.stat(tmp_path).st_dev)
    (parent,) = (p for p in parents(tmp_path / "driver") if p.parent == BLKIO)
    (group,) = (p for p in parent.iterdir() if p.is_dir())
    for way in ("read", "write"):
        assert disks.rules(group, f"blkio.throttle.{way}_bps_device") == {own: str(8 * MIB), below: str(8 * MIB)}
        assert disks.rules(group, f"blkio.throttle.{way}_iops_device") == {own: "500", below: "500"}


async def test_nothing_stays_with_a_loop_device_once_its_machine_is_gone(containers: Opened, tmp_path: Path) -> None:
    one = bounded(containers.shell("head -c 100000 /dev/zero > /f; echo up; sleep 60"), 8)
    await containers.driver.start(one)
    await containers.says(one.machine, "up")
    own = disks.number(disks.loop_of(tmp_path / "driver", one.machine))
    waiting = Path("/sys/class/bdi", own)
    assert disks.rules(BLKIO, "blkio.throttle.write_bps_device")[own] == str(8 * MIB)
    assert (waiting / "strict_limit").read_text() == "1\n"
    await containers.driver.destroy(one.key, force=True)

    async def gone() -> bool:
        return own not in disks.rules(BLKIO, "blkio.throttle.write_bps_device")

    await eventually(gone, "the rule is gone")
    assert (waiting / "strict_limit").read_text() == "0\n"


async def test_a_machine_that_waits_for_its_disk_can_be_ended(containers: Opened, tmp_path: Path) -> None:
    wait = "dd if=/dev/zero of=/f bs=28M count=1 oflag=direct"  # for half a minute
    one = bounded(containers.shell(wait), 1)
    await containers.driver.start(one)
    device = disks.loop_of(tmp_path / "driver", one.machine)
    await disks.most_a_second(lambda: disks.through(device), MIB // 2)
    async with asyncio.timeout(10):
        assert (await containers.driver.stop(one.key, signal=15, grace_s=0)).signal == signal.SIGKILL


async def test_a_machine_without_a_bound_has_no_rule(containers: Opened, tmp_path: Path) -> None:
    one = bounded(containers.spec("sleep", "60"), 0)
    await containers.driver.start(replace(one, root=Root(size_mib=16)))
    own = disks.number(disks.loop_of(tmp_path / "driver", one.machine))
    assert own not in disks.rules(BLKIO, "blkio.throttle.write_bps_device")
