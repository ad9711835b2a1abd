"""Machines that do not answer as they should: what is tried again, where, and what the user is told."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.kit.raw_http import Upstream, User, Visit, chunked, echo, head, hello, resetting, saying, silent
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

from hawker.proxy.base import Refused


async def refusing(stage: Stage) -> Upstream:
    """A machine at whose address nobody listens."""
    machine = await stage.machine()
    await machine.stop()
    return machine


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_machine_that_refuses_connections_is_passed_over_whatever_the_method(stage: Stage, method: str) -> None:
    await refusing(stage)
    await stage.machine(echo)
    answer = await stage.ask(f"{method} / | Content-Length: 4", b"body")
    assert (answer.status, answer.body) == (200, b"body")
    assert stage.web.machines[0].failures == ["refused"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_a_request_that_may_be_repeated_is_when_its_machine_breaks_off_before_an_answer(
    stage: Stage, method: str
) -> None:
    await stage.machine(resetting)
    await stage.machine(echo)
    answer = await stage.ask(f"{method} / | Content-Length: 4", b"body")
    assert (answer.status, answer.body) == (200, b"" if method == "HEAD" else b"body")
    assert stage.web.machines[0].failures == ["reset"]


@pytest.mark.parametrize("method", ["POST", "PATCH", "X-OWN"])
async def test_a_request_that_may_have_been_carried_out_is_not_repeated(stage: Stage, method: str) -> None:
    await stage.machine(resetting)
    second = await stage.machine(echo)
    answer = await stage.ask(f"{method} / | Content-Length: 4", b"body")
    assert answer.status == 502
    assert b"PC02" in answer.body
    assert second.visits == []


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r"])
async def test_an_answer_that_breaks_off_in_its_head_is_none(stage: Stage, begun: bytes) -> None:
    await stage.machine(saying(begun, then="close"))
    await stage.machine(echo)
    assert (await stage.ask("GET /")).status == 200


async def test_a_body_too_large_to_be_kept_is_not_sent_twice(stage: Stage) -> None:
    stage.settings["replay_bytes"] = 1000
    await stage.machine(resetting)
    second = await stage.machine(echo)
    answer = await stage.ask("PUT / | Content-Length: 100000", b"x" * 100000)
    assert answer.status == 502
    assert second.visits == []


async def test_a_body_that_is_still_coming_goes_to_the_next_machine_from_its_beginning(stage: Stage) -> None:
    async def breaking(visit: Visit) -> None:
        await visit.piece()
        visit.reset()

    first = await stage.machine(breaking)
    second = await stage.machine(echo)
    user = await stage.user()
    await user.send(head("PUT / | Transfer-Encoding: chunked") + b"5\r\nhello\r\n")
    await until(lambda: len(second.visits) == 1)
    await user.send(b"6\r\n world\r\n0\r\n\r\n")
    assert (await user.answer("PUT")).body == b"hello world"
    assert first.visits[0].body == b"hello"


async def test_when_nobody_is_left_the_user_is_told_what_the_last_one_did(stage: Stage) -> None:
    await refusing(stage)
    stage.web.refusal = Refused(503, "PR01", "no machine is left", retry_after_s=1)
    answer = await stage.ask("GET /")
    assert (answer.status, answer["retry-after"]) == (502, "1")
    assert b"PC01" in answer.body


async def test_tries_are_bounded(stage: Stage) -> None:
    stage.settings["attempts"] = 3
    for _ in range(5):
        await refusing(stage)
    answer = await stage.ask("GET /")
    assert answer.status == 502
    assert b"PC01" in answer.body
    assert [machine.taken for machine in stage.web.machines] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_kept_connection_that_the_machine_has_closed_is_not_the_machines_failure(
    stage: Stage, method: str
) -> None:
    async def once(visit: Visit) -> None:
        await hello(visit)
        visit.close()

    machine = await stage.machine(once)
    for _ in range(20):
        assert (await stage.ask(f"{method} / | Content-Length: 0")).status == 200
    assert machine.connections == 20
    assert stage.web.machines[0].failures == []


async def test_a_kept_connection_that_breaks_in_the_very_moment_is_replaced_by_another_to_the_same_machine(
    stage: Stage,
) -> None:
    async def second_breaks(visit: Visit) -> None:
        if visit.number == 2:
            visit.reset()
        else:
            await hello(visit)

    machine = await stage.machine(second_breaks)
    for _ in range(4):
        assert (await stage.ask("GET /")).status == 200
    assert machine.connections == 4
    assert stage.web.machines[0].failures == []


async def test_a_machine_that_never_answers_is_504_in_time(stage: Stage) -> None:
    stage.serves(idle_timeout_s=0.1)
    await stage.machine(silent)
    user = await stage.user()
    answer = await user.ask("POST / | Content-Length: 0")
    assert answer.status == 504
    assert b"PC05" in answer.body
    assert stage.web.machines[0].failures == ["timeout"]
    assert (await user.ask("POST / | Content-Length: 0")).status == 504, "the user's connection goes on"


async def test_a_machine_that_falls_silent_in_its_answer_has_it_cut(stage: Stage) -> None:
    stage.serves(idle_timeout_s=0.5)

    async def stopping(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        await asyncio.Event().wait()

    await stage.machine(stopping)
    user = await stage.user()
    await user.send(head("GET /"))
    await user.head()
    assert await user.piece() == b"hello"
    assert await user.ended() in ("closed", "reset")


async def test_a_machine_that_accepts_no_connection_in_time_is_passed_over(stage: Stage) -> None:
    stage.settings["connect_timeout_s"] = 0.1
    await stage.machine()
    stage.web.machines[0].address = ("192.0.2.1", 9)  # for documentation: nobody answers there
    await stage.machine(echo)
    assert (await stage.ask("GET /")).status == 200
    assert stage.web.machines[0].failures in (["timeout"], ["refused"])


async def test_a_machine_that_is_asked_for_by_name_gets_the_request(stage: Stage) -> None:
    await stage.machine()
    second = await stage.machine()
    assert (await stage.ask("GET / | Fly-Force-Instance-Id: m2")).status == 200
    assert len(second.visits) == 1


async def test_a_preferred_machine_that_is_not_there_is_named_to_the_other(stage: Stage) -> None:
    machine = await stage.machine()
    await stage.ask("GET / | Fly-Prefer-Instance-Id: m9")
    assert machine.visits[0]["fly-preferred-instance-unavailable"] == "m9"


@pytest.mark.parametrize("stage", ["embedded"], indirect=True)
async def test_whether_it_is_the_preferred_one_is_said_by_the_proxy_that_chooses_the_machine(stage: Stage) -> None:
    machine = await stage.machine(headers=((b"hawker-app", b"web"), (b"hawker-machine", b"")))
    await stage.ask("GET / | Fly-Prefer-Instance-Id: m1")
    assert machine.visits[0].all("fly-preferred-instance-unavailable") == []
    stage.web.machines[0].headers = ()
    there = await stage.user("backhaul")
    for wished, chosen in (("m1", ""), ("m9", ""), ("m9", "m1")):
        own = f"Hawker-Backhaul: secret | Hawker-App: web | Hawker-Port: 80 | Hawker-Machine: {chosen}"
        await there.ask(f"GET / | {own} | Fly-Prefer-Instance-Id: {wished}")
    said = [visit.all("fly-preferred-instance-unavailable") for visit in machine.visits[1:]]
    assert said == [[], ["m9"], []], "the last one was chosen by the edge, which has said it"


async def test_a_user_is_told_what_took_how_long_if_it_asks(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user()
    answer = await user.ask("GET / | Hawker-Timing: 1")
    phases = {part.split(";dur=")[0]: float(part.split(";dur=")[1]) for part in answer["server-timing"].split(", ")}
    assert {"edge-find", "edge-connect", "edge-first-byte"} <= set(phases)
    assert 0 < phases["edge-connect"] < phases["edge-first-byte"] < 5000
    assert (await user.ask("GET /")).all("server-timing") == []


async def test_under_a_mixed_load_every_request_is_answered_and_what_may_be_repeated_succeeds(stage: Stage) -> None:
    dice = random.Random(7)

    async def moody(visit: Visit) -> None:
        mood = dice.random()
        if mood < 0.2:
            await visit.piece()
            visit.reset()
        elif mood < 0.3:
            await visit.read()
            visit.close()
        elif mood < 0.4:
            await visit.read()
            await visit.send(b"HTTP/1.1 20")
            visit.close()
        else:
            await echo(visit)

    await refusing(stage)
    for _ in range(2):
        await stage.machine(moody)
    await stage.machine(echo)
    bodies = [b"%d" % number * dice.randrange(1, 3000) for number in range(60)]
    statuses: list[tuple[str, int]] = []

    async def use(user: User) -> None:
        for _ in range(10):
            method, body = dice.choice(("PUT", "POST")), dice.choice(bodies)
            framed = dice.choice((f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"))
            answer = await user.ask(f"{method} / | {framed}", body if "Length" in framed else chunked(body))
            assert answer.body == body or answer.status == 502
            statuses.append((method, answer.status))

    await asyncio.gather(*[use(await stage.user()) for _ in range(20)])
    assert len(statuses) == 200
    assert {status for method, status in statuses if method == "PUT"} == {200}
    assert {status for method, status in statuses if method == "POST"} == {200, 502}
