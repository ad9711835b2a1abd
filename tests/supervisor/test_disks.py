"""The disks that files are on, and limits of them between a daemon and a supervisor of different versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawker.supervisor.calls import Inspect, Limits, Resize
from hawker.supervisor.cgroups import ROOT, V1, usable
from hawker.supervisor.disks import disks_of, hold_later_writes, is_loop, whole
from hawker.supervisor.protocol import DISKS, features, fields_of

DEVICES = [os.makedev(*map(int, (path / "dev").read_text().split(":"))) for path in Path("/sys/block").iterdir()]


def test_files_of_one_disk_have_it_once_and_those_in_memory_have_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = [str(tmp_path), str(tmp_path / "file"), "/proc", str(tmp_path / "gone")]
    assert disks_of(paths) == list(filter(None, [whole(os.stat(tmp_path).st_dev)]))
    assert disks_of(["/proc", "/sys"]) == []


def test_a_whole_disk_is_itself_and_what_is_no_disk_is_none() -> None:
    assert DEVICES
    for device in DEVICES:
        assert whole(device) == f"{os.major(device)}:{os.minor(device)}"
    assert whole(os.makedev(0, 21)) == whole(os.makedev(4000, 1)) == ""


def test_only_devices_of_files_are_loops() -> None:
    assert is_loop("7:3")
    assert not is_loop("70:3")
    assert not is_loop("254:7")


@pytest.mark.root
@pytest.mark.skipif(usable() != "v1", reason="needs control groups of version 1")
def test_a_group_from_before_there_were_limits_of_disks_goes_on(tmp_path: Path) -> None:
    groups = V1(ROOT, f"hawker-{tmp_path.name}-{os.getpid()}")
    groups.create("m", Limits(cpu_millis=1000, memory_mib=64, dedicated=False, pids=100))
    (old,) = ROOT.glob(f"blkio/hawker-*-{os.getpid()}/m")
    old.rmdir()
    child = subprocess.Popen(["sleep", "60"])
    try:
        groups.attach("m", child.pid)
        assert groups.pids("m") == [child.pid]
        limits = Limits(cpu_millis=1000, memory_mib=128, pids=100, disk_bytes=1 << 20, disk_operations=500)
        groups.resize("m", limits)
        child.kill()
        child.wait()
    finally:
        groups.remove("m")
        groups.close()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    """A loop device's number."""
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, 1 << 20)
    device = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True, check=True)
    yield Path("/sys/block", Path(device.stdout.strip()).name, "dev").read_text().strip()
    subprocess.run(["losetup", "--detach", device.stdout.strip()], check=True)


@pytest.mark.root
@pytest.mark.skipif(usable() != "v1", reason="needs control groups of version 1")
def test_a_machine_may_be_faster_than_what_the_host_lets_wait_for_its_disks(loop: str) -> None:
    root, memory = str(ROOT / "blkio"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        hold_later_writes(root, loop, 2 * memory, 0)
        assert f"{loop} {2 * memory}" in (ROOT / "blkio/blkio.throttle.write_bps_device").read_text().splitlines()
        assert Path("/sys/class/bdi", loop, "strict_limit").read_text() == "1\n"
    finally:
        hold_later_writes(root, loop, 0, 0)


def test_a_supervisor_from_before_there_were_limits_of_disks_is_not_asked_for_them() -> None:
    limits = Limits(cpu_millis=1000, memory_mib=64, pids=100, disk_bytes=1 << 20, disk_operations=500)
    resize = Resize(key="a/b", limits=limits)
    known = {"cpu_millis": 1000, "memory_mib": 64, "dedicated": False, "pids": 100}
    assert fields_of(resize, []) == {"key": "a/b", "limits": known}
    assert fields_of(resize, features([])) == {"key": "a/b", "limits": limits}
    assert DISKS in features([])
    assert fields_of(Inspect(key="a/b"), []) == {"key": "a/b"}
