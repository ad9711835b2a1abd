"""An edge proxy, the door of a worker behind it, and what each does when the other does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.kit.doors import ANSWERS, PORT, House, edge, house
from tests.kit.private import open_directory
from tests.kit.waiting import until

from hawker.core.retrying import SENT_MOST
from hawker.proxy.base import Address
from hawker.proxy.settings import RouterSettings


@pytest.fixture
def outside() -> Iterator[Path]:
    """For what a machine's program finds or writes."""
    with open_directory() as endpoint:
        yield endpoint


async def test_an_edge_reaches_a_sleeping_machine_by_way_of_its_door(tmp_path: Path) -> None:
    async with house(tmp_path) as it, edge(it) as downstream:
        machine = await it.machine("web")
        assert await downstream.get("web") == (200, b"ok")
        assert it.story(machine).count("start starting") == 1
        assert machine not in downstream.proxy.app_table.doors
        await until(lambda: it.proxy.app_table.doors[machine].in_flight == 0)


async def test_two_proxies_asked_in_the_same_moment_begin_one_start(tmp_path: Path) -> None:
    async with house(tmp_path) as it, edge(it) as downstream:
        machine = await it.machine("web", env={"BEFORE_S": "0.05"})
        answers = await asyncio.gather(*(proxy.get("web") for proxy in (it, downstream) for _ in range(40)))
        assert answers == [(200, b"ok")] * 80
        assert it.story(machine).count("start starting") == 1


async def test_of_two_sleeping_machines_two_edges_wake_the_same(tmp_path: Path) -> None:
    async with house(tmp_path) as it, edge(it) as one, edge(it) as other:
        machines = [await it.machine("web", env={"BEFORE_S": "0.05"}) for _ in range(3)]
        answers = await asyncio.gather(*(proxy.get("web") for proxy in (one, other) for _ in range(5)))
        assert {status for status, _ in answers} == {200}
        assert sum(it.story(machine).count("start starting") for machine in machines) == 1


async def test_a_request_that_waits_for_room_at_its_door_is_not_taken_for_one_that_nobody_answers(
    tmp_path: Path,
) -> None:
    service = {
        "ports": [{"port": PORT, "handlers": ["http"], "http_options": {"idle_timeout": 1}}],
        "concurrency": {"type": "requests", "soft_limit": 1, "hard_limit": 1},
    }
    async with house(tmp_path) as it, edge(it) as one, edge(it) as other:
        await it.machine("web", env={"ANSWER_S": "0.7"}, service=service)
        assert await asyncio.gather(*(each.get("web") for each in (one, other))) == [(200, b"ok")] * 2
        assert [each.proxy.plane.counters.retries for each in (one, other)] == [0, 0]


WAITS = f"""
import os, time
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
{ANSWERS}
"""
"""A program that does not listen before there is a file."""


async def test_a_request_passes_over_a_worker_where_as_many_wait_as_may_and_is_refused_when_all_are_so(
    tmp_path: Path, outside: Path
) -> None:
    crowded = RouterSettings(queue=1)

    async def filled(it: House, machine: str) -> asyncio.Task[tuple[int, dict[str, str], bytes]]:
        """A request that waits there for the machine, at the worker's own proxy."""
        waiting = asyncio.create_task(it.asked("web", headers=f"fly-force-instance-id: {machine}\r\n", seconds=50))
        routed = it.proxy.app_table.load("web")
        assert routed is not None
        await until(lambda: any(group.held for group in routed.groups.values()))
        await it.in_state(machine, "started")
        return waiting

    async with house(tmp_path, crowded) as one, house(tmp_path, crowded, name="ord-2", join=one) as two:
        gates = [outside / "1", outside / "2"]
        first = await one.machine("web", program=WAITS, env={"GATE": str(gates[0])})
        second = await two.machine("web", program=WAITS, env={"GATE": str(gates[1])})
        await until(lambda: one.shown(second) == two.shown(second) and two.shown(first) == one.shown(first))
        async with edge(one) as downstream, edge(one, region="mad") as other_regions:
            waiting = [await filled(one, first)]
            gates[1].touch()
            assert (await downstream.asked("web", seconds=40))[::2] == (200, b"ok")
            assert two.story(second).count("start starting") == 1

            await two.stop(second)
            await until(lambda: one.shown(second) == "stopped")
            gates[1].unlink()
            waiting.append(await filled(two, second))
            await until(lambda: one.shown(second) == "started")
            for each in (downstream, other_regions):
                status, headers, body = await each.asked("web", seconds=40)
                assert (status, headers["retry-after"], body[:4]) == (503, "1", b"PR04")
            for gate in gates:
                gate.touch()
            assert [(await each)[0] for each in waiting] == [200, 200]


BREAKS = """
import os, socket
s = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
while True:
    c, _ = s.accept()
    if c.recv(65536):
        with open(os.environ["WROTE"], "ab") as wrote:
            wrote.write(b".")
    c.close()
"""
"""A program that breaks off whatever it is asked, and writes a dot for it."""


@pytest.mark.parametrize("region", ["ord", "mad"])
async def test_a_request_that_breaks_a_machine_is_sent_no_oftener_by_way_of_two_proxies(
    tmp_path: Path, outside: Path, region: str
) -> None:
    """The edge chooses the machine, or the proxy of the region that has it."""
    async with house(tmp_path) as it, edge(it, region=region) as downstream:
        wrote = outside / "requests"
        wrote.touch()
        wrote.chmod(0o666)
        await it.machine("web", program=BREAKS, env={"WROTE": str(wrote)})
        status, _ = await downstream.get("web")
        assert status == 502
        assert wrote.read_bytes() == b"." * SENT_MOST


@asynccontextmanager
async def slow_way(seconds: float) -> AsyncIterator[tuple[int, list[Address]]]:
    """A port, and a list for the address that it leads to; so much later does all arrive, in both directions."""
    to: list[Address] = []
    taken: set[asyncio.Task[None] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        later: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            data = b"."
            while data:
                at, data = await later.get()
                await asyncio.sleep(at - loop.time())
                writer.write(data)
            writer.close()

        writing = loop.create_task(write())
        data = b"."
        while data:
            data = await reader.read(65536)
            later.put_nowait((loop.time() + seconds, data))
        await writing

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.add(asyncio.current_task())
        further, back = await asyncio.open_connection(*to[0])
        with suppress(OSError):
            await asyncio.gather(carry(reader, back), carry(further, writer))

    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], to
    server.close()
    await asyncio.gather(*(task for task in taken if task))


async def test_requests_that_wake_a_machine_over_a_slow_link_are_answered_and_start_it_once(tmp_path: Path) -> None:
    """As over an ocean: a proxy of others was reported to hold such a request for ever."""
    async with slow_way(0.1) as (way, to), house(tmp_path, way=way) as it, edge(it) as one, edge(it) as other:
        assert it.proxy.backhaul is not None
        to.append(it.proxy.backhaul)
        machine = await it.machine("web", env={"BEFORE_S": "0.05"})
        answers = await asyncio.gather(*(proxy.get("web") for proxy in (one, other) for _ in range(10)))
        assert answers == [(200, b"ok")] * 20
        assert it.story(machine).count("start starting") == 1


async def test_a_stranger_is_not_let_in_over_the_backhaul(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        assert it.proxy.backhaul is not None
        reader, writer = await asyncio.open_connection(*it.proxy.backhaul)
        writer.write(
            b"GET / HTTP/1.1\r\nhost: x\r\nhawker-backhaul: wrong\r\nhawker-app: web\r\nhawker-port: 80\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        assert it.story(machine) == ["launch created"]


@pytest.mark.slow
async def test_a_machine_that_stands_by_is_started_once_when_the_worker_is_gone(tmp_path: Path) -> None:
    """By two proxies, each of which finds out by itself."""
    settings = RouterSettings(gone_s=1.0)
    async with house(tmp_path, settings) as it:
        async with house(tmp_path, name="ord-2", join=it) as gone:
            primary = await gone.machine("web", started=True)
            await it.in_state(primary, "started")
            standby = await it.machine("web", standbys=[primary])
            unrelated = await it.machine("web", standbys=["0123456789abcd"])
            async with edge(it, settings):
                await it.proxy.standbys.look()
                assert it.story(standby) == ["launch created"]
                await gone.proxy.close()
                await gone.agent.close()
                await it.in_state(standby, "started")
        assert it.story(standby).count("start starting") == 1
        assert it.causes(standby)[1:] == ["proxy standby: worker ord-2 is gone"] * 2
        assert it.story(unrelated) == ["launch created"]
        await it.stop(standby)
        another = await it.machine("web", standbys=[primary])
        async with edge(it, settings):  # it does not know what the others did, but that there was an outage
            await it.in_state(another, "started")
        assert it.story(standby).count("start starting") == 1
        assert it.shown(standby) == "stopped"
