"""What stops users who are slow, on purpose or not, and how a plane ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from tests.kit.raw_http import Broken, Visit, echo, head, hello
from tests.kit.waiting import until
from tests.proxy.conftest import Stage
from tests.proxy.test_tunnels import ASKED, shouting


@pytest.mark.parametrize("sent", [b"", b"GET / HT", head("GET /")[:-2]])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(stage: Stage, sent: bytes) -> None:
    stage.settings["head_timeout_s"] = 0.1
    user = await stage.user()
    await user.send(sent)
    if sent:
        answer = await user.answer()
        assert (answer.status, answer["connection"]) == (408, "close")
    assert await user.ended() == "closed"


async def test_a_head_that_comes_byte_by_byte_does_not_win_time(stage: Stage) -> None:
    stage.settings["head_timeout_s"] = 0.2
    user = await stage.user()
    answer = asyncio.create_task(user.answer())
    for byte in head("GET / | X-A: " + "b" * 1000):
        await user.send(bytes((byte,)))
        if (await asyncio.wait([answer], timeout=0.02))[0]:
            break
    assert (await answer).status == 408


async def test_a_connection_that_is_not_used_is_closed(stage: Stage) -> None:
    stage.serves(idle_timeout_s=0.1)
    await stage.machine()
    user = await stage.user()
    await user.ask("GET /")
    assert await user.ended() == "closed"


async def test_a_body_that_stops_coming_is_408_and_lets_the_machine_go(stage: Stage) -> None:
    stage.settings["idle_timeout_s"] = 0.1
    broken = asyncio.Event()

    async def reading(visit: Visit) -> None:
        try:
            await visit.read()
        except Broken:
            broken.set()

    await stage.machine(reading)
    user = await stage.user()
    await user.send(head(f"POST / | Content-Length: {2 << 20}") + b"half")
    answer = await user.answer("POST")
    assert (answer.status, answer["connection"]) == (408, "close")
    await asyncio.wait_for(broken.wait(), 5)


async def test_a_user_who_takes_nothing_is_cut_off(stage: Stage) -> None:
    stage.settings["idle_timeout_s"] = 0.2
    ended = asyncio.Event()

    async def flood(visit: Visit) -> None:
        try:
            await visit.answer(b"x" * (32 << 20))
            await visit.reader.read()
        finally:
            ended.set()

    await stage.machine(flood)
    user = await stage.user()
    await user.send(head("GET /"))
    await user.head()
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport can
    await asyncio.wait_for(ended.wait(), 10)
    (machine,) = stage.web.machines
    await until(lambda: machine.in_flight == 0)


async def test_a_connection_may_be_limited_to_some_requests(stage: Stage) -> None:
    stage.settings["requests_per_connection"] = 2
    await stage.machine()
    user = await stage.user()
    assert (await user.ask("GET /")).all("connection") == []
    assert (await user.ask("GET /"))["connection"] == "close"
    assert await user.ended() == "closed"


async def test_a_user_who_still_sends_gets_the_whole_refusal(stage: Stage) -> None:
    """A reset, which data for a closed socket brings about, would take it away."""
    for _ in range(10):
        user = await stage.user()
        sending = asyncio.create_task(user.send(b"nonsense\r\n\r\n" + b"x" * (1 << 20)))
        assert (await user.answer()).status == 400
        user.reset()
        await asyncio.gather(sending, return_exceptions=True)


async def test_closing_finishes_what_is_under_way(stage: Stage) -> None:
    go = asyncio.Event()

    async def waiting(visit: Visit) -> None:
        await go.wait()
        await hello(visit)

    machine = await stage.machine(waiting)
    idle, busy = await stage.user(), await stage.user()
    await busy.send(head("GET /"))
    await until(lambda: len(machine.visits) == 1)
    closing = asyncio.create_task(stage.plane.close())
    assert await idle.ended() == "closed"
    with pytest.raises(ConnectionRefusedError):
        await stage.user()
    go.set()
    answer = await busy.answer()
    assert (answer.body, answer["connection"]) == (b"hello", "close")
    await closing


async def test_closing_has_an_end(stage: Stage) -> None:
    stage.settings["drain_s"] = 0.1

    async def waiting(visit: Visit) -> None:
        await asyncio.Event().wait()

    machine = await stage.machine(waiting)
    user = await stage.user()
    await user.send(head("GET /"))
    await until(lambda: len(machine.visits) == 1)
    await asyncio.wait_for(stage.plane.close(), 5)
    assert stage.web.machines[0].in_flight == 0


async def test_a_thousand_idle_connections_and_more_are_nothing_special(stage: Stage) -> None:
    await stage.machine(echo)
    users = [await stage.user() for _ in range(300)]
    answers = await asyncio.gather(*(user.ask("GET /") for user in users))
    assert {answer.status for answer in answers} == {200}


async def test_connections_over_the_limit_are_closed_when_they_come(stage: Stage) -> None:
    stage.settings["connections"] = 2
    await stage.machine()
    first, second, surplus = [await stage.user() for _ in range(3)]
    assert await surplus.ended() in ("closed", "reset")
    for user in (first, second):
        assert (await user.ask("GET /")).status == 200
    first.reset()
    for _ in range(1000):  # until the plane has seen that the first one left
        with suppress(Broken, ConnectionError):
            assert (await stage.ask("GET /")).status == 200
            break
    else:
        pytest.fail("the room of a connection that ended is not given back")


async def let_in(stage: Stage, source: str = "", to: str = "") -> bool:
    user = await stage.user(to, source)
    with suppress(Broken, ConnectionError):
        await user.send(head("GET /"))
        await user.answer()
        return True
    return False


@pytest.mark.parametrize("stage", ["embedded"], indirect=True)  # HAProxy has one number for all
async def test_one_address_has_so_many_connections_and_leaves_others_theirs(stage: Stage) -> None:
    async def either(visit: Visit) -> None:
        await (shouting if visit.all("upgrade") else hello)(visit)

    stage.settings["connections_of_one"] = 3
    await stage.machine(either)
    users = [await stage.user() for _ in range(2)]
    socket = await stage.user()
    await socket.send(head(ASKED))
    assert (await socket.head(upgrade=True)).status == 101
    assert not await let_in(stage), "it has two connections and a tunnel"
    assert await let_in(stage, "127.0.0.2")
    for user in users:
        await user.send(head("GET /"))
        assert (await user.answer()).status == 200
    socket.reset()
    for _ in range(1000):  # until the plane has seen that it left
        if await let_in(stage):
            break
    else:
        pytest.fail("the room of a tunnel that ended is not given back")


async def test_a_trusted_proxy_and_one_of_the_cluster_bring_as_many_users_as_there_are(stage: Stage) -> None:
    stage.settings |= {"connections_of_one": 1, "trusted": ("127.0.0.2",)}
    await stage.machine()
    there = [await stage.user("", "127.0.0.2") for _ in range(3)]
    there += [await stage.user("backhaul") for _ in range(3)]
    assert [(await user.ask("GET /")).status for user in there] == [200] * 3 + [401] * 3
    assert await let_in(stage), "what came over the backhaul is not this address's"
