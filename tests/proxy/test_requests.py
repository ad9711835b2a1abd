"""Requests and answers as they pass through a data plane."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.raw_http import Visit, echo, head, saying
from tests.kit.waiting import eventually, until
from tests.proxy.conftest import Stage

from hawker.proxy.base import Refused


async def test_a_request_reaches_a_machine_and_its_answer_the_user(stage: Stage) -> None:
    machine = await stage.machine()
    answer = await stage.ask("GET /a/b?c=d | User-Agent: test | X-Own: one | X-Own: two")
    assert (answer.status, answer.reason, answer.body) == (200, b"OK", b"hello")
    (visit,) = machine.visits
    assert (visit.method, visit.target, visit["host"]) == ("GET", "/a/b?c=d", "web.example")
    assert visit.all("x-own") == ["one", "two"]


async def test_a_machine_is_told_who_asks_and_how(stage: Stage) -> None:
    machine = await stage.machine()
    await stage.ask("GET / | X-Forwarded-For: 192.0.2.1 | X-Forwarded-Proto: https | Fly-Client-IP: 192.0.2.9")
    (visit,) = machine.visits
    assert visit["x-forwarded-for"] == "192.0.2.1, 127.0.0.1"
    assert (visit["fly-client-ip"], visit["x-forwarded-proto"], visit["x-forwarded-port"]) == (
        "127.0.0.1",
        "http",
        "80",
    )
    assert visit["fly-region"] == "ams"
    assert visit["via"].startswith("1.1 ")


async def test_user_and_machine_see_the_same_request_id_and_no_two_requests_do(stage: Stage) -> None:
    machine = await stage.machine()
    user = await stage.user()
    answers = [await user.ask("GET / | Fly-Request-Id: mine") for _ in range(3)]
    ids = [answer["fly-request-id"] for answer in answers]
    assert ids == [visit["fly-request-id"] for visit in machine.visits]
    assert len(set(ids)) == 3
    assert all(each.endswith("-ams") for each in ids)


async def test_fields_for_proxies_do_not_pass_in_either_direction(stage: Stage) -> None:
    machine = await stage.machine(
        saying(
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: x-hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
            b"Hawker-Load: 0/1/1\r\nHawker-Elsewhere: gone\r\nX-Own: 2\r\n\r\n"
        )
    )
    answer = await stage.ask(
        "GET / | Connection: x-mine | X-Mine: 1 | Hawker-Machine: m9 | Proxy-Authorization: b | TE: x"
    )
    (visit,) = machine.visits
    names = {name for name, _ in visit.fields}
    assert not names & {b"x-mine", b"hawker-machine", b"proxy-authorization", b"te", b"connection"}
    names = {name for name, _ in answer.fields}
    assert not names & {b"x-hop", b"keep-alive", b"hawker-load", b"hawker-elsewhere", b"connection"}
    assert answer["x-own"] == "2"


async def test_a_public_port_sets_and_removes_fields_of_answers(stage: Stage) -> None:
    stage.serves(set_headers=((b"x-frame-options", b"DENY"),), removed_headers=frozenset({b"x-powered-by"}))
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Powered-By: PHP\r\n\r\n"))
    answer = await stage.ask("GET /")
    assert answer["x-frame-options"] == "DENY"
    assert answer.all("x-powered-by") == []


async def test_requests_of_one_connection_are_answered_in_their_order_also_when_sent_at_once(stage: Stage) -> None:
    async def slow_first(visit: Visit) -> None:
        if visit.target == "/0":
            await until(lambda: len(machine.visits) == 1)
        await echo(visit)

    machine = await stage.machine(slow_first)
    user = await stage.user()
    bodies = [b"%d" % number * number for number in range(20)]
    await user.send(b"".join(head(f"POST /{n} | Content-Length: {len(body)}") + body for n, body in enumerate(bodies)))
    assert [(await user.answer("POST")).body for _ in bodies] == bodies
    assert [visit.target for visit in machine.visits] == [f"/{n}" for n in range(20)]


async def test_more_requests_ahead_than_fit_a_buffer_wait_in_the_users_own_socket(stage: Stage) -> None:
    await stage.machine(echo)
    user = await stage.user()
    count, one = 800, head("POST / | Content-Length: 100 | X-Pad: " + "p" * 100) + b"x" * 100
    sending = asyncio.create_task(user.send(one * count))
    for _ in range(count):
        assert len((await user.answer("POST")).body) == 100
    await sending


async def test_connections_to_machines_are_used_again(stage: Stage) -> None:
    machine = await stage.machine()
    for _ in range(5):
        await stage.ask("GET /")
    assert len(machine.visits) == 5
    assert machine.connections <= stage.plane.keeps


async def test_a_connection_a_machine_wants_closed_is_not_used_again(stage: Stage) -> None:
    machine = await stage.machine(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
    user = await stage.user()
    answers = [await user.ask("GET /") for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3, "what a machine does is not the user's business"
    assert machine.connections == 3


async def test_an_unused_connection_to_a_machine_is_closed_after_a_while(stage: Stage) -> None:
    stage.settings["pool_idle_s"] = 0.05
    ended = asyncio.Event()

    async def noticing(visit: Visit) -> None:
        await echo(visit)
        assert await visit.reader.read(1) == b""
        ended.set()

    await stage.machine(noticing)
    await stage.ask("GET /")
    await asyncio.wait_for(ended.wait(), 5)


async def test_a_host_that_nobody_serves_is_404_with_a_code(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user()
    answer = await user.ask("GET / | Host: none.example")
    assert answer.status == 404
    assert b"PR01" in answer.body
    assert answer["proxy-status"].startswith("hawker; error=")
    assert (await user.ask("GET /")).status == 200, "the connection goes on"


@pytest.mark.parametrize("written", ["WEB.example", "web.example:80", "Web.Example:8080", "web.example:"])
async def test_a_host_is_found_in_any_spelling(stage: Stage, written: str) -> None:
    await stage.machine()
    assert (await stage.ask(f"GET / | Host: {written}")).status == 200


async def test_an_app_that_was_not_asked_for_before_is_loaded_while_the_request_waits(stage: Stage) -> None:
    await stage.machine()
    stage.router.later.add("web.example")
    assert (await stage.ask("GET /")).body == b"hello"
    assert stage.router.loads == 1


async def test_a_request_is_held_until_a_machine_is_awake(stage: Stage) -> None:
    machine = await stage.machine(echo, awake=False)
    (asleep,) = stage.web.machines
    user = await stage.user()
    asking = asyncio.create_task(user.ask("POST / | Content-Length: 4", b"wake"))
    await until(lambda: asleep.waiting == 1)
    assert machine.connections == 0
    asleep.awake.set()
    assert (await asking).body == b"wake"


async def test_a_request_that_no_machine_takes_is_503_and_says_when_to_come_again(stage: Stage) -> None:
    answer = await stage.ask("GET /")
    assert (answer.status, answer["retry-after"]) == (503, "1")
    assert b"PR01" in answer.body


async def test_the_hold_has_an_end(stage: Stage) -> None:
    stage.settings["wait_s"] = 0.05
    await stage.machine(awake=False)
    assert (await stage.ask("GET /")).status == 503


async def test_a_user_who_says_no_more_gets_its_answer(stage: Stage) -> None:
    await stage.machine(awake=False)
    (asleep,) = stage.web.machines
    user = await stage.user()
    await user.send(head("GET /"))
    user.end()
    await until(lambda: asleep.waiting == 1)
    asleep.awake.set()
    answer = await user.answer()
    assert (answer.body, answer["connection"]) == (b"hello", "close")
    assert await user.ended() == "closed"


async def test_a_user_who_leaves_does_not_wait_any_more(stage: Stage) -> None:
    stage.settings["half_closed_s"] = 0.1
    await stage.machine(awake=False)
    (asleep,) = stage.web.machines
    user = await stage.user()
    await user.send(head("GET /"))
    await until(lambda: asleep.waiting == 1)
    await user.close()
    await until(lambda: asleep.waiting == 0)


async def test_a_user_who_leaves_in_the_middle_of_an_answer_ends_it_at_the_machine(stage: Stage) -> None:
    stage.settings["half_closed_s"] = 0.1
    ended = asyncio.Event()

    async def endless(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert await visit.reader.read() == b""
        ended.set()

    await stage.machine(endless)
    user = await stage.user()
    await user.send(head("GET /"))
    await user.head()
    assert await user.piece() == b"hello"
    await user.close()
    await asyncio.wait_for(ended.wait(), 5)
    (machine,) = stage.web.machines
    await until(lambda: machine.in_flight == 0)


async def test_a_port_that_wants_tls_sends_users_of_plain_http_there(stage: Stage) -> None:
    stage.serves(force_https=True)
    machine = await stage.machine()
    answer = await stage.ask("GET /a?b=c")
    assert (answer.status, answer["location"]) == (301, "https://web.example/a?b=c")
    assert machine.visits == []


async def test_a_refusal_to_head_has_no_body(stage: Stage) -> None:
    user = await stage.user()
    assert (await user.ask("HEAD /")).status == 503
    assert (await user.ask("HEAD /")).status == 503


async def test_a_refusal_says_what_the_router_said(stage: Stage) -> None:
    stage.web.refusal = Refused(429, "PL01", "too many wait already", hint="raise the limit", retry_after_s=7)
    answer = await stage.ask("GET /")
    assert (answer.status, answer["retry-after"]) == (429, "7")
    assert answer.body == b"PL01: too many wait already (raise the limit)\n"


async def test_clients_of_http_1_0_are_served_as_they_expect(stage: Stage) -> None:
    machine = await stage.machine(
        saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    )
    user = await stage.user()
    await user.send(b"GET / HTTP/1.0\r\nHost: web.example\r\n\r\n")
    answer = await user.answer()
    assert (answer.body, answer.all("transfer-encoding"), answer["connection"]) == (b"hello", [], "close")
    assert await user.ended() == "closed"
    assert machine.visits[0]["via"] == "1.0 hawker"


async def test_a_request_of_http_1_0_that_names_no_host_gets_its_apps_name(stage: Stage) -> None:
    machine = await stage.machine()
    stage.router.by_port[5432] = stage.web
    user = await stage.user("own")
    await user.send(b"GET / HTTP/1.0\r\n\r\n")
    assert (await user.answer()).body == b"hello"
    assert machine.visits[0]["host"] == "web"


async def test_a_client_of_http_1_0_may_keep_its_connection(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user()
    for _ in range(2):
        await user.send(b"GET / HTTP/1.0\r\nHost: web.example\r\nConnection: keep-alive\r\n\r\n")
        answer = await user.answer()
        assert (answer.body, answer["connection"]) == (b"hello", "keep-alive")


async def test_connection_close_is_honoured(stage: Stage) -> None:
    await stage.machine()
    user = await stage.user()
    assert (await user.ask("GET / | Connection: close"))["connection"] == "close"
    assert await user.ended() == "closed"


async def test_a_prepared_machine_counts_each_request_while_it_is_under_way(stage: Stage) -> None:
    go = asyncio.Event()

    async def waiting(visit: Visit) -> None:
        await go.wait()
        await echo(visit)

    machine = await stage.machine(waiting)
    users = [await stage.user() for _ in range(5)]
    asking = [asyncio.create_task(user.ask("GET /")) for user in users]

    async def all_there() -> bool:
        return len(machine.visits) == 5

    await eventually(all_there, "five requests at the machine")
    (counted,) = stage.web.machines
    assert counted.in_flight == 5
    go.set()
    await asyncio.gather(*asking)
    assert counted.in_flight == 0
