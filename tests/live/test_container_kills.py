"""Killed at any moment while a container is made: what is found afterwards runs whole, or there is nothing of it.

A script in the place of the runtime does what a kill at that moment would leave, once for each test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit import cgroups
from tests.kit.drivers import Opened, opened
from tests.kit.processes import alive, gone, marked, word
from tests.kit.tiers import full
from tests.kit.unpacked import UnpackedImages
from tests.kit.waiting import eventually
from tests.live.test_container_driver import driver_of, programs

from hawker.network.base import Attachment, NetworkError, Wanted
from hawker.worker.drivers.base import InstanceSpec, Network, StartFailed
from hawker.worker.drivers.container.driver import ContainerDriver
from hawker.worker.drivers.wire import SupervisorLost

pytestmark = [pytest.mark.root, pytest.mark.crash]

KILLS = {
    "before it begins": "kill -9 $$",
    "after 3 ms": '"$REAL" "$@" & sleep 0.003; kill -9 $!; kill -9 $$',
    "after 6 ms": '"$REAL" "$@" & sleep 0.006; kill -9 $!; kill -9 $$',
    "after 12 ms": '"$REAL" "$@" & sleep 0.012; kill -9 $!; kill -9 $$',
    "after 25 ms": '"$REAL" "$@" & sleep 0.025; kill -9 $!; kill -9 $$',
    "when it has made the container": '"$REAL" "$@"; kill -9 $$',
}


class Interposed:
    """A runtime that does something else once when it is told to."""

    def __init__(self, directory: Path, name: str) -> None:
        self._next = directory / "next"
        real = shutil.which(name)
        assert real is not None
        (directory / name).write_text(
            f"#!/bin/sh\nREAL={real}\nif mv {self._next} {self._next}.now 2>/dev/null; then . {self._next}.now; fi\n"
            'exec "$REAL" "$@"\n'
        )
        (directory / name).chmod(0o755)

    def once(self, script: str) -> None:
        new = self._next.with_suffix(".new")
        new.write_text(script)
        new.rename(self._next)

    @property
    def done(self) -> bool:
        return not self._next.exists()


@pytest.fixture(params=["crun", *full("runc")])
def runtime(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interposed:
    place = tmp_path / "bin"
    place.mkdir()
    it = Interposed(place, request.param)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return it


@pytest.fixture
async def driver(request: pytest.FixtureRequest, runtime: Interposed, tmp_path: Path) -> AsyncIterator[Opened]:
    made, images = driver_of(tmp_path, request.node.callspec.params["runtime"])
    async with opened(made, "busybox", images.add) as it:
        assert (await made.fingerprint()).healthy
        yield it


async def nothing_is_left(driver: Opened) -> None:
    """Neither of groups nor of files, but for logs."""
    assert await driver.driver.recover() == []
    place = directory_of(driver)

    async def clear() -> bool:
        return not cgroups.machine_groups(place) and not any(
            os.listdir(place / name) for name in ("run", "roots", "trash")
        )

    await eventually(clear, "no group and no file of a machine is left")


def directory_of(driver: Opened) -> Path:
    assert isinstance(driver.driver, ContainerDriver)
    return driver.driver.supervisor.directory


@pytest.mark.parametrize("when", KILLS)
async def test_a_runtime_that_is_killed_is_tried_again(driver: Opened, runtime: Interposed, when: str) -> None:
    mark = word()
    runtime.once(KILLS[when])
    one = driver.spec("sleep", mark)
    started = await driver.driver.start(one)
    assert runtime.done
    assert await driver.driver.recover() == [started]
    assert [p.command for p in await driver.driver.processes(one.key)][-1] == f"sleep {mark}"
    assert cgroups.machine_groups(directory_of(driver)) == {f"{one.machine}.{one.key.partition('/')[0]}"}
    await driver.driver.destroy(one.key, force=True)
    await gone(mark, started.pid)
    await nothing_is_left(driver)


async def test_a_runtime_that_fails_leaves_nothing(driver: Opened, runtime: Interposed) -> None:
    runtime.once("exit 3")
    with pytest.raises(StartFailed, match="exit code 3"):
        await driver.driver.start(driver.spec("sleep", "60"))
    await nothing_is_left(driver)


async def test_a_supervisor_killed_while_the_runtime_works_leaves_nothing_of_it(
    driver: Opened, runtime: Interposed, tmp_path: Path
) -> None:
    mark = word()
    runtime.once(f"sleep {mark}")
    one = driver.spec("sleep", "60")
    starting = asyncio.ensure_future(driver.driver.start(one))

    async def works() -> bool:
        return bool(marked(mark))

    await eventually(works, "the runtime works")
    os.kill(await driver.supervisor(), signal.SIGKILL)
    started = await starting
    await gone(mark)
    assert started.pid is not None
    assert alive(started.pid)
    assert await driver.driver.recover() == [started]
    await driver.driver.destroy(one.key, force=True)
    await nothing_is_left(driver)


class Gate:
    """A `HostNetwork` that lets a machine wait before it is let go."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.opened = asyncio.Event()
        self.pid = 0
        self.refusal = ""
        self.busy = 0
        self.attached: set[str] = set()
        self.own = "fdaa::1"

    def plan(self, wanted: Wanted) -> Attachment:
        return Attachment(
            interface="none",
            mac="",
            address6=wanted.address,
            gateway6="fe80::1",
            address4="100.64.0.2",
            gateway4="169.254.0.1",
            gateway_mac="02:00:00:00:00:01",
            resolver="fdaa::3",
        )

    def holder(self, protocol: str, port: int) -> str:
        raise NotImplementedError

    async def attach_namespace(self, wanted: Wanted, pid: int) -> Attachment:
        self.pid = pid
        self.attached.add(wanted.machine)
        self.waits.set()
        await self.opened.wait()
        if self.refusal:
            raise NetworkError(self.refusal)
        return self.plan(wanted)

    async def attach_tap(self, wanted: Wanted) -> Attachment:
        raise NotImplementedError

    async def detach(self, machine: str) -> None:
        if self.busy:
            self.busy -= 1
            raise NetworkError("the kernel's tables are being changed")
        self.attached.discard(machine)

    async def reconcile(self, machines: Mapping[str, Wanted]) -> None:
        raise NotImplementedError


@pytest.fixture
async def gated(tmp_path: Path) -> AsyncIterator[tuple[Opened, Gate]]:
    gate = Gate()
    images = UnpackedImages(tmp_path / "images")
    async with opened(ContainerDriver(tmp_path / "driver", images, gate, programs=programs()), "busybox") as it:
        yield it, gate


def with_network(driver: Opened, script: str) -> InstanceSpec:
    return replace(driver.shell(script), network=Network(number=1, address="fdaa:0:1::2"))


async def test_a_container_waits_for_its_network(gated: tuple[Opened, Gate]) -> None:
    driver, gate = gated
    one = with_network(driver, "cat /etc/resolv.conf; echo began; sleep 60")
    starting = asyncio.ensure_future(driver.driver.start(one))
    await gate.waits.wait()
    assert alive(gate.pid)
    assert await driver.driver.recover() == []
    assert await driver.lines(one.machine) == []
    gate.opened.set()
    assert (await starting).pid == gate.pid
    await driver.says(one.machine, "began")
    assert "nameserver fdaa::3" in [line.text for line in await driver.lines(one.machine)]
    await driver.driver.destroy(one.key, force=True)
    assert gate.attached == set()


async def test_a_network_that_could_not_be_removed_with_its_container_is_removed_by_the_next_try(
    gated: tuple[Opened, Gate],
) -> None:
    driver, gate = gated
    gate.opened.set()
    one = with_network(driver, "sleep 60")
    await driver.driver.start(one)
    gate.busy = 2
    for _ in range(2):
        with pytest.raises(NetworkError, match="being changed"):
            await driver.driver.destroy(one.key, force=True)
    assert gate.attached == {one.machine}
    assert await driver.driver.recover() == [], "of the container nothing is there any more"
    await driver.driver.destroy(one.key, force=True)
    assert gate.attached == set()


async def test_a_container_that_its_daemon_did_not_live_to_know_gets_its_network_back(
    gated: tuple[Opened, Gate],
) -> None:
    """The next daemon removes what it finds of machines that do not run, as far as it knows, and starts them again."""
    driver, gate = gated
    gate.opened.set()
    one = with_network(driver, "sleep 60")
    started = await driver.driver.start(one)
    await gate.detach(one.machine)
    assert await driver.driver.start(one) == started
    assert gate.attached == {one.machine}
    await driver.driver.destroy(one.key, force=True)
    assert gate.attached == set()


async def test_a_machine_whose_network_cannot_be_made_is_not_started(gated: tuple[Opened, Gate]) -> None:
    driver, gate = gated
    gate.refusal = "no more addresses"
    gate.opened.set()
    one = with_network(driver, "sleep 60")
    with pytest.raises(StartFailed, match="no more addresses"):
        await driver.driver.start(one)
    await gone(pid=gate.pid)
    assert gate.attached == set()
    await nothing_is_left(driver)


async def test_a_container_whose_daemon_is_gone_before_it_was_let_go_is_removed(gated: tuple[Opened, Gate]) -> None:
    driver, gate = gated
    one = with_network(driver, "sleep 60")
    starting = asyncio.ensure_future(driver.driver.start(one))
    await gate.waits.wait()
    await driver.driver.close()
    gate.opened.set()
    with pytest.raises(SupervisorLost):
        await starting
    await gone(pid=gate.pid)
    await driver.driver.open(driver.on_exit)
    await nothing_is_left(driver)


async def test_a_supervisor_killed_before_it_let_a_container_go_leaves_none(gated: tuple[Opened, Gate]) -> None:
    driver, gate = gated
    one = with_network(driver, "sleep 60")
    starting = asyncio.ensure_future(driver.driver.start(one))
    await gate.waits.wait()
    first = gate.pid
    os.kill(await driver.supervisor(), signal.SIGKILL)
    await gone(pid=first)  # by itself: nobody is there to kill it
    gate.opened.set()
    started = await starting
    assert started.pid not in (None, first)
    assert await driver.driver.recover() == [started]
    await driver.driver.destroy(one.key, force=True)
    await nothing_is_left(driver)


async def test_a_start_that_is_given_up_leaves_nothing(gated: tuple[Opened, Gate]) -> None:
    driver, gate = gated
    one = with_network(driver, "sleep 60")
    starting = asyncio.ensure_future(driver.driver.start(one))
    await gate.waits.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await gone(pid=gate.pid)
    assert gate.attached == set()
    await nothing_is_left(driver)


async def test_a_start_that_is_given_up_while_the_runtime_works_leaves_nothing(
    driver: Opened, runtime: Interposed
) -> None:
    runtime.once('sleep 0.1; exec "$REAL" "$@"')
    one = driver.spec("sleep", "60")
    starting = asyncio.ensure_future(driver.driver.start(one))

    async def works() -> bool:
        return runtime.done

    await eventually(works, "the runtime works")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await nothing_is_left(driver)
    assert (await driver.driver.start(one)).pid is not None
    await driver.driver.destroy(one.key, force=True)
