"""What a hypervisor may do to its host: as good as nothing, for a guest may have got into it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, opened, spec
from tests.kit.tiers import full
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms, warmed

from hawker.worker.drivers.base import InstanceSpec, Root
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("guests")]

TRYING = """
import ctypes, errno, os, sys
pid, user, *paths = sys.argv[1:]
number = int(user)
root = os.open(f"/proc/{pid}/root", os.O_PATH)
namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(namespace, 0x20000) == 0, os.strerror(ctypes.get_errno())
os.fchdir(root)
os.chroot(".")
os.setgroups([])
os.setresgid(number, number, number)
os.setresuid(number, number, number)
for path in paths:
    for flags in (os.O_RDONLY, os.O_RDWR):
        try:
            os.close(os.open(path, flags))
            print("opens", end=" ")
        except OSError as error:
            print(errno.errorcode[error.errno], end=" ")
    print()
print(*sorted(os.listdir("/")))
print(*sorted(name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()))
"""
"""Opens files for reading, and for writing, as a hypervisor would that does what it likes."""

STOLEN = """
import os, sys
fd = os.open(sys.argv[1], os.O_PATH)
os.setgroups([])
os.setresgid(*3 * [int(sys.argv[2])])
os.setresuid(*3 * [int(sys.argv[2])])
os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
"""


@pytest.fixture
async def driver(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    """With templates, unless a test says that it wants none."""
    images, templates = UnpackedImages(tmp_path / "images"), getattr(request, "param", True)
    made = microvms(tmp_path / "driver", images, settings=Settings(templates=templates))
    async with opened(made, "busybox", images.add) as it:
        if templates:
            await warmed(made, tmp_path / "driver", spec().limits)
        yield it


def status(pid: int | None) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def mapped(pid: int | None, part: str) -> set[Path]:
    """The files with this in their path that a process has in its memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if part in line}


def user_of(pid: int | None) -> int:
    """Of a hypervisor that has no rights whatever."""
    found = status(pid)
    (user,) = set(found["Uid"]) | set(found["Gid"])
    assert found["Groups"] == []
    assert [int(found[f"Cap{name}"][0], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
    assert (found["NoNewPrivs"], found["Seccomp"]) == (["1"], ["2"])
    for kind in ("mnt", "net", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    assert int(user) >= 1 << 20
    return int(user)


def directory(driver: Opened, one: InstanceSpec) -> Path:
    assert isinstance(driver.driver, MicrovmDriver)
    return driver.driver.supervisor.directory.parent / "vms" / one.key.replace("/", ".")


async def running(python: str, *arguments: object) -> tuple[str, str]:
    argv = [sys.executable, "-S", "-c", python, *map(str, arguments)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize("driver", [True, *full(False)], ids=["template", "booted"], indirect=True)
async def test_a_hypervisor_is_a_user_of_its_own_without_rights_that_sees_its_own_files_alone(
    request: pytest.FixtureRequest, driver: Opened, tmp_path: Path
) -> None:
    template = request.node.callspec.params["driver"]
    one, other = driver.spec("sleep", "60"), driver.spec("sleep", "60")
    first, second = await asyncio.gather(driver.driver.start(one), driver.driver.start(other))
    user = user_of(first.pid)
    assert user != user_of(second.pid)
    record = json.loads((directory(driver, one) / "record").read_bytes())
    disk, image, theirs = record["vm"]["disk"], record["vm"]["image"], directory(driver, other) / "disk"
    memory = tmp_path / "memory"
    if template:  # of several the one that the machine was made of
        (memory,) = mapped(first.pid, "/templates/")
    said, complaint = await running(TRYING, first.pid, user, disk, image, memory, theirs, "/etc/passwd", "/dev/zero")
    assert said.splitlines() == [
        "opens opens ",
        "opens EACCES ",
        "opens EACCES " if template else "ENOENT ENOENT ",
        "ENOENT ENOENT ",
        "ENOENT ENOENT ",
        "opens opens ",
        " ".join(sorted({"dev", "etc", "proc", *inside_of("/"), Path(disk).parts[1]})),
        str(first.pid),
    ], complaint
    _, complaint = await running(STOLEN, theirs, user)
    assert "PermissionError" in complaint
    about = os.stat(theirs)
    assert (about.st_uid, about.st_mode & 0o777) == (user_of(second.pid), 0o600)


def inside_of(root: str) -> set[str]:
    """What a system consists of that may be found in a hypervisor's root directory."""
    return {"usr", "bin", "sbin", "lib", "lib32", "lib64"} & {*os.listdir(root)}


async def test_root_of_a_machine_takes_no_more_of_the_hosts_disk_than_its_own_has(driver: Opened) -> None:
    """By the device itself, past the file system. The guest goes on, and so it does when it was suspended."""
    one = replace(driver.shell("echo up; sleep 60"), root=Root(size_mib=64))
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    device = "mknod /device b $(tr : ' ' < /sys/block/vdb/dev)"
    flood = f"{device} && dd if=/dev/zero of=/device bs=1M seek=1000 count=4 conv=fsync"
    assert (await driver.driver.exec(one.key, ["sh", "-c", flood], timeout_s=60)).code == 1
    await driver.suspending.suspend(one.key)
    await driver.suspending.resume(one.key)
    write = "dd if=/dev/zero of=/file bs=1M count=4 conv=fsync"
    assert (await driver.driver.exec(one.key, ["sh", "-c", write], timeout_s=60)).code == 0
    about = (directory(driver, one) / "disk").stat()
    assert about.st_size == 64 << 20
    assert about.st_blocks * 512 <= about.st_size


async def test_a_machine_keeps_its_user_as_long_as_it_is_there(driver: Opened) -> None:
    one = replace(driver.shell("echo a >> /kept; sync; cat /kept; sleep 60"), root=Root(persist=True))
    first = user_of((await driver.driver.start(one)).pid)
    await driver.says(one.machine, "a")
    await driver.suspending.suspend(one.key)
    await driver.suspending.resume(one.key)
    assert user_of((await driver.driver.inspect(one.key)).pid) == first
    await driver.driver.destroy(one.key, force=True)
    again = replace(driver.spec("cat", "/kept"), machine=one.machine, root=one.root)
    assert user_of((await driver.driver.start(again)).pid) == first
    await driver.driver.wait(again.key)
    await driver.driver.destroy(again.key)
    await driver.driver.purge(one.machine)
    assert isinstance(driver.driver, MicrovmDriver)
    noted = json.loads((driver.driver.supervisor.directory.parent / "users").read_bytes())
    assert noted["machines"].keys() <= {"template"}
    assert noted["gone"] == {}


async def test_a_machine_that_was_suspended_before_machines_had_users_gets_one(driver: Opened) -> None:
    one = driver.shell("echo up; while :; do sleep 0.05; done")
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.suspending.suspend(one.key)
    await driver.driver.close()
    path = directory(driver, one) / "record"
    record = json.loads(path.read_bytes())
    for name in ("user", "preload"):
        del record["vm"][name]
    path.write_text(json.dumps(record))
    os.chown(record["vm"]["disk"], 0, 0)
    await driver.driver.open(driver.on_exit)
    await driver.suspending.resume(one.key)
    assert user_of((await driver.driver.inspect(one.key)).pid)
    assert (await driver.driver.exec(one.key, ["sh", "-c", "echo > /new"], timeout_s=20)).code == 0
