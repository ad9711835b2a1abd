"""Bodies both ways: their framing, back-pressure, trailers, and what comes before them."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from tests.kit.raw_http import Broken, Visit, chunked, echo, head, hello, saying
from tests.kit.waiting import at_rest, until
from tests.proxy.conftest import Stage

MEGABYTE = bytes(range(256)) * 4096


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3 << 20])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_bodies_of_any_size_pass_both_ways(stage: Stage, size: int, framing: str) -> None:
    body = (MEGABYTE * 3)[:size]

    async def mirror(visit: Visit) -> None:
        """As it came, framed as it came."""
        if "transfer-encoding" in {name.decode() for name, _ in visit.fields}:
            data = chunked(*([body] if (body := await visit.read()) else []))
            await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
        else:
            await echo(visit)

    await stage.machine(mirror)
    user = await stage.user()
    for _ in range(2):
        if framing == "length":
            sending = asyncio.create_task(user.send(head(f"PUT / | Content-Length: {size}") + body))
        else:
            pieces = [body[at : at + 70001] for at in range(0, size, 70001)]
            sending = asyncio.create_task(user.send(head("PUT / | Transfer-Encoding: chunked") + chunked(*pieces)))
        answer = await user.answer("PUT")
        await sending
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize("step", [1, 2, 3, 7])
async def test_a_request_may_come_in_any_pieces(stage: Stage, step: int) -> None:
    machine = await stage.machine(echo)
    user = await stage.user()
    data = head("POST /a | Transfer-Encoding: chunked") + chunked(
        b"one\r\n\r\n", b"\r\n\r\n\r\n", trailers=b"X-Sum: 1\r\n"
    )
    data += head("POST /b | Content-Length: 3") + b"two"
    for at in range(0, len(data), step):
        await user.send(data[at : at + step])
        await asyncio.sleep(0)
    assert (await user.answer("POST")).body == b"one\r\n\r\n\r\n\r\n\r\n"
    assert (await user.answer("POST")).body == b"two"
    assert machine.visits[0].trailers == [(b"x-sum", b"1")]


@pytest.mark.parametrize("step", [1, 2, 5])
async def test_an_answer_may_come_in_any_pieces(stage: Stage, step: int) -> None:
    data = b"HTTP/1.1 200 Fine\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"a\r\n\r\n", b"bc")

    async def dripping(visit: Visit) -> None:
        for at in range(0, len(data), step):
            await visit.send(data[at : at + step])
            await asyncio.sleep(0)

    machine = await stage.machine(dripping)
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("GET /")
        assert (answer.reason, answer.body) == (b"Fine", b"a\r\n\r\nbc")
    assert machine.connections <= stage.plane.keeps


async def test_trailers_pass_both_ways_without_those_that_would_harm(stage: Stage) -> None:
    trailers = b"X-Sum: 1\r\nHost: other\r\nAuthorization: x\r\nFly-Region: x\r\n"
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n" + chunked(b"x", trailers=trailers)
    machine = await stage.machine(saying(data))
    answer = await stage.ask("POST / | Transfer-Encoding: chunked", chunked(b"y", trailers=trailers))
    assert answer.trailers == [(b"x-sum", b"1")]
    assert answer["trailer"] == "X-Sum"
    assert machine.visits[0].trailers == [(b"x-sum", b"1")]


async def test_a_body_that_ends_with_the_machines_connection_gets_an_end_of_its_own(stage: Stage) -> None:
    await stage.machine(saying(b"HTTP/1.0 200 OK\r\n\r\nhello", then="close"))
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("GET /")
        assert (answer.body, answer["transfer-encoding"]) == (b"hello", "chunked")


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_answers_without_a_body_have_none(stage: Stage, status: str) -> None:
    machine = await stage.machine(saying(f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode()))
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("GET /")
        assert (answer.body, answer["etag"], answer.all("transfer-encoding")) == (b"", "x", [])
    assert machine.connections <= stage.plane.keeps


@pytest.mark.parametrize("framing", ["Content-Length: 99", "Transfer-Encoding: chunked", "X-None: 1"])
async def test_an_answer_to_head_has_the_length_but_no_body(stage: Stage, framing: str) -> None:
    machine = await stage.machine(saying(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode()))
    user = await stage.user()
    for _ in range(2):
        answer = await user.ask("HEAD /")
        assert answer.body == b""
        assert answer.all("content-length") == (["99"] if "99" in framing else [])
    assert machine.connections <= stage.plane.keeps


async def test_events_come_as_they_are_sent(stage: Stage) -> None:
    seen: asyncio.Queue[None] = asyncio.Queue()

    async def events(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(5):
            await seen.get()
            await visit.send(b"data: %d\n\n" % number)
        visit.close()

    await stage.machine(events)
    user = await stage.user()
    await user.send(head("GET /"))
    assert (await user.head())["content-type"] == "text/event-stream"
    for number in range(5):
        seen.put_nowait(None)
        assert await user.piece() == b"data: %d\n\n" % number
    assert await user.piece() == []


async def test_a_user_who_reads_slowly_slows_the_machine_down(stage: Stage) -> None:
    sent = 0

    async def flood(visit: Visit) -> None:
        nonlocal sent
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (32 << 20))
        for _ in range(32):
            await visit.send(MEGABYTE)
            sent += 1

    await stage.machine(flood)
    user = await stage.user()
    await user.send(head("GET /"))
    await user.head()
    assert await at_rest(lambda: sent) < 24
    got = 0
    while isinstance(piece := await user.piece(), bytes):
        got += len(piece)
    assert got == 32 << 20


async def test_a_user_who_asks_ahead_and_reads_nothing_is_not_answered_into_memory(stage: Stage) -> None:
    async def large(visit: Visit) -> None:
        await visit.answer(MEGABYTE[:100_000])  # one reading: when it fills the user's buffer it is at its end

    machine = await stage.machine(large)
    user = await stage.user()
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport can
    await user.send(head("GET /") * 400)
    assert await at_rest(lambda: len(machine.visits)) < 250
    user.writer.transport.resume_reading()  # type: ignore[attr-defined]
    for _ in range(400):
        assert len((await user.answer()).body) == 100_000


async def test_a_machine_that_reads_slowly_slows_the_user_down(stage: Stage) -> None:
    go = asyncio.Event()

    async def reluctant(visit: Visit) -> None:
        await go.wait()
        assert len(await visit.read()) == 32 << 20
        await visit.answer(b"done")

    await stage.machine(reluctant)
    user = await stage.user()
    sent = 0

    async def flood() -> None:
        nonlocal sent
        await user.send(head(f"POST / | Content-Length: {32 << 20}"))
        for _ in range(32):
            await user.send(MEGABYTE)
            sent += 1

    sending = asyncio.create_task(flood())
    assert await at_rest(lambda: sent) < 24
    go.set()
    assert (await user.answer("POST")).body == b"done"
    await sending


async def test_a_large_body_waits_in_the_users_socket_while_its_machine_wakes(stage: Stage) -> None:
    stage.settings["replay_bytes"] = 1 << 16
    await stage.machine(echo, awake=False)
    (asleep,) = stage.web.machines
    user = await stage.user()
    sending = asyncio.create_task(user.send(head(f"POST / | Content-Length: {24 << 20}") + MEGABYTE * 24))
    await until(lambda: asleep.waiting == 1)
    done, _ = await asyncio.wait([sending], timeout=0.1)
    assert not done
    asleep.awake.set()
    assert len((await user.answer("POST")).body) == 24 << 20
    await sending


async def test_a_user_who_expects_100_gets_it_from_the_machine(stage: Stage) -> None:
    async def inviting(visit: Visit) -> None:
        assert visit["expect"] == "100-continue"
        await visit.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await echo(visit)

    await stage.machine(inviting)
    user = await stage.user()
    await user.send(head("POST / | Expect: 100-continue | Content-Length: 4"))
    assert await user.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await user.send(b"body")
    assert (await user.answer("POST")).body == b"body"


async def test_a_machine_may_refuse_a_body_before_it_is_sent(stage: Stage) -> None:
    async def refusing(visit: Visit) -> None:
        await visit.answer(b"no", "417 Expectation Failed", "Connection: close")
        visit.close()

    await stage.machine(refusing)
    user = await stage.user()
    await user.send(head("POST / | Expect: 100-continue | Content-Length: 4"))
    answer = await user.answer("POST")
    assert (answer.status, answer["connection"]) == (417, "close")
    assert await user.ended() == "closed"


async def test_early_hints_pass_but_not_to_http_1_0(stage: Stage) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
    await stage.machine(saying(hints + hints + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
    user = await stage.user()
    answer = await user.ask("GET /")
    assert [status for status, _ in answer.interim] == [103, 103]
    assert answer.interim[0][1] == [(b"link", b"</a.css>; rel=preload")]
    await user.send(b"GET / HTTP/1.0\r\nHost: web.example\r\n\r\n")
    assert (await user.answer()).interim == []


async def test_an_answer_may_begin_before_the_request_is_complete(stage: Stage) -> None:
    async def talking(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while piece := await visit.piece():
            await visit.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await visit.send(b"0\r\n\r\n")

    await stage.machine(talking)
    user = await stage.user()
    await user.send(head("POST / | Transfer-Encoding: chunked"))
    assert (await user.head("POST")).status == 200
    for word in (b"one", b"two", b"three"):
        await user.send(b"%x\r\n%b\r\n" % (len(word), word))
        assert await user.piece() == word
    await user.send(b"0\r\n\r\n")
    assert await user.piece() == []


@pytest.mark.parametrize("end", ["close", "reset", "stay"])
async def test_a_machine_that_refuses_a_large_body_at_once_is_heard(stage: Stage, end: str) -> None:
    async def refusing(visit: Visit) -> None:
        await visit.answer(b"too large", "413 Content Too Large", *(["Connection: close"] if end != "stay" else []))
        if end == "close":
            visit.close()
        elif end == "reset":
            visit.writer.write_eof()
            await visit.reader.read(1)
            visit.close()
        else:
            await visit.reader.read(1 << 20)

    await stage.machine(refusing)
    for _ in range(5):
        user = await stage.user()
        sending = asyncio.create_task(user.send(head(f"POST / | Content-Length: {32 << 20}") + MEGABYTE * 32))
        answer = await user.answer("POST")
        assert (answer.status, answer.body, answer["connection"]) == (413, b"too large", "close")
        user.reset()
        await asyncio.gather(sending, return_exceptions=True)


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    ],
)
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_an_answer_that_breaks_off_never_looks_complete(stage: Stage, begun: bytes, end: str) -> None:
    machine = await stage.machine(saying(begun, then=end))
    with pytest.raises(Broken):
        await stage.ask("GET /")
    assert len(machine.visits) == 1, "an answer that has begun cannot be begun again"


async def test_an_answer_without_a_length_that_is_reset_is_cut_also_for_http_1_0(stage: Stage) -> None:
    go = asyncio.Event()

    async def breaking(visit: Visit) -> None:
        await visit.send(b"HTTP/1.0 200 OK\r\n\r\nhello")
        await go.wait()
        visit.reset()

    await stage.machine(breaking)
    for version in ("1.1", "1.0"):
        go.clear()
        user = await stage.user()
        await user.send(head("GET /").replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        await user.head()
        assert await user.piece() == b"hello"
        go.set()
        with pytest.raises(Broken):
            await user.piece()


async def test_a_chunked_body_of_a_user_that_is_malformed_ends_the_connection(stage: Stage) -> None:
    await stage.machine(hello)
    user = await stage.user()
    await user.send(head("POST / | Transfer-Encoding: chunked") + b"5\r\nhello\r\nxyz\r\n")
    answer = await user.answer("POST")
    assert (answer.status, answer["connection"]) == (400, "close")
