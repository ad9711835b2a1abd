"""What is the embedded data plane's own: its grammar of heads beside another parser, its counts, its log."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.kit.planes import Embedded
from tests.kit.raw_http import User, chunked, head, hello
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

from hawker.core.metrics import Registry
from hawker.proxy.embedded.bodies import Chunks
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.heads import ABSENT, CHUNKED, UNTIL_CLOSE, BadHead, read_answer, read_request
from hawker.proxy.embedded.settings import Settings

FIELDS = [
    *("Host: a", "Host: b", "Content-Length: 3", "Content-Length: +3", "Content-Length: 3, 3", "Content-Length: 03"),
    *(
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: Chunked ",
        "Transfer-Encoding: x, chunked",
        "X: y",
        "X:",
        "X : y",
    ),
    *(" X: y", "X\tY: z", "Connection: close", "Connection: keep-alive", "Expect: 100-continue", "Content_Length: 3"),
    *("X: \x00", "X: \x01", "X: a\rb", "X: a\nb", "X: \xe4", "\xe4: X", "", ":", "X"),
]
LINES = [
    "GET / HTTP/1.1",
    "POST /a HTTP/1.1",
    "GET / HTTP/1.0",
    "G@T / HTTP/1.1",
    "GET  / HTTP/1.1",
    "GET / HTTP/1.1 ",
    "GET /",
]


@given(
    st.sampled_from(LINES), st.lists(st.sampled_from(FIELDS), max_size=4), st.binary(max_size=3), st.integers(0, 200)
)
@example("GET / HTTP/1.1", ["Host: a"], b"", 0)
@example("POST /a HTTP/1.1", ["Host: a", "Content-Length: 03"], b"", 0)
@example("POST /a HTTP/1.1", ["Host: a", "Transfer-Encoding: Chunked "], b"", 0)
def test_whatever_is_taken_another_strict_parser_reads_the_same(
    line: str, fields: list[str], noise: bytes, at: int
) -> None:
    data = "\r\n".join((line, *fields, "", "")).encode("latin-1")
    at %= len(data)
    data = data[:at] + noise + data[at:]
    end = data.find(b"\r\n\r\n") + 4
    try:
        ours = read_request(data[:end], 100)
    except BadHead:
        return
    theirs = h11.Connection(h11.SERVER)
    theirs.receive_data(data[:end])
    request = theirs.next_event()
    assert isinstance(request, h11.Request)
    # Of h11 the value of this field comes in lower case.
    fields_of_ours = [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in ours.headers]
    assert (ours.method, fields_of_ours) == (request.method, list(request.headers))
    framing = {name: value.lower() for name, value in request.headers}
    if ours.length == CHUNKED:
        assert framing[b"transfer-encoding"] == b"chunked"
    elif ours.length == ABSENT:
        assert not framing.keys() & {b"transfer-encoding", b"content-length"}
    else:
        assert int(framing[b"content-length"]) == ours.length


@given(
    st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.0 200 OK", "HTTP/1.1 204 No"]),
    st.lists(st.sampled_from(FIELDS), max_size=4),
)
def test_whatever_is_taken_of_an_answer_another_strict_parser_reads_the_same(line: str, fields: list[str]) -> None:
    data = "\r\n".join((line, *fields, "", "")).encode("latin-1")
    end = data.find(b"\r\n\r\n") + 4
    try:
        ours = read_answer(data[:end], 100, b"GET")
    except BadHead:
        return
    theirs = h11.Connection(h11.CLIENT)
    theirs.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    theirs.send(h11.EndOfMessage())
    theirs.receive_data(data[:end] + (b"123" if ours.length == 3 else b"0\r\n\r\n" if ours.length == CHUNKED else b""))
    response = theirs.next_event()
    assert isinstance(response, h11.Response)
    assert ours.status == response.status_code
    body = theirs.next_event()
    if ours.length == 3:
        assert isinstance(body, h11.Data)
    elif ours.length == UNTIL_CLOSE:
        assert body is h11.NEED_DATA
    else:
        assert isinstance(body, h11.EndOfMessage)


@given(st.lists(st.binary(min_size=1, max_size=20) | st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"\r"])), st.data())
def test_a_chunked_body_is_read_the_same_however_it_is_cut_and_never_beyond_its_end(
    chunks: list[bytes], data: st.DataObject
) -> None:
    wire = chunked(*chunks, trailers=b"X-A: b\r\n" if data.draw(st.booleans()) else b"")
    follows = data.draw(st.sampled_from([b"", b"GET", b"0\r\n\r\n", b"\r\n\r\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire) + len(follows)), max_size=8)))
    whole = wire + follows
    pieces = [whole[one:two] for one, two in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    body, rest = Chunks(Settings()), b""
    for piece in pieces:
        rest += piece if body.done else body.feed(piece)
    assert body.done
    assert b"".join(body.pieces) == b"".join(chunks)
    assert rest == follows


async def test_a_deadline_that_is_moved_comes_when_it_was_moved_to() -> None:
    loop = asyncio.get_running_loop()
    came: list[float] = []
    deadline = Deadline(loop, lambda: came.append(loop.time()))
    begun = loop.time()
    deadline.within(0.02)
    deadline.within(0.06)
    await until(lambda: bool(came))
    assert came[0] - begun >= 0.06
    deadline.within(10)
    deadline.within(0.01)
    await until(lambda: len(came) == 2)
    deadline.within(0.01)
    deadline.clear()
    deadline.within(0.03)
    deadline.close()
    passed: list[None] = []
    Deadline(loop, lambda: passed.append(None)).within(0.06)
    await until(lambda: bool(passed))
    assert len(came) == 2


@pytest.fixture
async def embedded() -> AsyncIterator[Stage]:
    stage = Stage(Embedded)
    yield stage
    await stage.close()


def engine(stage: Stage) -> Any:
    assert isinstance(stage.plane, Embedded)
    return stage.plane.activator


async def test_requests_are_counted_by_status_with_the_time_to_their_first_byte(embedded: Stage) -> None:
    await embedded.machine()
    for path in ("GET /", "GET /", "GET / | Host: none.example", "GET / | Content-Length: x"):
        await embedded.ask(path)
    registry = Registry()
    registry.register(engine(embedded).counters)
    text = registry.exposition().decode()
    assert 'hawker_proxy_requests_total{status="200"} 2.0' in text
    assert 'hawker_proxy_requests_total{status="404"} 1.0' in text
    assert 'hawker_proxy_unread_total{status="400"} 1.0' in text
    assert "hawker_proxy_first_byte_seconds_count 2.0" in text
    assert 'hawker_proxy_phase_seconds_count{phase="connect"} 1.0' in text
    assert "hawker_proxy_in_flight 0.0" in text


async def test_the_access_log_has_a_line_a_request(embedded: Stage, tmp_path: Path) -> None:
    path = tmp_path / "access"
    embedded.settings["access_log"] = str(path)
    await embedded.machine()
    user = await embedded.user()
    answer = await user.ask('GET /a?b=c | User-Agent: a "b" | Referer: http://x/')
    engine(embedded).context.access.flush()
    path.rename(tmp_path / "old")
    await user.ask("HEAD / | Host: none.example")
    await embedded.close()
    (line,) = (tmp_path / "old").read_text().splitlines()
    expected = (
        r'127\.0\.0\.1 - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d \+0000\] "GET /a\?b=c HTTP/1\.1" 200 5 "http://x/" '
        r'"a \\x22b\\x22" ' + answer["fly-request-id"] + r" web m1 \d+\.\d \d+\.\d"
    )
    assert re.fullmatch(expected, line), line
    (line,) = path.read_text().splitlines()
    assert '"HEAD / HTTP/1.1" 404 - "-" "-"' in line


async def test_a_listener_can_be_closed_by_itself(embedded: Stage) -> None:
    await embedded.machine()
    user = await embedded.user()
    engine(embedded).stop(embedded.plane.http)
    assert (await user.ask("GET /")).status == 200
    with pytest.raises(ConnectionRefusedError):
        await User.at(embedded.plane.http)
    other = await engine(embedded).listen("127.0.0.1", 0, public=80)
    again = await User.at(other)
    await again.send(head("GET /"))
    assert (await again.answer()).body == b"hello"
    await again.close()


async def test_a_head_is_rewritten_alike_when_it_is_the_same_as_the_last(embedded: Stage) -> None:
    machine = await embedded.machine(hello)
    user = await embedded.user()
    answers = [await user.ask("GET /a | X-A: b | Connection: x-gone | X-Gone: 1") for _ in range(3)]
    answers.append(await user.ask("GET /b"))
    for visit, answer in zip(machine.visits, answers, strict=True):
        assert visit["fly-request-id"] == answer["fly-request-id"]
    first, second, third, _ = [
        [field for field in visit.fields if field[0] != b"fly-request-id"] for visit in machine.visits
    ]
    assert first == second == third
    assert b"x-gone" not in dict(first)
    assert machine.visits[3].target == "/b"


def test_every_code_of_the_proxy_is_explained() -> None:
    root = Path(__file__).parent.parent.parent
    page = (root / "docs" / "proxy-http.md").read_text()
    explained = {code for row in re.findall(r"^\| (P[^|]*) \|", page, re.MULTILINE) for code in row.split(", ")}
    said = {
        code
        for file in (root / "src" / "hawker" / "proxy").rglob("*.py")
        for code in re.findall(r'"(P[A-Z]\d\d)"', file.read_text())
    }
    assert said - explained == set()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_connection_is_used_from_before_a_machine_was_put_to_rest(stage: Stage, method: str) -> None:
    machine = await stage.machine(hello)
    plane = await stage.open()
    assert isinstance(plane, Embedded)
    assert (await stage.ask("GET /")).status == 200
    plane.context.upstreams.let_go(machine.address, asleep=False)
    assert (await stage.ask(f"{method} / | Content-Length: 0")).status == 200
    assert [visit.connection for visit in machine.visits] == [1, 2]
    assert stage.web.machines[0].failures == []


@pytest.mark.parametrize("h2_backend", [False, True], ids=["h1", "h2"])
async def test_who_connects_to_a_machine_that_is_put_to_rest_does_not_wait_for_it(
    stage: Stage, h2_backend: bool
) -> None:
    """It answers no packet any more, and nothing at its address says so."""
    stage.serves(h2_backend=h2_backend)
    stage.settings["connect_timeout_s"] = 60.0
    with closing(socket.socket()) as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(2)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        await stage.machine()
        machine = stage.web.machines[0]
        machine.address = full.getsockname()
        plane = await stage.open()
        assert isinstance(plane, Embedded)
        asked = asyncio.ensure_future(stage.ask("GET /"))
        await until(lambda: bool(machine.in_flight))
        async with asyncio.timeout(10):
            while not asked.done():
                plane.context.upstreams.let_go(machine.address, asleep=False)
                await asyncio.wait((asked,), timeout=0.01)
        assert machine.failures == ["timeout"]
        assert (await asked).status in (502, 503, 504)
        for sock in waiting:
            sock.close()
