"""Health checks of a worker's machines over a simulated network, in virtual time: when they are looked at, what is
shown and written, and that nothing is done about them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_world, machine_config
from tests.kit.virtual_time import EPOCH_S, SetClock, run_in_virtual_time

from hawker.core.checking import GROWTH, JITTER, RELEARN_S, WAITING, Health
from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.rows import CheckRow, MachineRow
from hawker.sim.hosts.world import World
from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import PROCESS, Process, Station
from hawker.sim.platform.record import Record
from hawker.worker.machine.check_rows import learned
from hawker.worker.machine.inside.checks import A_TURN, AT_ONCE, HELD_S, TURN_S, Checks

PORT = 8080
HTTP = {"type": "http", "path": "/up", "interval": "15s", "timeout": "2s", "grace_period": "10s"}
OK, DOWN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nup", b"HTTP/1.1 503 Service Unavailable\r\n\r\n"


def served(*checks: dict[str, Any]) -> dict[str, Any]:
    return {"services": [{"internal_port": PORT, "checks": list(checks)}]}


class Program:
    """What listens on `PORT` of the host: it says `answer`, or nothing. `asked`: when, by the loop's clock."""

    def __init__(self) -> None:
        self.answer = OK
        self.asked: list[float] = []
        self.open = self.open_most = 0
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Asked(self), "0.0.0.0", PORT)

    def leave(self) -> None:
        assert self._server is not None
        self._server.close()


class Asked(asyncio.Protocol):
    def __init__(self, program: Program) -> None:
        self.program = program

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.program.asked.append(asyncio.get_running_loop().time())
        self.program.open += 1
        self.program.open_most = max(self.program.open, self.program.open_most)

    def data_received(self, data: bytes) -> None:
        assert data.startswith(b"GET /up HTTP/1.1\r\n")
        if self.program.answer:
            assert isinstance(self.transport, asyncio.Transport)
            self.transport.write(self.program.answer)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.program.open -= 1


class Place:
    """A worker with its checks, and the program that they ask."""

    def __init__(self, directory: Path, station: Station) -> None:
        self.directory = directory
        self.station = station
        self.program = Program()
        self.world: World = a_world()
        self.worker: SimWorker
        self.checks: Checks

    async def open(self) -> None:
        self.worker = worker = await SimWorker.open(self.directory, self.world)
        self.checks = Checks(worker.store, worker.host, worker.log, lambda row, port: [(self.station.address, port)])
        await self.checks.open()

    async def close(self) -> None:
        await self.checks.close()
        await self.worker.close()

    async def die_and_come_back(self, *, after_s: float) -> None:
        await self.worker.die()
        await self.checks.close()  # its timers: the others are gone with their tasks
        await asyncio.sleep(after_s)
        await self.open()

    def shown(self, machine: str) -> list[tuple[str, str, str]]:
        checks = self.checks.shown(self.worker.machine(machine))
        return [(check.name, check.status, check.output) for check in checks]

    def status(self, machine: str) -> str:
        (check,) = self.checks.shown(self.worker.machine(machine))
        return check.status

    def changed_s(self, machine: str) -> float:
        """When the status became what it is, by the loop's clock."""
        (row,) = self.rows(machine)
        return row.updated_at_ms / 1000 - EPOCH_S

    def rows(self, machine: str) -> list[CheckRow]:
        return self.worker.store.read.select(CheckRow, "id like ? order by id", (f"{machine}/%",))

    async def becomes(self, machine: str, status: str, within_s: float) -> float:
        """Waits for it. Returns the loop's time then."""
        await self.worker.until(lambda: self.status(machine) == status, within_s=within_s)
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def a_place(directory: Path, station: Station) -> AsyncIterator[Place]:
    place = Place(directory, station)
    await place.open()
    try:
        yield place
    finally:
        await place.close()


Test = Callable[[Place], Coroutine[Any, Any, None]]


def on_a_network(test: Test) -> Callable[[Path], None]:
    """Run a test as a process of a simulated host, with a worker on it."""

    async def run(directory: Path) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        station = Net(loop, Record(loop.time), "1", ["ord"]).station("a", "ord")
        PROCESS.set(Process("a", station))
        async with a_place(directory, station) as place:
            await test(place)

    @functools.wraps(test)
    def wrapped(tmp_path: Path) -> None:
        run_in_virtual_time(run(tmp_path))

    del wrapped.__wrapped__  # pytest reads the arguments there
    return wrapped


@on_a_network
async def test_a_machine_passes_once_its_program_answers_and_is_not_seen_much_later_than_it_does(place: Place) -> None:
    machine = await place.worker.run_machine(**served(HTTP))
    assert place.shown(machine) == [("servicecheck-00-http-8080", "warning", WAITING)]
    await asyncio.sleep(3)
    assert place.shown(machine)[0][1:] == ("warning", "connect: connection refused")
    await place.program.listen()
    seen_s = await place.becomes(machine, "passing", 15)
    assert seen_s <= 3.5 * GROWTH
    assert place.shown(machine)[0][2] == "up"
    await asyncio.sleep(60)
    pauses = [b - a for a, b in zip(place.program.asked, place.program.asked[1:], strict=False)]
    assert len(pauses) in (3, 4)
    assert all(15 * (1 - JITTER) - 0.1 <= pause <= 15 * (1 + JITTER) + 0.1 for pause in pauses)


@on_a_network
async def test_one_failure_turns_it_critical_and_one_success_passing_and_nothing_is_done(
    place: Place,
) -> None:
    await place.program.listen()
    machine = await place.worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    story = place.worker.story(machine)
    place.program.answer = DOWN
    await place.becomes(machine, "critical", 16)
    first_s = place.changed_s(machine)
    await asyncio.sleep(100)
    assert place.shown(machine) == [("servicecheck-00-http-8080", "critical", "503 Service Unavailable")]
    assert place.changed_s(machine) == first_s, "the time is that of the change, not of the last look"
    place.program.answer = OK
    await place.becomes(machine, "passing", 16)
    assert place.changed_s(machine) > first_s
    row = place.worker.machine(machine)
    assert (row.state, row.restarts, place.worker.story(machine)) == (State.started, 0, story)
    assert place.worker.wrong() == []


@on_a_network
async def test_one_that_never_answers_is_critical_when_its_grace_period_is_over(place: Place) -> None:
    place.program.answer = b""
    await place.program.listen()
    machine = await place.worker.run_machine(**served(HTTP))
    seen_s = await place.becomes(machine, "critical", 20)
    assert 10 <= seen_s <= (10 + 2) * GROWTH
    assert place.shown(machine)[0][2] == "no answer within 2s"
    assert place.program.open_most == 1, "no look begins before the one before it has ended"


@on_a_network
async def test_a_clock_that_is_set_back_makes_no_grace_period_longer(place: Place) -> None:
    clock = SetClock(ahead_s=3600.0)
    await place.close()
    place.world.host = clock.host()
    await place.open()
    place.program.answer = b""
    await place.program.listen()
    machine = await place.worker.run_machine(**served(HTTP))
    clock.ahead_s = 0.0
    await place.die_and_come_back(after_s=0)
    seen_s = await place.becomes(machine, "critical", 40)
    assert seen_s <= 3 + (10 + 2) * GROWTH


@on_a_network
async def test_they_begin_with_the_start_and_end_with_the_stop(place: Place) -> None:
    await place.program.listen()
    worker, name = place.worker, "servicecheck-00-http-8080"
    machine = await worker.run_machine(skip_launch=True, **served(HTTP))
    assert place.shown(machine) == [(name, "warning", "the machine is stopped")]
    assert place.rows(machine) == []
    await worker.machines.start(APP.name, machine, worker.request())
    await place.becomes(machine, "passing", 1)
    await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    asked = len(place.program.asked)
    await asyncio.sleep(100)
    assert len(place.program.asked) == asked
    assert place.shown(machine) == [(name, "warning", "the machine is stopped")]
    assert place.rows(machine) == []


@on_a_network
async def test_nobody_sees_a_machine_that_has_started_beside_the_results_of_its_program_before(place: Place) -> None:
    await place.program.listen()
    worker = place.worker
    machine = await worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    seen: list[list[str]] = []

    def look(row: MachineRow) -> None:
        if row.state is State.started:
            seen.append([check.status for check in place.rows(machine)])

    worker.log.on_change.append(look)
    await worker.machines.restart(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    assert seen
    assert all(statuses == ["warning"] for statuses in seen)
    await place.becomes(machine, "passing", 1)


@on_a_network
async def test_one_that_is_suspended_keeps_its_results_and_is_looked_at_when_it_wakes(place: Place) -> None:
    await place.program.listen()
    worker = place.worker
    machine = await worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    await worker.machines.suspend(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    asked = len(place.program.asked)
    await asyncio.sleep(100)
    assert len(place.program.asked) == asked
    assert [row.status for row in place.rows(machine)] == ["passing"]
    assert place.shown(machine)[0][1:] == ("warning", "the machine is suspended")
    place.program.answer = DOWN
    await worker.machines.start(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    assert place.status(machine) == "passing"
    await place.becomes(machine, "critical", RELEARN_S)


@on_a_network
async def test_an_update_brings_its_own_checks(place: Place) -> None:
    await place.program.listen()
    worker = place.worker
    machine = await worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    named: dict[str, Any] = {
        "checks": {"up": {**HTTP, "port": PORT, "kind": "readiness"}, "nobody": {"type": "tcp", "port": 1}}
    }
    await worker.updates.update(APP.name, machine, worker.request(), config=check_config(machine_config(**named)))
    await worker.at_rest(machine)
    await asyncio.sleep(5)
    assert place.shown(machine) == [("up", "passing", "up"), ("nobody", "critical", "connect: connection refused")]
    assert [(row.name, row.kind, row.service, row.status) for row in place.rows(machine)] == [
        ("nobody", "informational", "", "critical"),
        ("up", "readiness", "", "passing"),
    ]
    await worker.updates.update(APP.name, machine, worker.request(), config=check_config(machine_config()))
    await worker.at_rest(machine)
    assert (place.shown(machine), place.rows(machine)) == ([], [])


@on_a_network
async def test_a_result_that_comes_with_an_update_leaves_no_row_of_a_check_that_is_no_more(place: Place) -> None:
    await place.program.listen()
    worker = place.worker
    machine = await worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    before = worker.machine(machine)
    (check,) = check_config(before.config).checks
    await worker.updates.update(APP.name, machine, worker.request(), config=check_config(machine_config()))
    assert worker.machine(machine).instance == before.instance, "the old program runs on for now"
    critical = Health(status="critical", output="503")
    await worker.store.submit(lambda tx: learned(tx, before, check, critical, "a look"))
    assert place.rows(machine) == []
    await worker.at_rest(machine)
    assert place.rows(machine) == []
    assert worker.wrong() == []


@pytest.mark.parametrize("answer", [OK, DOWN])
def test_a_worker_that_was_killed_goes_on_from_what_it_knew_and_learns_what_has_changed(
    tmp_path: Path, answer: bytes
) -> None:
    @on_a_network
    async def test(place: Place) -> None:
        await place.program.listen()
        machine = await place.worker.run_machine(**served(HTTP))
        await place.becomes(machine, "passing", 1)
        since_s = place.changed_s(machine)
        place.program.answer = answer
        await place.die_and_come_back(after_s=5)
        assert place.status(machine) == "passing"
        await asyncio.sleep(RELEARN_S + 1)
        if answer == OK:
            assert (place.status(machine), place.changed_s(machine)) == ("passing", since_s)
        else:
            assert place.status(machine) == "critical", "it had its grace period before"
        await place.worker.machines.destroy(APP.name, machine, place.worker.request(), force=True)
        await place.worker.at_rest(machine)
        assert place.rows(machine) == []
        assert place.worker.wrong() == []

    test(tmp_path)


@on_a_network
async def test_however_many_are_due_only_so_many_are_looked_at_and_none_is_forgotten(place: Place) -> None:
    place.program.answer = b""
    await place.program.listen()
    slow = [HTTP] * 32
    for n in range(10):
        await place.worker.run_machine(f"order-{n}", **served(*slow))
    await asyncio.sleep(25)
    assert place.program.open_most == AT_ONCE
    whole_turns = AT_ONCE // A_TURN - 1
    assert place.program.asked[AT_ONCE - 1] - place.program.asked[0] >= whole_turns * TURN_S * 0.9
    shown = [check for row in place.worker.store.read.select(MachineRow) for check in place.checks.shown(row)]
    assert len(shown) == 320
    assert {check.output for check in shown} == {"no answer within 2s"}


@on_a_network
async def test_machines_whose_checks_wait_for_minutes_do_not_keep_others_from_being_looked_at(place: Place) -> None:
    place.program.answer = b""
    await place.program.listen()
    for n in range(9):
        await place.worker.run_machine(f"order-{n}", **served(*[{**HTTP, "timeout": "300s"}] * 32))
    await asyncio.sleep(1)
    place.program.answer = OK
    began_s = asyncio.get_running_loop().time()
    quick = await place.worker.run_machine("quick", **served(HTTP))
    assert await place.becomes(quick, "passing", 10) - began_s < 2 * HELD_S


@on_a_network
async def test_with_a_full_disk_a_result_is_shown_and_written_once_there_is_room(place: Place) -> None:
    await place.program.listen()
    machine = await place.worker.run_machine(**served(HTTP))
    await place.becomes(machine, "passing", 1)
    await place.worker.fill_disk()
    place.program.answer = DOWN
    await place.becomes(machine, "critical", 16)
    await asyncio.sleep(1)
    assert [row.status for row in place.rows(machine)] == ["passing"]
    place.worker.make_room()
    await place.worker.until(lambda: [row.status for row in place.rows(machine)] == ["critical"], within_s=16)


@on_a_network
async def test_while_an_update_gets_its_image_the_old_program_is_checked_and_told_of(place: Place) -> None:
    await place.program.listen()
    machine = await place.worker.run_machine(image="app:1", **served(HTTP))
    await place.becomes(machine, "passing", 1)
    (known,) = place.rows(machine)
    place.worker.world.delays["prepare"] = 120
    config = check_config(machine_config(image="app:2", **served({**HTTP, "path": "/other"})))
    await place.worker.updates.update(APP.name, machine, place.worker.request(), config=config)
    asked = len(place.program.asked)
    await asyncio.sleep(60)
    assert place.worker.machine(machine).state is State.updating
    assert (place.status(machine), place.rows(machine)) == ("passing", [known])
    assert len(place.program.asked) >= asked + 3
    place.program.answer = DOWN
    await place.becomes(machine, "critical", 16)
    assert place.rows(machine)[0].status == "critical"
    await place.worker.at_rest(machine)
    (after,) = place.rows(machine)
    assert (after.status, after.instance) == ("warning", place.worker.machine(machine).instance)
    assert place.worker.wrong() == []
