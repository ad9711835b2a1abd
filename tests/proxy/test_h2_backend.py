"""HTTP/2 to machines: gRPC's way from end to end, many requests on one connection, and what only HTTP/2 can say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from h2.errors import ErrorCodes
from tests.kit.http2 import User2, Visit2, echo2, hello2
from tests.kit.raw_http import Broken, Visit, chunked
from tests.kit.routers import FakeMachine
from tests.kit.waiting import until
from tests.proxy.conftest import Add, Stage

# HAProxy's own HTTP/2 and TLS are not ours to test; where it hands on, it is to this plane.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

GRPC = "POST /hawker.Test/Say | content-type: application/grpc | te: trailers"


@pytest.fixture
async def user(stage: Stage) -> AsyncIterator[User2]:
    stage.settings |= {"pool_idle_s": 0.3, "replay_bytes": 100_000}
    user = await User2.at((await stage.open()).http)
    yield user
    await user.close()


async def test_a_request_of_http1_reaches_a_machine_of_http2(stage: Stage, h2_machine: Add) -> None:
    upstream = await h2_machine(echo2)
    user = await stage.user()
    answer = await user.ask("POST /a?b | Content-Length: 5 | Cookie: x", b"hello")
    assert (answer.status, answer.body, answer["via"]) == (200, b"hello", "2 hawker")
    visit = upstream.visits[0]
    assert dict(visit.fields[:4]) == {
        b":method": b"POST",
        b":scheme": b"http",
        b":authority": b"web.example",
        b":path": b"/a?b",
    }
    assert (visit["cookie"], visit["te"], visit["x-forwarded-for"]) == ("x", "trailers", "127.0.0.1")
    await user.send(b"POST / HTTP/1.1\r\nHost: web.example\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"a", b"b"))
    assert (await user.answer()).body == b"ab"
    assert (await user.ask("GET /")).body == b""
    assert upstream.connections == 1


async def test_grpc_passes_from_end_to_end(h2_machine: Add, user: User2) -> None:
    """Messages both ways at once, and a status in trailers."""

    async def say(visit: Visit2) -> None:
        await visit.head(200, (b"content-type", b"application/grpc"))
        heard = b""
        while heard != b"three":
            await until(lambda: visit.body != heard)  # noqa: B023
            heard = visit.body
            await visit.send(b"<" + heard + b">")
            visit.body = heard = heard if heard == b"three" else b""
        await visit.end((b"grpc-status", b"0"), (b"grpc-message", b"fine"))

    upstream = await h2_machine(say)
    stream = await user.begin(GRPC, ended=False)
    for word in (b"one", b"two", b"three"):
        await user.body(stream, word, ended=word == b"three")
        await user.until(lambda word=word: user.answers[stream].body.endswith(b"<" + word + b">"))  # type: ignore[misc]
    answer = await user.answer(stream)
    assert answer.body == b"<one><two><three>"
    assert answer.trailers == [(b"grpc-status", b"0"), (b"grpc-message", b"fine")]
    assert upstream.visits[0]["te"] == "trailers"


async def test_an_answer_that_is_trailers_alone_passes(h2_machine: Add, user: User2) -> None:
    """As gRPC says that there is no such method."""

    async def no_such(visit: Visit2) -> None:
        await visit.head(200, (b"content-type", b"application/grpc"), (b"grpc-status", b"12"), ended=True)

    await h2_machine(no_such)
    answer = await user.ask(GRPC, b"")
    assert (answer.status, answer["grpc-status"], answer.body) == (200, "12", b"")


async def test_trailers_of_the_request_and_its_answer_pass(stage: Stage, h2_machine: Add) -> None:
    async def count(visit: Visit2) -> None:
        await visit.read()
        await visit.head()
        await visit.send(b"x")
        await visit.end((b"checksum", b"7"))

    upstream = await h2_machine(count)
    user = await stage.user()
    body = chunked(b"body", trailers=b"grade: a\r\n")
    await user.send(b"POST / HTTP/1.1\r\nHost: web.example\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert (await user.answer()).trailers == [(b"checksum", b"7")]
    assert upstream.visits[0].trailers == [(b"grade", b"a")]


async def test_grpc_passes_between_proxies(stage: Stage, h2_machine: Add, user: User2) -> None:
    async def say(visit: Visit2) -> None:
        await visit.head(200, (b"content-type", b"application/grpc"))
        await visit.send(await visit.read())
        await visit.end((b"grpc-status", b"0"))

    upstream = await h2_machine(say)
    stage.app("back").machines = stage.web.machines
    stage.router.routes["back.example"].port = stage.web.port
    headers = ((b"hawker-backhaul", b"secret"), (b"hawker-app", b"back"), (b"hawker-port", b"80"))
    stage.web.machines = [FakeMachine("far", stage.plane.backhaul, headers=(*headers, (b"hawker-machine", b"m1")))]
    answer = await user.ask(GRPC, b"message")
    assert (answer.body, answer.trailers) == (b"message", [(b"grpc-status", b"0")])
    assert upstream.visits[0]["te"] == "trailers"


async def test_many_requests_share_a_connection_up_to_what_the_machine_takes(h2_machine: Add, user: User2) -> None:
    go = asyncio.Event()

    async def slow(visit: Visit2) -> None:
        await go.wait()
        await hello2(visit)

    upstream = await h2_machine(slow, streams=8)
    assert (await asyncio.gather(*(user.begin("GET /") for _ in range(20))))[0] == 1
    await until(lambda: len(upstream.visits) == 20)
    assert upstream.connections <= 4
    go.set()
    assert [(await user.answer(stream)).body for stream in range(1, 40, 2)] == [b"hello"] * 20


@pytest.mark.parametrize("size", [0, 1, 65_536, 2_000_000])
async def test_bodies_of_any_size_pass_both_ways(h2_machine: Add, user: User2, size: int) -> None:
    await h2_machine(echo2)
    body = bytes(range(256)) * (size // 256 + 1)
    assert (await user.ask("POST /", body[:size])).body == body[:size]
    assert (await user.ask(f"POST / | content-length: {size}", body[:size])).body == body[:size]


async def test_a_client_that_takes_nothing_stops_its_machine(stage: Stage, h2_machine: Add) -> None:
    async def long(visit: Visit2) -> None:
        if visit[":path"] == "/small":
            await hello2(visit)
        else:
            await visit.head()
            await visit.send(b"x" * 10_000_000, ended=True)

    upstream = await h2_machine(long)
    slow = await User2.at((await stage.open()).http, eager=False)
    other = await User2.at((await stage.open()).http)
    stream = await slow.begin("GET /")
    await slow.until(lambda: len(slow.answers[stream].body) == 65_535)
    link = upstream.visits[0]._link
    await until(lambda: link.h2.local_flow_control_window(1) == 0)
    assert (await other.ask("GET /small")).body == b"hello"
    assert upstream.connections == 1
    slow.h2.increment_flow_control_window(1 << 24)
    slow.h2.increment_flow_control_window(1 << 24, stream)
    await slow.send()
    assert len((await slow.answer(stream)).body) == 10_000_000
    await slow.close()
    await other.close()


async def test_a_machine_that_takes_nothing_stops_its_client(stage: Stage, h2_machine: Add, user: User2) -> None:
    async def deaf(visit: Visit2) -> None:
        await asyncio.Event().wait()

    upstream = await h2_machine(deaf, deaf=True)
    stream = await user.begin("POST /", ended=False)
    sending = asyncio.create_task(user.body(stream, bytes(10_000_000)))
    await until(lambda: user.h2.local_flow_control_window(stream) == 0)
    await until(lambda: [len(visit.body) for visit in upstream.visits] == [65_535])
    sending.cancel()
    await user.cancel(stream)
    await until(lambda: upstream.visits[0].reset == ErrorCodes.CANCEL)
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_a_cancelled_request_is_cancelled_at_the_machine_alone(
    stage: Stage, h2_machine: Add, user: User2
) -> None:
    async def waiting(visit: Visit2) -> None:
        if visit[":path"] == "/small":
            await hello2(visit)

    upstream = await h2_machine(waiting)
    stream = await user.begin("POST /", ended=False)
    await until(lambda: len(upstream.visits) == 1)
    await user.cancel(stream)
    await until(lambda: upstream.visits[0].reset == ErrorCodes.CANCEL)
    assert stage.web.machines[0].in_flight == 0
    assert (await user.ask("GET /small")).body == b"hello"
    assert upstream.connections == 1


async def test_what_a_machine_has_not_looked_at_goes_to_it_again(h2_machine: Add, user: User2) -> None:
    """As servers that restart or renew their connections say it, also for what must not be done twice."""

    async def leaving(visit: Visit2) -> None:
        if visit.stream == 3:
            await visit.goodbye(1)
        else:
            await hello2(visit)

    upstream = await h2_machine(leaving)
    assert (await user.ask("POST /", b"1")).body == b"hello"
    assert (await user.ask("POST /", b"2")).body == b"hello"
    assert upstream.connections == 2


async def test_a_refused_request_goes_to_another_machine(stage: Stage, h2_machine: Add, user: User2) -> None:
    async def refusing(visit: Visit2) -> None:
        await visit.refuse(ErrorCodes.REFUSED_STREAM)

    await h2_machine(refusing)
    await h2_machine(hello2)
    assert (await user.ask("POST /", b"1")).body == b"hello"
    assert stage.web.machines[0].failures == ["reset"]


async def test_a_request_that_broke_after_it_was_sent_is_not_made_twice(
    stage: Stage, h2_machine: Add, user: User2
) -> None:
    async def breaking(visit: Visit2) -> None:
        await visit.read()
        visit.cut()

    await h2_machine(breaking)
    second = await h2_machine(hello2)
    assert (await user.ask("POST /", b"1")).status == 502
    assert not second.visits
    assert (await user.ask("GET /")).body == b"hello"


async def test_an_answer_that_breaks_off_is_broken_off(h2_machine: Add, user: User2) -> None:
    async def half(visit: Visit2) -> None:
        await visit.head(200, (b"content-length", b"10"))
        await visit.send(b"half")
        await visit.refuse(ErrorCodes.INTERNAL_ERROR)

    await h2_machine(half)
    with pytest.raises(Broken, match="reset"):
        await user.ask("GET /")


async def test_a_machine_that_does_not_speak_http2_is_told_of(stage: Stage, user: User2) -> None:
    async def http1(visit: Visit) -> None:
        await visit.answer(b"hello")

    stage.serves(h2_backend=True)
    upstream = await stage.machine(http1)
    answer = await user.ask("GET /")
    assert (answer.status, b"HTTP/2" in answer.body) == (502, True)
    upstream.errors.clear()


async def test_a_machine_that_never_answers_is_given_up(stage: Stage, h2_machine: Add, user: User2) -> None:
    stage.serves(idle_timeout_s=0.1)

    async def never(visit: Visit2) -> None:
        pass

    upstream = await h2_machine(never)
    assert (await user.ask("GET /")).status == 504
    await until(lambda: upstream.visits[0].reset == ErrorCodes.CANCEL)


async def test_a_machine_may_hand_a_request_on(stage: Stage, h2_machine: Add, user: User2) -> None:
    async def handing(visit: Visit2) -> None:
        await visit.read()
        await visit.head(200, (b"fly-replay", b"instance=m2"), ended=True)

    await h2_machine(handing)
    await h2_machine(echo2)
    assert (await user.ask("POST /", b"again")).body == b"again"


async def test_an_upgrade_goes_to_the_machine_as_http1(stage: Stage) -> None:
    """Few servers of HTTP/2 take WebSocket as a stream; those that do not are many."""

    async def switching(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhi")
        visit.complete = True
        await visit.reader.read()
        visit.close()

    stage.serves(h2_backend=True)
    await stage.machine(switching)
    user = await stage.user()
    await user.send(b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (await user.head(upgrade=True)).status == 101
    assert await user.bytes(2) == b"hi"


async def test_unused_connections_to_machines_are_closed(h2_machine: Add, user: User2) -> None:
    upstream = await h2_machine()
    await user.ask("GET /")
    await until(lambda: not upstream.tasks)
