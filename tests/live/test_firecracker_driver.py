"""The microVM driver with Firecracker: all but Firecracker and the guest, in whose place a program of ours stands that
has their API (`kit/fake_firecracker.py`). The supervisor, the files, the disks and the kernel are real."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit import fake_firecracker
from tests.kit.drivers import Opened, opened
from tests.kit.namespaces import Network
from tests.kit.processes import alive, gone
from tests.kit.tiers import full
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import prepared
from tests.kit.waiting import eventually

from hawker.host import live
from hawker.worker.drivers.base import InstanceSpec, Refused, StartFailed
from hawker.worker.drivers.microvm import firecracker
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("guests")]

SAYS = "trap 'echo asked; exit 3' TERM; echo up; echo err >&2; while :; do sleep 0.02; done"


def install(directory: Path, *names: str, **environment: str) -> None:
    directory.mkdir(exist_ok=True)
    words = "".join(f"{name}={value} " for name, value in environment.items())
    for name in names:
        program = directory / name
        program.write_text(f'#!/bin/sh\n{words}exec {sys.executable} {fake_firecracker.__file__} {name} "$@"\n')
        program.chmod(0o755)


def made(directory: Path, images: UnpackedImages, settings: Settings | None = None, no_kvm: str = "") -> MicrovmDriver:
    shutil.copytree(Path(prepared().initrd).parent, directory / "kernel", copy_function=os.link)
    return MicrovmDriver(directory, images, None, live(), settings or Settings(), lambda: no_kvm)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


@pytest.fixture(params=["jailed", *full("bare")])
async def driver(request: pytest.FixtureRequest, tmp_path: Path, programs: Path) -> AsyncIterator[Opened]:
    install(programs, "firecracker", *(["jailer"] if request.param == "jailed" else []))
    images = UnpackedImages(tmp_path / "images")
    async with opened(made(tmp_path / "driver", images), "busybox", images.add) as it:
        yield it


def place(driver: Opened, one: InstanceSpec) -> Path:
    assert isinstance(driver.driver, MicrovmDriver)
    guest = driver.driver._guests[one.key]
    return firecracker.place(guest.record.vm, guest.directory)


def asked(there: Path) -> list[str]:
    return [json.loads(line)[0] for line in (there / "asked").read_text().splitlines()]


@pytest.mark.parametrize("driver", ["jailed", "bare"], indirect=True)
async def test_a_machine_is_booted_asked_and_stopped(driver: Opened) -> None:
    one = driver.shell(SAYS)
    started = await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.says(one.machine, "err")
    assert asked(place(driver, one)) == [
        *("/machine-config", "/boot-source", "/drives/image", "/drives/machine", "/drives/status"),
        *("/vsock", "/entropy", "/actions"),
    ]
    done = await driver.driver.exec(one.key, ["echo", "inside"], timeout_s=20)
    assert (done.code, done.stdout) == (0, b"inside\n")
    assert (await driver.driver.stats(one.key)).cpu_s == 1.5
    jailed = "/jail/" in str(place(driver, one))
    assert started.pid is not None
    assert (os.stat(f"/proc/{started.pid}").st_uid >= 1 << 20) == jailed
    assert os.readlink(f"/proc/{started.pid}/cwd") == str(place(driver, one))

    ended = await driver.driver.stop(one.key, signal=15, grace_s=20)
    assert (ended.code, ended.error) == (3, "")
    assert (await driver.driver.inspect(one.key)).exit == ended
    assert driver.exits[one.key] == ended
    directory = place(driver, one)
    await driver.driver.destroy(one.key)
    assert not directory.exists()


async def test_its_end_is_known_to_a_daemon_that_was_not_there(driver: Opened, tmp_path: Path) -> None:
    one = driver.shell(SAYS)
    started = await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.driver.close()
    os.kill(int(children(started.pid)[0]), 15)
    await gone(pid=started.pid)
    await driver.driver.open(driver.on_exit)
    assert (await driver.driver.wait(one.key)).code == 3
    (found,) = await driver.driver.recover()
    assert found.exit is not None
    assert found.exit.code == 3


def children(pid: int | None) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_it_is_suspended_to_files_and_goes_on_in_another_hypervisor(driver: Opened) -> None:
    one = driver.shell(SAYS)
    started = await driver.driver.start(one)
    await driver.says(one.machine, "up")
    directory = Path(place(driver, one))
    await driver.suspending.suspend(one.key)
    assert started.pid is not None
    assert not alive(started.pid)
    assert asked(directory)[-2:] == ["/vm", "/snapshot/create"]
    await driver.driver.close()
    await driver.driver.open(driver.on_exit)
    (found,) = await driver.driver.recover()
    assert found.suspended

    for _ in range(2):  # the second time from the memory that it runs on
        await driver.suspending.resume(one.key)
        assert asked(directory) == ["/snapshot/load", "/vm"]
        assert "memory" not in os.listdir(directory)
        await driver.suspending.suspend(one.key)
    await driver.suspending.resume(one.key)
    assert (await driver.driver.exec(one.key, ["echo", "on"], timeout_s=20)).stdout == b"on\n"
    ended = await driver.driver.stop(one.key, signal=15, grace_s=20)
    assert (ended.code, ended.signal) in ((3, None), (None, 15))  # the stand-in starts it anew: it may not listen yet
    assert driver.exits[one.key] == ended


async def test_a_hypervisor_that_is_killed_says_nothing_of_its_program(driver: Opened) -> None:
    one = driver.shell("echo up; sleep 1000")
    started = await driver.driver.start(one)
    assert started.pid is not None
    os.kill(started.pid, 9)
    ended = await driver.driver.wait(one.key)
    assert (ended.code, ended.signal) == (None, 9)


async def test_what_it_refuses_is_why_the_machine_does_not_start_and_nothing_is_left(
    driver: Opened, tmp_path: Path
) -> None:
    one = driver.shell(SAYS)
    install(tmp_path / "bin", *os.listdir(tmp_path / "bin"), FAKE_REFUSES="/drives/status")
    with pytest.raises(StartFailed, match="PUT /drives/status: no such luck"):
        await driver.driver.start(one)
    assert await driver.driver.recover() == []
    assert not list((tmp_path / "driver" / "vms").iterdir())


async def test_its_end_is_told_by_the_guest_also_when_its_supervisor_was_killed(driver: Opened) -> None:
    one = driver.shell(SAYS)
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.kill_supervisor()
    ended = await driver.driver.stop(one.key, signal=15, grace_s=20)
    assert (ended.code, ended.error) == (3, "")


async def test_a_snapshot_that_it_refuses_leaves_the_machine_as_it_was(driver: Opened, tmp_path: Path) -> None:
    names = os.listdir(tmp_path / "bin")
    install(tmp_path / "bin", *names, FAKE_REFUSES="/snapshot/create")
    one = driver.shell(SAYS)
    started = await driver.driver.start(one)
    with pytest.raises(Refused, match="could not be suspended: PUT /snapshot/create: no such luck"):
        await driver.suspending.suspend(one.key)
    assert started.pid is not None
    assert alive(started.pid)
    await eventually(lambda: goes_on(driver, one), "it goes on")
    assert not {"state", "memory"} & set(os.listdir(tmp_path / "driver" / "vms" / one.key.replace("/", ".")))
    await driver.driver.destroy(one.key, force=True)

    install(tmp_path / "bin", *names, FAKE_REFUSES="/snapshot/load")
    other = driver.shell(SAYS)
    await driver.driver.start(other)
    await driver.suspending.suspend(other.key)
    with pytest.raises(Refused, match="could not be resumed: PUT /snapshot/load: no such luck"):
        await driver.suspending.resume(other.key)
    assert (await driver.driver.inspect(other.key)).suspended
    install(tmp_path / "bin", *names)
    await driver.suspending.resume(other.key)
    assert await goes_on(driver, other)


async def goes_on(driver: Opened, one: InstanceSpec) -> bool:
    assert isinstance(driver.driver, MicrovmDriver)
    guest = driver.driver._guests[one.key]
    return await firecracker.Firecracker().runs(guest.record.vm, guest.directory)


@pytest.mark.parametrize(
    ("version", "no_kvm", "settings", "why"),
    [
        ("1.7.0", "", Settings(), "of version 1.7.0: guests need 1.8 or newer"),
        ("1.8.0", "no /dev/kvm", Settings(), "it needs a processor that runs guests: no /dev/kvm"),
        ("1.8.0", "", Settings(vmm="qemu"), "so configured"),
        ("1.8.0", "", Settings(), ""),
        ("1.10.1", "", Settings(vmm="firecracker"), ""),
    ],
)
async def test_it_is_chosen_where_it_can_run_guests_and_otherwise_it_is_said_why_not(
    tmp_path: Path, programs: Path, version: str, no_kvm: str, settings: Settings, why: str
) -> None:
    install(programs, "firecracker", FAKE_VERSION=version)
    images = UnpackedImages(tmp_path / "images")
    async with opened(made(tmp_path / "driver", images, settings, no_kvm)) as it:
        found = await it.driver.fingerprint()
    assert found.healthy, found.problem
    assert found.attributes["vmm"] == ("qemu" if why else "firecracker")
    assert why in found.attributes.get("no_firecracker", "")
    assert ("jailer is not in PATH" in found.attributes.get("not_jailed", "")) == (not why)


async def test_one_that_is_asked_for_and_is_not_there_is_missing(tmp_path: Path) -> None:
    images = UnpackedImages(tmp_path / "images")
    async with opened(made(tmp_path / "driver", images, Settings(vmm="firecracker"))) as it:
        found = await it.driver.fingerprint()
    assert found.problem == "the hypervisor is set to firecracker, and firecracker is not in PATH"


ATTACHES = """
import fcntl, os, struct, sys
fd = os.open("/dev/net/tun", os.O_RDWR)
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
try:
    fcntl.ioctl(fd, 0x400454CA, struct.pack("<16sH22x", sys.argv[1].encode(), 0x0002 | 0x1000 | 0x4000))
except OSError as error:
    sys.exit(error.errno)
"""  # as Firecracker does: a tap, without a header of packets, with one of virtio


def test_a_jailed_machines_interface_is_made_for_its_user_and_no_other() -> None:
    mine, another = 0x70000001, 0x70000002
    with Network() as network:
        network.host("host")
        with network.inside("host"):

            def attach(user: int) -> int:
                return subprocess.run([sys.executable, "-S", "-c", ATTACHES, "hvjailed", str(user)]).returncode

            assert attach(mine) == errno.EPERM
            for user in (another, mine):  # the second time it is there
                firecracker.make_tap("hvjailed", user, user)
            assert attach(mine) == 0
            assert attach(another) == errno.EPERM
            assert "hvjailed" in [name for _, name in socket.if_nameindex()]  # it stays
