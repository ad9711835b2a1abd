"""The microVM driver: the conformance suite, and what only virtual machines have."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, opened, spec, told
from tests.kit.ordinary import run_as_nobody
from tests.kit.processes import alive, gone, word
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms, warmed
from tests.kit.waiting import eventually
from tests.live.conformance.abilities import Limited, Talking, Telling
from tests.live.conformance.every import Conformance
from tests.live.conformance.images import Imaged
from tests.live.conformance.kills import Killed

from hawker.worker.drivers.base import File, InstanceSpec, NotSupported, Refused, Root, StartFailed, UnknownInstance
from hawker.worker.drivers.microvm.disk import copy_sparse
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.qemu import Qmp

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("guests")]


def elsewhere(directory: Path) -> MicrovmDriver:
    return microvms(directory / "driver", UnpackedImages(directory / "images"))


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Opened]:
    images = UnpackedImages(tmp_path / "images")
    made = microvms(tmp_path / "driver", images)
    async with opened(made, "busybox", images.add) as it:
        await warmed(made, tmp_path / "driver", spec().limits)
        yield it


class TestMicrovms(Conformance, Telling, Talking, Imaged, Killed):
    factory = "tests.live.test_microvm_driver:elsewhere"
    late_s = 2.0  # on a processor that is emulated

    test_want_of_memory_is_told_apart = Limited.test_want_of_memory_is_told_apart
    test_a_fork_bomb_meets_its_limit = Limited.test_a_fork_bomb_meets_its_limit

    async def test_a_size_stays_while_a_machine_runs(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        with pytest.raises(NotSupported):
            await driver.resizing.resize(one.key, dataclasses.replace(one.limits, memory_mib=256))

    async def test_after_a_reboot_nothing_runs_and_what_is_kept_is_there(self, driver: Opened) -> None:
        """A machine of its own has a memory of its own for what is on its way to the disk: what it has not synced is
        lost when its power fails."""
        one = replace(driver.shell("echo a > kept; sync; echo up; sleep 1000"), root=Root(persist=True))
        other = driver.shell("echo up; sleep 1000")
        for each in (one, other):
            await driver.driver.start(each)
            await driver.says(each.machine, "up")
        await self.reboot(driver, word())
        await driver.driver.open(driver.on_exit)
        assert [instance for instance in await driver.driver.recover() if instance.exit is None] == []
        for each in (one, other):
            await driver.driver.destroy(each.key, force=True)
        again = replace(driver.shell("cat kept"), root=one.root, machine=one.machine)
        assert await driver.run(again) == ["a"]

    def keeps_status(self) -> bool:
        return True  # it is told by the guest


async def clock_of(driver: Opened, key: str) -> int:
    done = await driver.driver.exec(key, ["date", "+%s"], timeout_s=20)
    return int(done.stdout)


async def test_machines_of_one_template_differ_in_all_that_must_differ(driver: Opened) -> None:
    script = "head -c 16 /dev/urandom | md5sum; cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname; date +%s"
    ones = [driver.shell(script) for _ in range(3)]
    told = [await driver.run(one) for one in ones]
    for different in zip(*(lines[:4] for lines in told), strict=True):
        assert len(set(different)) == 3, different
    assert all(abs(int(lines[4]) - time.time()) < 20 for lines in told)


async def test_a_suspended_machine_holds_no_memory_and_outlives_daemon_supervisor_and_host(driver: Opened) -> None:
    one = driver.shell("n=0; trap 'echo $$ $n' USR1; echo up; while :; do n=$((n+1)); sleep 0.02; done")
    started = await driver.driver.start(one)
    assert started.pid is not None
    await driver.says(one.machine, "up")
    began = int((await driver.driver.exec(one.key, ["date", "+%s"], timeout_s=20)).stdout)
    await driver.suspending.suspend(one.key)
    assert not alive(started.pid)
    assert (await driver.driver.inspect(one.key)).pid is None
    with pytest.raises(Refused, match="suspended"):
        await driver.driver.exec(one.key, ["true"], timeout_s=5)

    other = driver.spec("sleep", "60")  # so that there is a supervisor to be lost
    await driver.driver.start(other)
    await TestMicrovms().reboot(driver, word())
    await driver.driver.open(driver.on_exit)
    (found,) = await driver.driver.recover()
    assert (found.key, found.suspended, found.exit, found.started_at_ms) == (one.key, True, None, started.started_at_ms)

    await driver.suspending.resume(one.key)
    await driver.driver.signal(one.key, signal.SIGUSR1)

    async def answered() -> bool:
        return len(await driver.lines(one.machine)) == 2

    await eventually(answered, "the program goes on")
    _, line = await driver.lines(one.machine)
    assert int(line.text.split()[1]) > 0
    assert began <= await clock_of(driver, one.key) <= time.time() + 1
    assert abs(await clock_of(driver, one.key) - time.time()) < 20
    assert driver.exits.get(one.key) is None


async def test_copies_that_go_on_draw_other_random_numbers(driver: Opened, tmp_path: Path) -> None:
    """The same state is loaded twice, as a backup of it would be: nothing that is drawn afterwards is the same."""
    one = driver.shell("trap 'head -c 16 /dev/urandom | md5sum' USR1; echo up; while :; do sleep 0.02; done")
    await driver.driver.start(one)
    await driver.says(one.machine, "up")
    await driver.suspending.suspend(one.key)
    assert isinstance(driver.driver, MicrovmDriver)
    directory = tmp_path / "driver/vms" / one.key.replace("/", ".")
    kept = {name: tmp_path / f"kept-{name}" for name in ("state", "disk", "record")}
    for name, path in kept.items():
        copy_sparse(directory / name, path, (directory / name).stat().st_size)
    drawn = []
    for _ in range(2):
        await driver.suspending.resume(one.key)
        done = await driver.driver.exec(one.key, ["sh", "-c", "head -c 16 /dev/urandom | md5sum"], timeout_s=20)
        drawn.append(done.stdout)
        await driver.suspending.suspend(one.key)
        await driver.driver.close()
        for name, path in kept.items():
            copy_sparse(path, directory / name, path.stat().st_size)
        await driver.driver.open(driver.on_exit)
    assert drawn[0] != drawn[1]


async def test_files_may_be_larger_than_a_frame_and_commands_may_not(driver: Opened) -> None:
    large = bytes(range(256)) * 10_000
    one = replace(driver.shell("md5sum < /large; sleep 60"), files=[File(path="/large", content=large)])
    await driver.driver.start(one)
    await driver.says(one.machine, f"{hashlib.md5(large).hexdigest()}  -")
    with pytest.raises(StartFailed, match="a frame of"):
        await driver.driver.exec(one.key, ["echo", "x" * (1 << 20)], timeout_s=5)


async def test_a_killed_hypervisor_is_told_as_a_killed_program(driver: Opened) -> None:
    one = driver.spec("sleep", "60")
    started = await driver.driver.start(one)
    assert started.pid is not None
    os.kill(started.pid, signal.SIGKILL)
    ended = await driver.driver.wait(one.key)
    assert (ended.code, ended.signal) == (None, signal.SIGKILL)
    with pytest.raises(UnknownInstance):
        await driver.driver.exec(one.key, ["true"], timeout_s=5)
    await driver.driver.destroy(one.key)
    assert await driver.driver.recover() == []
    assert list((tmp_of(driver) / "vms").iterdir()) == []


async def ticking(driver: Opened) -> InstanceSpec:
    one = driver.shell("while :; do echo tick; sleep 0.02; done")
    await driver.driver.start(one)
    await driver.says(one.machine, "tick")
    return one


async def ticks_on(driver: Opened, machine: str) -> None:
    before = len(await driver.lines(machine))

    async def goes_on() -> bool:
        return len(await driver.lines(machine)) > before + 5

    await eventually(goes_on, "it ticks again")


@pytest.mark.parametrize("moment", ["halted", "being saved", "saved"])
async def test_a_machine_that_was_halted_by_somebody_who_was_killed_then_goes_on(driver: Opened, moment: str) -> None:
    one = await ticking(driver)
    await driver.driver.close()
    directory = tmp_of(driver) / "vms" / one.key.replace("/", ".")
    qmp = await Qmp.connect(directory / "qmp")
    await qmp.run("stop")
    if moment == "saved":
        await qmp.save(directory / "state", memory=True)
    elif moment == "being saved":
        slowly = {"max-bandwidth": 64 << 10}  # for half an hour
        await qmp.run("migrate-set-parameters", **slowly)
        file = os.open(directory / "state", os.O_RDWR | os.O_CREAT, 0o600)
        await qmp.pass_file(file)
        os.close(file)
        await qmp.run("migrate", uri="fd:state")
        assert (await qmp.run("query-migrate"))["status"] in ("setup", "active")
    expected = "postmigrate" if moment == "saved" else "paused"

    async def halted() -> bool:
        return bool((await qmp.run("query-status"))["status"] == expected)

    await eventually(halted, f"its hypervisor is {expected}")
    await qmp.close()
    await driver.driver.open(driver.on_exit)
    await ticks_on(driver, one.machine)
    assert not (directory / "state").exists()
    await driver.suspending.suspend(one.key)
    await driver.suspending.resume(one.key)
    await ticks_on(driver, one.machine)


async def test_a_machine_whose_suspending_is_given_up_goes_on(driver: Opened) -> None:
    one = await ticking(driver)
    state = tmp_of(driver) / "vms" / one.key.replace("/", ".") / "state"
    suspending = asyncio.ensure_future(driver.suspending.suspend(one.key))
    while not state.exists() and not suspending.done():  # noqa: ASYNC110  # as soon as it has begun
        await asyncio.sleep(0)
    suspending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await suspending
    await driver.suspending.resume(one.key)  # as the end of a run does
    await ticks_on(driver, one.machine)
    assert not (await driver.driver.inspect(one.key)).suspended


async def test_a_hypervisor_of_a_machine_that_is_suspended_has_never_run_and_is_removed(driver: Opened) -> None:
    """Killed between writing the record and ending the hypervisor."""
    one = driver.shell("n=0; while :; do n=$((n+1)); echo $n; sleep 0.02; done")
    started = await driver.driver.start(one)
    await driver.says(one.machine, "3")
    directory = tmp_of(driver) / "vms" / one.key.replace("/", ".")
    running = (directory / "record").read_bytes()
    await driver.suspending.suspend(one.key)
    suspended = (directory / "record").read_bytes()
    await driver.suspending.resume(one.key)
    resumed = (await driver.driver.inspect(one.key)).pid
    assert resumed not in (None, started.pid)
    assert (directory / "record").read_bytes() == running
    assert not (directory / "state").exists()
    await driver.suspending.suspend(one.key)
    await driver.suspending.resume(one.key)
    last = (await driver.driver.inspect(one.key)).pid
    await driver.driver.close()
    (directory / "record").write_bytes(suspended)
    await driver.driver.open(driver.on_exit)
    assert last is not None
    await gone(pid=last)
    assert (await driver.driver.inspect(one.key)).suspended
    assert (await driver.driver.stop(one.key, signal=15, grace_s=5)).signal == signal.SIGKILL
    await eventually(lambda: told(driver, one), "its end is told")
    assert (await driver.driver.inspect(one.key)).exit == driver.exits[one.key]


async def test_a_template_that_cannot_be_used_is_removed_and_machines_boot(driver: Opened) -> None:
    (template,) = (tmp_of(driver) / "templates").iterdir()
    for path in template.iterdir():
        path.unlink()  # these may be links to what other tests use
    (template / "memory").write_bytes(b"")
    (template / "state").write_bytes(b"nonsense")
    *why, last = await driver.run(driver.shell("echo up"))
    assert last == "up"
    assert any("not a migration stream" in line.lower() for line in why)  # QEMU's own words stand in the machine's log


async def test_it_says_how_it_runs_machines_and_that_it_can_suspend_them(driver: Opened) -> None:
    found = await driver.driver.fingerprint()
    assert found.healthy
    assert found.attributes["accelerator"] in ("kvm", "tcg")
    assert found.capabilities.suspend


def tmp_of(driver: Opened) -> Path:
    assert isinstance(driver.driver, MicrovmDriver)
    return driver.driver.supervisor.directory.parent


ORDINARY = """
import asyncio, sys
from pathlib import Path
from tests.kit.drivers import opened
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms
from hawker.worker.drivers.microvm.settings import Settings

async def main():
    place = Path(sys.argv[1])
    images = UnpackedImages(place / "images")
    made = microvms(place / "driver", images, settings=Settings(cgroups=False, templates=False))
    async with opened(made, "busybox", images.add) as it:
        one = it.shell("id -u; grep -c rdinit /proc/cmdline; echo written > /new; cat /new; sleep 1000")
        await it.driver.start(one)
        await it.says(one.machine, "written")
        print(*(line.text for line in await it.lines(one.machine)))
        await it.suspending.suspend(one.key)
        await it.suspending.resume(one.key)
        print((await it.driver.exec(one.key, ["echo", "goes on"], timeout_s=20)).stdout.decode())

asyncio.run(main())
"""


async def test_an_ordinary_user_has_microvms_too() -> None:
    """And without templates machines boot."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        child = run_as_nobody(ORDINARY, [place], 0)
        said, complaints = await asyncio.to_thread(child.communicate)
        assert (said.split("\n"), child.returncode) == (["0 1 written", "goes on", "", ""], 0), complaints


STARTING = """
import asyncio, sys
from pathlib import Path
from tests.kit.drivers import shell
from tests.live.test_microvm_driver import elsewhere

async def main():
    driver = elsewhere(Path(sys.argv[1]))
    await driver.open(lambda exit_: None)
    print("open", flush=True)
    await driver.start(shell("echo here; sleep 1000", image="busybox"))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["record", "qmp", "agent"])
async def test_a_start_that_a_kill_cut_off_is_taken_up_by_the_next(driver: Opened, tmp_path: Path, moment: str) -> None:
    """Killed once this file of the machine is there: before, while, and after its hypervisor is started."""
    place = tmp_path / "elsewhere"
    one = replace(spec("sh", "-c", "echo here; sleep 1000", image="busybox"), key="run0001/launch", machine=f"{1:014x}")
    with subprocess.Popen([sys.executable, "-c", STARTING, str(place)], stdout=subprocess.PIPE) as daemon:  # noqa: ASYNC220  # a real process to kill
        assert daemon.stdout is not None
        await asyncio.to_thread(daemon.stdout.readline)
        file = place / "driver/vms/run0001.launch" / moment

        async def there() -> bool:
            return file.exists()

        await eventually(there, f"{moment} is there")
        daemon.kill()
    async with opened(elsewhere(place), "busybox") as it:
        await it.driver.start(one)
        await it.says(one.machine, "here")
        assert len(await it.driver.recover()) == 1
        done = await it.driver.exec(one.key, ["hostname"], timeout_s=20)
        assert done.stdout.decode().strip() == one.machine
        assert [line.text for line in await it.lines(one.machine)] == ["here"]
        await it.driver.destroy(one.key, force=True)
        assert await it.driver.recover() == []
