"""A sleeping machine behind its door, with a real worker, real programs and real sockets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.kit.doors import ANSWERS, house
from tests.kit.private import open_directory
from tests.kit.waiting import until

from hawker.host import live
from hawker.model import door as words
from hawker.proxy.base import Address
from hawker.proxy.settings import RouterSettings
from hawker.worker.machine.leases import acquire
from hawker.worker.machine.writer import get_machine
from hawker.worker.request import Request


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "over-the-wire"])
async def test_the_first_request_starts_a_machine_and_is_answered_by_it(tmp_path: Path, in_process: bool) -> None:
    async with house(tmp_path, in_process=in_process) as it:
        machine = await it.machine("web")
        assert await it.get("web") == (200, b"ok")
        await it.in_state(machine, "started")
        assert it.story(machine) == ["launch created", "start starting", "start started"]
        assert all(
            re.fullmatch(rf"{words.AUTOSTART} \(request [0-9A-Z-]+-ord\)", cause) for cause in it.causes(machine)[1:]
        )


async def test_two_hundred_requests_at_once_begin_one_start(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web", env={"BEFORE_S": "0.1"})
        answers = await asyncio.gather(*(it.get("web") for _ in range(200)))
        assert answers == [(200, b"ok")] * 200
        assert it.story(machine).count("start starting") == 1
        assert it.proxy.app_table.doors[machine].in_flight == 0


async def test_a_machine_that_others_started_is_waited_for_until_it_listens(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web", env={"BEFORE_S": "0.3"}, started=True)
        assert await it.get("web") == (200, b"ok")
        assert it.story(machine).count("start starting") == 1


async def test_a_suspended_machine_is_resumed_as_the_instance_that_it_was(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        assert (await it.get("web"))[0] == 200
        instance = it.row(machine).instance
        assert await it.rest(machine, "suspend")
        await it.in_state(machine, "suspended")
        assert (await it.get("web"))[0] == 200
        assert it.row(machine).instance == instance


async def test_no_request_meets_a_machine_that_is_being_stopped(tmp_path: Path) -> None:
    """Each stop is begun while nothing is in flight, and each request in the middle of one."""
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        assert (await it.get("web"))[0] == 200
        door = it.proxy.app_table.doors[machine]
        stopped = 0
        for number in range(12):
            await until(lambda: not door.in_flight and door.state == "started")
            resting = asyncio.ensure_future(door.rest("stop"))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            assert await it.get("web") == (200, b"ok")
            stopped += await resting
        assert stopped >= 9  # else nothing was tried
        assert it.story(machine).count("stop stopped") == stopped


async def test_a_machine_that_others_put_to_rest_is_known_to_rest_however_lately_it_was_woken(tmp_path: Path) -> None:
    """The catalog tells of its start before it listens, and has nothing more to say of that."""
    async with house(tmp_path) as it:
        machine = await it.machine("web", env={"BEFORE_S": "0.2"})
        assert (await it.get("web"))[0] == 200
        door = it.proxy.app_table.doors[machine]
        await it.in_state(machine, "started")
        await it.worker.parts.machine.waking.rest(words.Rest(app="web", machine=machine, how="suspend", why="a user"))
        await it.in_state(machine, "suspended")
        await until(lambda: door.machine.state == "suspended")
        assert door.state == "suspended"


async def test_a_stop_is_known_at_once_at_its_door_however_late_the_catalog_tells_of_it(tmp_path: Path) -> None:
    """A worker publishes so much in a while, and what is over that waits."""
    async with house(tmp_path) as it:
        machine, other = await it.machine("web"), await it.machine("other")
        assert await it.get("web") == (200, b"ok")
        await it.in_state(machine, "started")
        door = it.proxy.app_table.doors[machine]
        cordon = it.worker.parts.machine.waking._machines.cordon
        await asyncio.gather(*(cordon("other", other, Request(id=""), cordoned=n % 2 == 0) for n in range(400)))
        await it.worker.parts.machine.waking.rest(words.Rest(app="web", machine=machine, how="stop", why="a user"))
        await asyncio.sleep(0)
        assert door.state != "started"
        await until(lambda: it.row(machine).state == "stopped")
        assert await it.get("web") == (200, b"ok")
        assert it.proxy.plane.counters.retries == 0  # nothing was sent to where nobody listens


async def test_kept_connections_are_let_go_before_a_machine_is_put_to_rest(tmp_path: Path) -> None:
    """A virtual machine that is suspended hears nothing any more."""
    async with house(tmp_path) as it:
        machine = await it.machine("web", started=True)
        assert (await it.get("web"))[0] == 200
        door = it.proxy.app_table.doors[machine]
        at_once: list[tuple[Address, str]] = []
        it.proxy.app_table.on_let_go.append(lambda address, asleep: at_once.append((address, it.row(machine).state)))
        assert await it.rest(machine, "suspend")
        (endpoint,) = door.endpoints.values()
        assert at_once[0] == (endpoint.address, "started")


async def test_connections_are_let_go_when_others_put_a_machine_to_rest(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web", started=True)
        assert (await it.get("web"))[0] == 200
        door = it.proxy.app_table.doors[machine]
        (endpoint,) = door.endpoints.values()
        gone: list[Address] = []
        it.proxy.app_table.on_let_go.append(lambda address, asleep: gone.append(address))
        await it.worker.parts.machine.waking.rest(words.Rest(app="web", machine=machine, how="stop", why="a user"))
        await until(lambda: endpoint.address in gone)
        assert door.state != "started"


async def test_a_request_in_flight_at_a_machine_that_others_suspend_wakes_it(tmp_path: Path) -> None:
    """Its kernel, or nobody, has the request: no connection tells that nothing comes any more."""
    async with house(tmp_path) as it:
        machine = await it.machine("web", env={"ANSWER_S": "0.5"}, started=True)
        asked = asyncio.ensure_future(it.get("web"))
        await until(lambda: machine in it.proxy.app_table.doors and bool(it.proxy.app_table.doors[machine].in_flight))
        await it.worker.parts.machine.waking.rest(words.Rest(app="web", machine=machine, how="suspend", why="a user"))
        assert await asked == (200, b"ok")
        assert it.story(machine).count("start started") == 2


async def test_a_request_waits_for_the_next_start_when_its_machine_is_stopped_while_its_program_boots(
    tmp_path: Path,
) -> None:
    """The program that is being stopped listens all the same, for as long as it may take to end."""
    stays = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nos.makedirs('up', exist_ok=True)\n"
    async with house(tmp_path) as it:
        machine = await it.machine(
            "web",
            program=stays + ANSWERS,
            env={"BEFORE_S": "0.2", "ANSWER_S": "0.4"},
            stop_config={"timeout": "400ms"},
        )
        getting = asyncio.ensure_future(it.get("web"))
        await until(lambda: it.row(machine).state == "started" and any(tmp_path.glob(f"**/{machine}/up")))
        await it.worker.parts.machine.waking.rest(words.Rest(app="web", machine=machine, how="stop", why="a user"))
        assert await getting == (200, b"ok")
        assert it.story(machine).count("start started") == 2
        assert it.proxy.plane.counters.retries == 0  # the program that was on its way out was not asked


async def test_who_cannot_be_started_is_told_why_at_once(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web", init={"exec": ["/no/such/program"]})
        status, headers, body = await it.asked("web")
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert b"did not start" in body
        assert it.story(machine)[-1] == "start failed"


async def test_a_program_that_was_let_go_and_that_the_kernel_does_not_take_is_waited_for_no_more(
    tmp_path: Path,
) -> None:
    with open_directory() as endpoint:
        broken = endpoint / "broken"
        broken.write_bytes(b"\x7fELF")
        broken.chmod(0o755)
        await is_not_waited_for(tmp_path, broken)


async def is_not_waited_for(directory: Path, broken: Path) -> None:
    async with house(directory) as it:
        machine = await it.machine("web", init={"exec": [str(broken)]})
        status, _, body = await it.asked("web")
        assert (status, b"Exec format error" in body) == (503, True)
        assert it.story(machine) == ["launch created", "start starting", "start failed"]


async def test_a_machine_that_a_client_has_leased_is_left_alone(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        request = Request(id="r", owner="somebody")
        await it.worker.store.submit(lambda tx: acquire(tx, live(), get_machine(tx, machine), request, 60))
        status, _, body = await it.asked("web")
        assert (status, b"lease currently held" in body) == (503, True)
        assert it.story(machine) == ["launch created"]


@pytest.mark.slow
async def test_a_program_that_never_listens_is_given_up(tmp_path: Path) -> None:
    async with house(tmp_path, RouterSettings(ready_s=5.0)) as it:  # in which its worker has started it
        await it.machine("web", program="import time; time.sleep(60)")
        status, _, body = await it.asked("web")
        assert (status, b"takes no connection" in body) == (503, True)


async def test_of_two_sleeping_machines_one_is_started_for_a_few_requests(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machines = [await it.machine("web", env={"BEFORE_S": "0.1"}) for _ in range(2)]
        answers = await asyncio.gather(*(it.get("web") for _ in range(15)))
        assert answers == [(200, b"ok")] * 15
        assert sorted(it.story(machine).count("start starting") for machine in machines) == [0, 1]


async def test_a_machine_at_its_hard_limit_has_the_next_one_started(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        limits = {"concurrency": {"type": "requests", "soft_limit": 1, "hard_limit": 2}}
        machines = [await it.machine("web", env={"BEFORE_S": "0.05"}, service=limits) for _ in range(3)]
        answers = await asyncio.gather(*(it.get("web") for _ in range(20)))
        assert answers == [(200, b"ok")] * 20
        assert all(it.story(machine).count("start starting") == 1 for machine in machines)


async def test_an_app_nobody_knows_is_not_found(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        assert (await it.get("nobody"))[0] == 404
        await it.machine("web")
        await it.proxy.router.load(80, "web.localhost")
        assert (await it.get("web"))[0] == 200


async def test_a_worker_that_has_machines_has_what_starts_them_before_the_first_request(tmp_path: Path) -> None:
    supervisor = tmp_path / "ord-1" / "process" / "socket"
    async with house(tmp_path) as it:
        assert not supervisor.exists()
        await it.machine("web")
    async with house(tmp_path):
        await until(supervisor.exists)


CONNECTIONS = (
    ANSWERS.replace("while True:", "n = 0\nwhile True:")
    .replace("    head =", "    n += 1\n    head =")
    .replace('\\r\\nok")', '\\r\\n" + b"%-2d" % n)')
)
"""Its answers are numbers of connections."""


async def test_the_connection_that_finds_a_machine_listening_carries_the_request(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        await it.machine("web", program=CONNECTIONS)
        assert await it.get("web") == (200, b"1 ")
        assert await it.get("web") == (200, b"2 ")
