"""What a program's life costs between a worker and its supervisor: messages, one by one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType

from msgspec.structs import replace
from tests.kit.waiting import eventually

from hawker.init.place import shared
from hawker.supervisor import calls
from hawker.worker.drivers.base import Exit, InstanceSpec, Limits
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.drivers.process import ProcessDriver
from hawker.worker.drivers.wire import RunningSupervisor

LIVES = 10
FUNCTIONS = 25
"""How many of Hawker's functions a start enters, coroutines counted whenever they go on."""
MESSAGES = 8
"""The daemon sends what it prespawns, the start, the destroy and the purge. The supervisor sends the answers to the
last three, and the end."""


class Relay:
    """Between a worker and its supervisor: it counts their messages."""

    def __init__(self) -> None:
        self.messages = 0
        self._carrying: set[asyncio.Task[None]] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: str) -> None:
        task = asyncio.current_task()
        assert task
        self._carrying.add(task)
        far_reader, far_writer = await asyncio.open_unix_connection(there)
        try:
            with suppress(ConnectionError):
                await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            for end in (writer, far_writer):
                end.close()
            self._carrying.discard(task)

    async def close(self) -> None:
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.messages += data.count(b"\n")
            writer.write(data)
        writer.close()


@asynccontextmanager
async def relayed(directory: Path) -> AsyncIterator[Relay]:
    """In the place of the supervisor's socket, for whoever connects from now on."""
    relay, place = Relay(), os.open(directory, os.O_PATH)  # a path may be longer than the name of a socket
    os.rename(directory / "socket", directory / "behind")
    try:
        server = await asyncio.start_unix_server(
            lambda reader, writer: relay.carry(reader, writer, f"/proc/self/fd/{place}/behind"),
            f"/proc/self/fd/{place}/socket",
        )
        async with server:
            yield relay
        await relay.close()
        os.rename(directory / "behind", directory / "socket")
    finally:
        os.close(place)


def spec(number: int) -> InstanceSpec:
    limits, machine = Limits(cpu_millis=62, memory_mib=64), f"m{number}"
    return InstanceSpec(
        key=f"run{number}/launch", machine=machine, image="host", argv=["/bin/true"], env={}, limits=limits
    )


async def live(driver: ProcessDriver, ends: asyncio.Queue[Exit], number: int) -> None:
    """As the flows do it."""
    program = spec(number)
    assert driver.prespawn(program)
    driver.release_start(program)
    await driver.start(program)
    assert (await ends.get()).code == 0
    await driver.destroy(program.key, force=True)
    await driver.purge(program.machine)


async def test_a_programs_life_is_eight_messages(tmp_path: Path) -> None:
    ends: asyncio.Queue[Exit] = asyncio.Queue()
    programs = shared() or tmp_path / "programs"
    first = ProcessDriver(tmp_path / "process", cgroups=False, programs=programs)
    await first.open(ends.put_nowait)
    await first.supervisor.call(calls.Hello(), RunningSupervisor)
    await first.close()
    async with relayed(tmp_path / "process") as relay:
        driver = ProcessDriver(tmp_path / "process", cgroups=False, programs=programs)
        await driver.open(ends.put_nowait)
        await driver.supervisor.call(calls.Hello(), RunningSupervisor)
        try:

            async def can_prespawn() -> bool:
                return driver.prespawn(spec(0))

            await eventually(can_prespawn, "what waits for a program is compiled")
            await live(driver, ends, 0)
            before = relay.messages
            for number in range(1, LIVES + 1):
                await live(driver, ends, number)
            assert relay.messages - before == MESSAGES * LIVES
        finally:
            await driver.supervisor.shut_down(grace_s=0)
            await driver.close()


async def test_a_start_enters_few_functions_on_its_way_to_the_supervisor(tmp_path: Path) -> None:
    """From the runtime that a machine's row names to the answer: what is announced with `prespawn` is asked for as it
    is, and nothing forwards."""
    entered: list[str] = []

    def enter(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and "/hawker/" in code.co_filename and not code.co_name.startswith("<"):
            entered.append(f"{Path(code.co_filename).stem}.{code.co_qualname}")

    driver = ProcessDriver(tmp_path / "process", cgroups=False, programs=shared() or tmp_path / "programs")
    drivers = DriverSet({"process": driver})
    await drivers.open(lambda ended: None)
    try:
        await driver.supervisor.call(calls.Hello(), RunningSupervisor)

        async def can_prespawn() -> bool:
            return driver.prespawn(spec(0))

        await eventually(can_prespawn, "what waits for a program is compiled")
        one = replace(spec(1), argv=["/bin/sleep", "60"])
        sys.setprofile(enter)
        try:
            prespawning = drivers.of("process").abilities.prespawning
            assert prespawning
            assert prespawning.prespawn(one)
            prespawning.release_start(one)
            await drivers.of("process").start(one)
        finally:
            sys.setprofile(None)
        assert len(entered) <= FUNCTIONS, entered
    finally:
        await drivers.stop_all(grace_s=0)
        await drivers.close()
