"""HTTP/2 from clients: the same exchanges as over HTTP/1.1, many at once, and what only HTTP/2 has."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Awaitable, Callable

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, SettingsFrame
from tests.kit.authority import Authority
from tests.kit.http2 import User2, head2
from tests.kit.raw_http import Broken, Visit, chunked, echo, saying, silent
from tests.kit.waiting import until
from tests.proxy.conftest import Connect, Stage

from hawker.proxy.embedded.h2_client import H2Connection

# HAProxy's own HTTP/2 and TLS are not ours to test; where it hands on, it is to this plane.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)


async def test_a_request_is_answered_and_told_as_what_it_is(stage: Stage, connect: Connect) -> None:
    machine = await stage.machine()
    user = await connect()
    answer = await user.ask("GET /a?b | accept: x | cookie: a=1 | cookie: b=2")
    assert (answer.status, answer.body, answer["server"]) == (200, b"hello", "hawker")
    visit = machine.visits[0]
    assert (visit.method, visit.target, visit["host"], visit["accept"]) == ("GET", "/a?b", "web.example", "x")
    assert (visit["cookie"], visit["via"]) == ("a=1; b=2", "2 hawker")
    assert visit["fly-request-id"] == answer["fly-request-id"]
    assert not visit.all("content-length")


async def test_many_requests_at_once_each_get_their_own_answer(stage: Stage, connect: Connect) -> None:
    await stage.machine(echo)
    user = await connect()
    bodies = [b"%d" % n * 1000 for n in range(100)]
    answers = await asyncio.gather(*(user.ask("POST /", body) for body in bodies))
    assert [answer.body for answer in answers] == bodies
    assert stage.web.machines[0].most > 10


async def test_over_tls_it_is_agreed_upon_by_alpn(stage: Stage, connect: Connect, tmp_path: object) -> None:
    authority = Authority()
    authority.write(tmp_path, "web.example")  # type: ignore[arg-type]
    stage.settings["certificates"] = tmp_path
    stage.serves(handlers=("tls", "http"))
    machine = await stage.machine()
    user = await connect(tls=authority.client("h2", "http/1.1"), name="web.example")
    assert (await user.ask("GET / | :scheme: https")).body == b"hello"
    assert machine.visits[0]["x-forwarded-proto"] == "https"
    stage.serves(alpn=("http/1.1",))
    plain = await stage.user(tls=authority.client("h2", "http/1.1"))
    assert (await plain.ask("GET /")).body == b"hello"


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 3_000_000])
async def test_bodies_of_any_size_pass_both_ways(stage: Stage, connect: Connect, size: int) -> None:
    await stage.machine(echo)
    user = await connect()
    body = hashlib.sha256(b"%d" % size).digest() * (size // 32 + 1)
    assert (await user.ask("POST /", body[:size])).body == body[:size]
    again = await user.ask(f"POST / | content-length: {size}", body[:size])
    assert again.body == body[:size]


async def test_an_empty_frame_does_not_end_the_body_that_the_machine_gets(stage: Stage, connect: Connect) -> None:
    machine = await stage.machine(echo)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    for data in (b"", b"GET / HTTP/1.1\r\n", b"", b"", b"Host: x\r\n\r\n", b""):
        user.h2.send_data(stream, data)
        await user.send()
    user.h2.end_stream(stream)
    await user.send()
    assert (await user.answer(stream)).body == b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    assert len(machine.visits) == 1


async def test_a_post_without_a_body_says_so_to_the_machine(stage: Stage, connect: Connect) -> None:
    machine = await stage.machine()
    await (await connect()).ask("POST /")
    assert machine.visits[0]["content-length"] == "0"


async def test_trailers_pass_both_ways(stage: Stage, connect: Connect) -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"x", trailers=b"checksum: 7\r\n")
    machine = await stage.machine(saying(answer))
    got = await (await connect()).ask("POST /", b"body", trailers=[(b"grade", b"a")])
    assert (got.body, got.trailers) == (b"x", [(b"checksum", b"7")])
    assert machine.visits[0].trailers == [(b"grade", b"a")]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    ],
)
async def test_answers_of_any_framing_pass(
    stage: Stage, connect: Connect, answer: bytes, status: int, body: bytes
) -> None:
    await stage.machine(saying(answer, "close"))
    got = await (await connect()).ask("GET /")
    assert (got.status, got.body) == (status, body)
    assert got.interim == ([103] if b"103" in answer else [])
    assert {b"connection", b"transfer-encoding", b"keep-alive"}.isdisjoint(dict(got.fields))


async def test_an_answer_to_head_has_no_body(stage: Stage, connect: Connect) -> None:
    await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"))
    got = await (await connect()).ask("HEAD /")
    assert (got["content-length"], got.body) == ("5", b"")


async def test_an_answer_that_breaks_off_breaks_its_stream_alone(stage: Stage, connect: Connect) -> None:
    async def broken(visit: Visit) -> None:
        if visit.target == "/whole":
            await visit.answer(b"whole")
        else:
            await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            visit.reset()

    await stage.machine(broken)
    user = await connect()
    with pytest.raises(Broken, match=f"reset: {ErrorCodes.INTERNAL_ERROR:d}"):
        await user.ask("GET /")
    assert (await user.ask("GET /whole")).body == b"whole"


async def test_a_request_that_a_machine_does_not_take_goes_to_another(stage: Stage, connect: Connect) -> None:
    dead = await stage.machine()
    await dead.stop()
    await stage.machine()
    assert (await (await connect()).ask("GET /")).body == b"hello"
    assert stage.web.machines[0].failures == ["refused"]


async def test_a_request_is_held_until_its_machine_is_awake(stage: Stage, connect: Connect) -> None:
    await stage.machine(echo, awake=False)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    await user.body(stream, b"early")
    await until(lambda: stage.web.machines[0].waiting == 1)
    stage.web.machines[0].awake.set()
    assert (await user.answer(stream)).body == b"early"


# --- flow control ----------------------------------------------------------------------------------------------------


async def test_a_client_that_takes_nothing_stops_its_machine_and_nobody_else(stage: Stage, connect: Connect) -> None:
    sent = 0
    stopped = asyncio.Event()

    async def endless(visit: Visit) -> None:
        nonlocal sent
        if visit.target == "/small":
            await visit.answer(b"small")
            return
        await visit.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            visit.writer.write(b"x" * 65536)
            try:
                await asyncio.wait_for(visit.writer.drain(), 0.3)
            except TimeoutError:
                stopped.set()
                await visit.writer.drain()
            sent += 65536

    await stage.machine(endless)
    user = await connect(eager=False)
    stream = await user.begin("GET /")
    await asyncio.wait_for(stopped.wait(), 30)
    await user.until(lambda: len(user.answers[stream].body) == 65_535)
    at = sent
    user.h2.increment_flow_control_window(1 << 20)
    await user.send()
    assert (await user.ask("GET /small")).body == b"small"
    user.h2.increment_flow_control_window(1 << 20, stream)
    await user.send()
    await user.until(lambda: len(user.answers[stream].body) > 300_000)
    assert sent >= at
    await user.cancel(stream)
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_a_machine_that_takes_nothing_stops_its_client_and_nobody_else(stage: Stage, connect: Connect) -> None:
    stage.settings |= {"replay_bytes": 1000, "window_bytes": 1000}

    async def deaf(visit: Visit) -> None:
        if visit.target == "/small":
            await visit.answer(b"small")
        else:
            await asyncio.Event().wait()

    await stage.machine(deaf)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    sending = asyncio.create_task(user.body(stream, bytes(30_000_000)))
    await until(lambda: user.h2.local_flow_control_window(stream) == 0)
    assert (await user.ask("GET /small")).body == b"small"
    assert not sending.done()
    sending.cancel()
    await user.cancel(stream)
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_streams_take_turns(stage: Stage, connect: Connect) -> None:
    async def long(visit: Visit) -> None:
        await visit.answer(b"x" * 600_000)

    await stage.machine(long)
    user = await connect(eager=False)
    user.h2.update_settings({4: 1 << 20})
    streams = [await user.begin("GET /") for _ in range(4)]
    await user.until(lambda: sum(len(user.answers[stream].body) for stream in streams) == 65_535)
    user.h2.increment_flow_control_window(1 << 19)
    await user.send()
    await user.until(lambda: sum(len(user.answers[stream].body) for stream in streams) == 65_535 + (1 << 19))
    each = sorted(len(user.answers[stream].body) for stream in streams)
    assert each[0] > each[-1] // 2


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "asked", "answering"])
async def test_a_cancelled_request_is_let_go_of_at_once(stage: Stage, connect: Connect, when: str) -> None:
    gone = asyncio.Event()

    async def slow(visit: Visit) -> None:
        if when == "answering":
            await visit.send(b"HTTP/1.1 200 OK\r\n\r\nsome")
        if not await visit.reader.read(1):
            gone.set()

    upstream = await stage.machine(slow, awake=when != "waiting")
    machine = stage.web.machines[0]
    user = await connect()
    stream = await user.begin("GET /")
    if when == "waiting":
        await until(lambda: machine.waiting == 1)
    elif when == "asked":
        await until(lambda: len(upstream.visits) == 1)
    else:
        await user.until(lambda: user.answers[stream].body == b"some")
    await user.cancel(stream)
    await until(lambda: machine.in_flight == machine.waiting == 0)
    if when != "waiting":
        await asyncio.wait_for(gone.wait(), 30)


async def test_a_client_that_goes_away_lets_go_of_all_its_requests(stage: Stage, connect: Connect) -> None:
    await stage.machine(silent)
    user = await connect()
    for _ in range(10):
        await user.begin("GET /")
    await until(lambda: stage.web.machines[0].in_flight == 10)
    user.writer.transport.abort()
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_an_answer_may_come_before_the_request_is_complete(stage: Stage, connect: Connect) -> None:
    async def early(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        visit.close()

    await stage.machine(early)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    answer = await user.answer(stream)
    assert (answer.status, answer.body) == (413, b"no")
    await user.until(lambda: user.answers[stream].reset is not None)
    assert user.answers[stream].reset == ErrorCodes.NO_ERROR


async def test_closing_lets_requests_finish_and_takes_no_more(stage: Stage, connect: Connect) -> None:
    go = asyncio.Event()

    async def slow(visit: Visit) -> None:
        await go.wait()
        await visit.answer(b"finished")

    await stage.machine(slow)
    user = await connect()
    stream = await user.begin("GET /")
    await until(lambda: stage.web.machines[0].in_flight == 1)
    closing = asyncio.create_task(stage.plane.close())
    await user.until(lambda: user.goodbye is not None)
    assert user.goodbye is not None
    assert (user.goodbye.error_code, user.goodbye.last_stream_id) == (ErrorCodes.NO_ERROR, stream)
    late = await user.begin("GET /late")
    await user.until(lambda: user.answers[late].reset == ErrorCodes.REFUSED_STREAM)
    go.set()
    assert (await user.answer(stream)).body == b"finished"
    await user.until(lambda: user.closed)
    await closing


async def test_a_client_may_say_goodbye_and_still_gets_its_answers(stage: Stage, connect: Connect) -> None:
    go = asyncio.Event()

    async def slow(visit: Visit) -> None:
        await go.wait()
        await visit.answer(b"finished")

    await stage.machine(slow)
    user = await connect()
    stream = await user.begin("GET /")
    await until(lambda: stage.web.machines[0].in_flight == 1)
    await user.send(b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + bytes(8))
    user.h2.ping(b"12345678")
    await user.send()
    await user.until(lambda: user.pongs == 1)
    go.set()
    assert (await user.answer(stream)).body == b"finished"


async def test_a_connection_serves_so_many_requests_and_no_more(stage: Stage, connect: Connect) -> None:
    stage.settings["requests_per_connection"] = 2
    await stage.machine()
    user = await connect()
    assert [(await user.ask("GET /")).status for _ in range(2)] == [200, 200]
    await user.until(lambda: user.closed)


async def test_a_connection_without_requests_ends(stage: Stage, connect: Connect) -> None:
    stage.settings |= {"idle_timeout_s": 0.1, "head_timeout_s": 0.1}
    await stage.machine()
    user = await connect()
    await user.until(lambda: user.closed)
    assert user.goodbye is not None


async def test_a_body_that_does_not_come_is_not_waited_for(stage: Stage, connect: Connect) -> None:
    stage.settings["idle_timeout_s"] = 0.2
    await stage.machine(echo)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    assert (await user.answer(stream)).status == 408


async def test_an_answer_that_nobody_takes_is_given_up(stage: Stage, connect: Connect) -> None:
    stage.settings["idle_timeout_s"] = 0.2

    async def long(visit: Visit) -> None:
        await visit.answer(b"x" * 1_000_000)

    await stage.machine(long)
    user = await connect(eager=False)
    stream = await user.begin("GET /")
    await user.until(lambda: user.answers[stream].reset == ErrorCodes.CANCEL)
    await until(lambda: stage.web.machines[0].in_flight == 0)


# --- what is no request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GET x", 400),
        ("GET /a b", 400),
        ("GET http://web.example/", 400),
        ("G(T /", 400),
        ("GET / | :authority: web.example/x", 400),
        ("GET / | :authority: user@web.example", 400),
        ("GET / | a(b: c", 400),
        ("GET / | content_length: 5", 400),
        ("GET / | fly_region: x", 400),
        ("GET / | a: b\x01c", 400),
        ("GET / | expect: more", 417),
        ("POST / | content-length: 0 | content-length: 0", 400),
        ("GET / | :authority: nobody.example", 404),
        ("CONNECT / | :protocol: chat", 501),
    ],
)
async def test_what_a_server_behind_could_read_in_two_ways_is_refused(
    stage: Stage, connect: Connect, text: str, status: int
) -> None:
    machine = await stage.machine()
    user = await connect()
    assert (await user.ask(text)).status == status
    assert not machine.visits
    assert (await user.ask("GET /")).status == 200


async def test_the_many_fields_of_a_head_are_too_many(stage: Stage, connect: Connect) -> None:
    await stage.machine()
    user = await connect()
    assert (await user.ask("GET /" + "".join(f" | a{n}: b" for n in range(200)))).status == 431


@pytest.mark.parametrize(
    "fields",
    [
        [*head2("GET /"), (b"connection", b"close")],
        [*head2("GET /"), (b"transfer-encoding", b"chunked")],
        [*head2("GET /"), (b"upgrade", b"h2c")],
        [*head2("GET /"), (b"te", b"gzip")],
        [*head2("GET /"), (b"Upper", b"x")],
        [*head2("GET /"), (b"a", b"b\r\nc: d")],
        [*head2("GET /"), (b"a", b"b\x00")],
        [*head2("GET /"), (b":path", b"/again")],
        [*head2("GET /"), (b"a", b"b"), (b":other", b"c")],
        [*head2("GET /"), (b":status", b"200")],
        [*head2("GET /"), (b":protocol", b"websocket")],
        [*head2("GET /"), (b"a", b" b")],
        [*head2("GET /"), (b"host", b"web.example"), (b"host", b"web.example")],
        [*head2("CONNECT x")],
        [*head2("GET /"), (b"host", b"other.example")],
        [(b"a", b"b"), *head2("GET /")],
        [field for field in head2("GET /") if field[0] != b":path"],
        [field for field in head2("GET /") if field[0] != b":authority"],
        [*head2("GET / | :path: ")],
    ],
)
async def test_what_the_rules_of_http2_forbid_ends_its_stream_alone(
    stage: Stage, connect: Connect, fields: list[tuple[bytes, bytes]]
) -> None:
    machine = await stage.machine()
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    await until(lambda: stage.web.machines[0].in_flight == 1)
    bad = user.h2.get_next_available_stream_id()
    user.h2.send_headers(bad, fields, end_stream=True)
    await user.send()
    await user.until(lambda: user.answers[bad].reset == ErrorCodes.PROTOCOL_ERROR)
    await user.body(stream, b"other")
    assert (await user.answer(stream)).status == 200
    assert len(machine.visits) == 1


@pytest.mark.parametrize(
    "trailer",
    [
        (b":path", b"/other"),
        (b"a: b\r\n\r\nget /", b"/ HTTP/1.1"),  # to a machine of HTTP/1.1 that would be the next request
        (b"a\nb", b"c"),
        (b"a b", b"c"),
        (b"a:b", b"c"),
        (b"", b"c"),
        (b"transfer_encoding", b"chunked"),
        (b"a", b"b\r\nc: d"),
        (b"a", b"b\x01"),
    ],
)
async def test_trailers_that_the_rules_forbid_end_their_stream(
    stage: Stage, connect: Connect, trailer: tuple[bytes, bytes]
) -> None:
    await stage.machine(echo)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    await user.body(stream, b"body", trailers=[trailer])
    await user.until(lambda: user.answers[stream].reset == ErrorCodes.PROTOCOL_ERROR)
    await until(lambda: stage.web.machines[0].in_flight == 0)


@pytest.mark.parametrize("said", [3, 10])
async def test_a_body_that_is_not_as_long_as_it_said_ends_the_connection(
    stage: Stage, connect: Connect, said: int
) -> None:
    await stage.machine(echo)
    user = await connect()
    stream = await user.begin(f"POST / | content-length: {said}", ended=False)
    await user.body(stream, b"seven..")
    await user.until(lambda: user.closed)
    assert user.answers[stream].status != 200


# --- floods ----------------------------------------------------------------------------------------------------------


async def _resets(user: User2) -> None:
    for _ in range(1000):
        stream = user.h2.get_next_available_stream_id()
        user.h2.send_headers(stream, head2("GET /"), end_stream=True)
        user.h2.reset_stream(stream)
        await user.send()


async def _pings(user: User2) -> None:
    for _ in range(1000):
        user.h2.ping(b"12345678")
        await user.send()


async def _settings(user: User2) -> None:
    for _ in range(1000):
        await user.send(SettingsFrame(0).serialize())


async def _empty(user: User2) -> None:
    stream = await user.begin("POST /", ended=False)
    for _ in range(1000):
        user.h2.send_data(stream, b"")
        await user.send()


@pytest.mark.parametrize("flood", [_resets, _pings, _settings, _empty])
async def test_a_flood_of_what_asks_for_nothing_ends_the_connection(
    stage: Stage, connect: Connect, flood: Callable[[User2], Awaitable[None]]
) -> None:
    await stage.machine(silent)
    user = await connect()
    await flood(user)
    await user.until(lambda: user.closed)
    assert user.goodbye is not None
    assert user.goodbye.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_cancelling_a_part_of_many_requests_is_no_flood(stage: Stage, connect: Connect) -> None:
    stage.settings |= {"h2_strikes": 20, "h2_strikes_per_s": 0}
    await stage.machine()
    user = await connect()
    for _ in range(50):
        assert (await user.ask("GET /")).status == 200
        await user.cancel(await user.begin("GET /"))
    assert (await user.ask("GET /")).status == 200


async def test_a_client_may_measure_the_way_while_data_flows(stage: Stage, connect: Connect) -> None:
    """As gRPC's do, with a ping after each frame."""
    stage.settings |= {"h2_strikes": 5, "h2_strikes_per_s": 0}
    await stage.machine(echo)
    user = await connect()
    stream = await user.begin("POST /", ended=False)
    for _ in range(50):
        await user.body(stream, b"some", ended=False)
        user.h2.ping(b"12345678")
        await user.send()
    await user.body(stream, b"end")
    assert (await user.answer(stream)).body == b"some" * 50 + b"end"


async def test_a_head_without_an_end_ends_the_connection(stage: Stage, connect: Connect) -> None:
    await stage.machine()
    user = await connect()
    await user.send(HeadersFrame(1, b"", flags=["END_STREAM"]).serialize())
    for _ in range(200):
        await user.send(ContinuationFrame(1, b"").serialize())
    await user.until(lambda: user.closed)


async def test_a_head_that_unpacks_to_too_much_ends_the_connection(stage: Stage, connect: Connect) -> None:
    await stage.machine()
    user = await connect()
    large = (b"a", b"b" * 4000)
    block = user.h2.encoder.encode([*head2("GET /"), *(large for _ in range(50))])
    assert len(block) < 5000
    await user.send(HeadersFrame(1, block, flags=["END_HEADERS", "END_STREAM"]).serialize())
    await user.until(lambda: user.closed)


# --- WebSocket -------------------------------------------------------------------------------------------------------

ASKED = "CONNECT /chat | :protocol: websocket | sec-websocket-version: 13"


async def shouting(visit: Visit) -> None:
    assert (visit.method, visit.target, visit["connection"], visit["upgrade"]) == (
        "GET",
        "/chat",
        "upgrade",
        "websocket",
    )
    assert len(visit["sec-websocket-key"]) == 24
    await visit.send(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Accept: y\r\nSec-WebSocket-Protocol: z\r\n\r\nfirst "
    )
    visit.complete = True
    while data := await visit.reader.read(1 << 16):
        await visit.send(data.upper())
    await visit.send(b"bye")
    visit.close()


async def test_a_websocket_passes_as_a_stream(stage: Stage, connect: Connect) -> None:
    await stage.machine(shouting)
    user = await connect()
    await user.until(lambda: user.h2.remote_settings.enable_connect_protocol == 1)
    stream = await user.begin(ASKED, ended=False)
    await user.body(stream, b"early ", ended=False)
    answer = user.answers[stream]
    await user.until(lambda: answer.body in (b"first EARLY ", b"EARLY first "))
    assert (answer.status, answer["sec-websocket-protocol"]) == (200, "z")
    assert {b"upgrade", b"connection", b"sec-websocket-accept"}.isdisjoint(dict(answer.fields))
    await user.body(stream, b"hello", ended=False)
    await user.until(lambda: answer.body.endswith(b"HELLO"))
    assert stage.web.machines[0].in_flight == 1
    assert (await user.ask("GET /other | :authority: nobody.example")).status == 404
    await user.body(stream, b"!", ended=True)
    await user.until(lambda: answer.complete)
    assert answer.body.endswith(b"!bye")
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_much_passes_through_a_websocket_both_ways(stage: Stage, connect: Connect) -> None:
    await stage.machine(shouting)
    user = await connect()
    stream = await user.begin(ASKED, ended=False)
    data = bytes(range(97, 123)) * 100_000
    await user.body(stream, data)
    answer = await user.answer(stream)
    assert answer.body == b"first " + data.upper() + b"bye"


@pytest.mark.parametrize("who", ["user", "machine", "both"])
async def test_a_websocket_that_breaks_on_one_side_breaks_on_the_other(
    stage: Stage, connect: Connect, who: str
) -> None:
    ended = asyncio.Event()

    async def waiting(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nx")
        visit.complete = True
        if who == "machine":
            visit.reset()
        else:
            with contextlib.suppress(ConnectionError):
                await visit.reader.read()
            ended.set()
            visit.close()

    await stage.machine(waiting)
    user = await connect()
    stream = await user.begin(ASKED, ended=False)
    if who == "machine":
        await user.until(lambda: user.answers[stream].reset == ErrorCodes.CANCEL)
        assert not user.closed
    else:
        await user.until(lambda: user.answers[stream].body == b"x")
        await user.cancel(stream) if who == "user" else user.writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 30)
    await until(lambda: stage.web.machines[0].in_flight == 0)


async def test_a_websocket_that_the_machine_does_not_want_is_an_ordinary_answer(stage: Stage, connect: Connect) -> None:
    await stage.machine(saying(b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno"))
    user = await connect()
    answer = await user.answer(await user.begin(ASKED, ended=False))
    assert (answer.status, answer.body) == (426, b"no")


async def test_a_client_that_asks_on_and_on_and_takes_no_answer_is_cut_off(stage: Stage) -> None:
    """Answers without a body wait for no window: only the connection's end bounds what is kept of them."""
    stage.settings |= {"head_bytes": 1024, "h2_streams": 64, "window_bytes": 4096}
    plane = await stage.open()
    sock = socket.socket()
    # Before it connects: a kernel that has offered more room than it has drops what comes, acknowledgements, too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, plane.http)
    user = User2(*await asyncio.open_connection(sock=sock))
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
    user.h2.initiate_connection()
    await user.send()
    engine = plane.context
    await until(lambda: any(isinstance(each, H2Connection) for each in engine.connections))
    (connection,) = engine.connections
    assert isinstance(connection, H2Connection)
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    fields = b"\x84\x86\x02\x04HEAD\x01\x0ano.example"
    asked = 0
    while engine.connections:
        assert asked < 100_000
        for _ in range(32):
            number = (2 * asked + 1).to_bytes(4, "big")
            user.writer.write(len(fields).to_bytes(3, "big") + b"\x01\x05" + number + fields)
            asked += 1
        await until(lambda asked=asked: connection._served == asked or connection.ended)  # type: ignore[misc]
    assert connection.problem == "it takes nothing of what it asks for"
    user.writer.close()
