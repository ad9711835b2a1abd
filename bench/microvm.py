"""MicroVMs beside bare QEMU: `python -m bench.microvm [--quick] [--json FILE]`, as root.

Bare QEMU is the same command line with the same files, started by this process, and told to run the same program over
the same port: what is left out are the supervisor, the records, the limits, the machine's disk and the choice of what
to do. Both are taken in turns, so that a busy machine is busy for both; a ratio is the median of the rounds' ratios.
"First instruction" is the moment in which the program has been executed in the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter

import msgspec
from msgspec.structs import replace
from tests.kit.unpacked import UnpackedImages

from bench.command import Table, options, told
from hawker.host import live
from hawker.worker.drivers.base import InstanceSpec, Limits
from hawker.worker.drivers.microvm import qemu, start_message, templates
from hawker.worker.drivers.microvm.agent import Agent
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.qemu import Memory, Qmp, Vm
from hawker.worker.drivers.microvm.settings import Settings

MB = 1_000_000
LIMITS = Limits(cpu_millis=1000, memory_mib=256)
FROM = ("/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/perl", "/usr/lib/git-core", "/usr/share/doc", "/usr/bin")
_numbers = count(1)


class Sizes(msgspec.Struct, frozen=True):
    rounds: int
    boots: int
    disks: int
    bytes: int


FULL = Sizes(rounds=15, boots=5, disks=5, bytes=100 * MB)
QUICK = Sizes(rounds=1, boots=1, disks=1, bytes=2 * MB)


def spec() -> InstanceSpec:
    number = next(_numbers)
    return InstanceSpec(
        key=f"run{number:04d}/launch",
        machine=f"{number:014x}",
        image="busybox",
        argv=("sleep", "1000"),
        env={},
        limits=LIMITS,
    )


async def measure(sizes: Sizes, table: Table) -> None:
    home = Path(tempfile.mkdtemp(prefix="hawker-bench-"))
    driver = MicrovmDriver(home / "driver", UnpackedImages(home / "images"), None, live(), Settings(cgroups=True))
    try:
        await disks(table, sizes, home)
        await driver.open(lambda exit_: None)
        await driver.prepare("busybox")
        found = await driver.fingerprint()
        print(f"accelerator {found.attributes.get('accelerator')}, kernel {found.attributes.get('kernel')}")
        bare = Bare(home / "bare", driver, home / "driver")
        await starts(table, "cold", driver, bare, sizes.boots, template=False)
        await driver.warm(LIMITS)
        await starts(table, "from a template", driver, bare, sizes.rounds, template=True)
        await suspending(table, driver, bare, sizes.rounds)
    finally:
        await driver.stop_all(grace_s=0)
        await driver.close()
        shutil.rmtree(home, ignore_errors=True)


# --- disks -----------------------------------------------------------------------------------------------------------


async def disks(table: Table, sizes: Sizes, home: Path) -> None:
    """Two layers of files that this host has, beside mkfs.erofs of the same files in one directory."""
    lower, upper = home / "layers/lower", home / "layers/upper"
    size = await asyncio.to_thread(copy_files, [lower, upper], sizes.bytes)
    whole = home / "layers/whole"
    await asyncio.to_thread(shutil.copytree, lower, whole, symlinks=True)
    await asyncio.to_thread(shutil.copytree, upper, whole, symlinks=True, dirs_exist_ok=True)
    ours, bare = [], []
    target = home / "disk"
    for _ in range(sizes.disks):
        building = ["-m", "hawker.worker.drivers.microvm.building", str(target), str(upper), str(lower)]
        ours.append(await timed(lambda argv=building: run(sys.executable, *argv)))  # type: ignore[misc]
        target.unlink()
        bare.append(await timed(lambda: run("mkfs.erofs", "--quiet", str(target), str(whole))))
        target.unlink()
    per = 100 * MB / size
    table.latency("disk of an image, per 100 MB", [ms * per for ms in ours], note=f"{size / MB:.0f} MB")
    table.latency("  bare mkfs.erofs of one directory", [ms * per for ms in bare])
    ratio(table, "  ratio", ours, bare)


def copy_files(layers: list[Path], most: int) -> int:
    """Files of the host by turns into the layers, until they have so many bytes."""
    size = number = 0
    for top in FROM:
        for directory, _, names in os.walk(top):
            for name in sorted(names):
                path = Path(directory, name)
                if path.is_symlink() or not path.is_file():
                    continue
                if size >= most:
                    return size
                target = layers[number % len(layers)] / path.relative_to("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
                size += path.stat().st_size
                number += 1
    return size


async def run(*argv: str) -> None:
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL)
    assert await child.wait() == 0, argv


# --- starting --------------------------------------------------------------------------------------------------------


class Bare:
    """QEMU without us. The disk of a machine is made beforehand."""

    def __init__(self, directory: Path, driver: MicrovmDriver, its: Path) -> None:
        self.directory = directory
        self._driver = driver
        self._its = its
        self._child: subprocess.Popen[bytes] | None = None

    async def prepare(self, *, template: bool) -> tuple[Vm, Path | None]:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        disk = self.directory / "disk"
        await self._driver._disks.empty(disk, 0, journal=False)
        image = next((self._its / "disks").glob("*.erofs"))
        vm = await self._driver._vm(LIMITS, image=str(image), disk=str(disk), tap="")
        vm = replace(vm, output=False)
        if not template:
            return vm, None
        found = self._driver._hypervisors.template(vm)
        assert found is not None
        return templates.of_template(vm, found), found / templates.STATE

    async def start(self, vm: Vm, state: Path | None) -> None:
        self.spawn(vm)
        if state:
            await self.load(state, memory=False)
        agent = await Agent.connect(self.directory / "agent")
        images = self._driver._images
        image = await images.ensure("busybox")
        pairs = start_message.told(spec(), image.config, None, clock_ns=time.time_ns(), seed=os.urandom(64))
        await agent.start(pairs)
        await agent.close()

    def spawn(self, vm: Vm) -> None:
        with contextlib.ExitStack() as stack:
            given = {}
            for name in ("qmp", "agent"):
                (self.directory / name).unlink(missing_ok=True)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(self.directory / name))
                listener.listen()
                given[name] = listener.fileno()
            argv = [word.format(**given) if word.startswith("socket,") else word for word in qemu.command(vm)]
            self._child = subprocess.Popen(
                argv, cwd=self.directory, stdin=subprocess.DEVNULL, pass_fds=tuple(given.values())
            )

    async def load(self, state: Path, *, memory: bool) -> None:
        qmp = await Qmp.connect(self.directory / "qmp")
        await qmp.load(state, memory=memory)
        await qmp.run("cont")
        await qmp.close()

    async def save(self, state: Path) -> None:
        qmp = await Qmp.connect(self.directory / "qmp")
        await qmp.run("stop")
        await qmp.save(state, memory=True)
        await qmp.quit()

    def end(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child.wait()


async def starts(table: Table, how: str, driver: MicrovmDriver, bare: Bare, rounds: int, *, template: bool) -> None:
    ours, theirs = [], []
    plain = replace(driver._settings, templates=template)
    for _ in range(rounds):
        driver._settings = plain
        driver._hypervisors._with_templates = template
        one = spec()
        ours.append(await timed(lambda one=one: driver.start(one)))  # type: ignore[misc]
        await driver.destroy(one.key, force=True)
        vm, state = await bare.prepare(template=template)
        theirs.append(await timed(lambda vm=vm, state=state: bare.start(vm, state)))  # type: ignore[misc]
        bare.end()
    table.latency(f"start to first instruction, {how}", ours)
    table.latency("  bare QEMU", theirs)
    ratio(table, "  ratio", ours, theirs, aim="1.1")


# --- suspending ------------------------------------------------------------------------------------------------------


async def suspending(table: Table, driver: MicrovmDriver, bare: Bare, rounds: int) -> None:
    one = spec()
    await driver.start(one)
    suspend, resume, bare_suspend, bare_resume = [], [], [], []
    for _ in range(rounds):
        suspend.append(await timed(lambda: driver.suspend(one.key)))
        resume.append(await timed(lambda: driver.resume(one.key)))
        await driver.stats(one.key)
    await driver.destroy(one.key, force=True)
    vm, state = await bare.prepare(template=True)
    await bare.start(vm, state)
    kept = bare.directory / "state"
    alone = replace(vm, memory=Memory(), incoming=True)
    for _ in range(rounds):
        bare_suspend.append(await timed(lambda: bare.save(kept)))
        bare.end()

        async def again() -> None:
            bare.spawn(alone)
            await bare.load(kept, memory=True)
            await (await Agent.connect(bare.directory / "agent")).close()

        bare_resume.append(await timed(again))
    size = kept.stat().st_size / MB
    bare.end()
    table.latency(
        "suspend, its state on disk and no memory held", suspend, note=f"256 MiB guest, {size:.0f} MB of state"
    )
    table.latency("  bare QEMU, not synced to disk", bare_suspend)
    table.latency("resume, clock and randomness renewed", resume)
    table.latency("  bare QEMU, until the guest answers", bare_resume)


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    began = perf_counter()
    await call()
    return (perf_counter() - began) * 1000


def ratio(table: Table, what: str, ours: list[float], theirs: list[float], aim: str = "") -> None:
    table.add(what, statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), "x", aim)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    table = Table()
    asyncio.run(measure(QUICK if given.quick else FULL, table))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
