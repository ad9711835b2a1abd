"""What leaves room for two readings is refused, and no part of it reaches a machine (RFC 9112, section 11.2)."""

from __future__ import annotations

import pytest
from tests.kit.raw_http import Visit, echo, head, hello, saying
from tests.proxy.conftest import Stage

GET = b"GET / HTTP/1.1\r\nHost: web.example\r\n"
POST = b"POST / HTTP/1.1\r\nHost: web.example\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
INNER = b"GET /smuggled HTTP/1.1\r\nHost: web.example\r\n\r\n"

REFUSED: dict[str, bytes] = {
    "both lengths": POST + CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "both lengths, the other order": POST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: 4\r\n\r\nabcd",
    "two lengths that agree": POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": POST + b"Content-Length: 4, 4\r\n\r\nabcd",
    "a length with a sign": POST + b"Content-Length: +4\r\n\r\nabcd",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a hexadecimal length": POST + b"Content-Length: 0x4\r\n\r\nabcd",
    "an empty length": POST + b"Content-Length:\r\n\r\n",
    "a length with a space in it": POST + b"Content-Length: 1 0\r\n\r\nabcdefghij",
    "a length with an underscore": POST + b"Content-Length: 1_0\r\n\r\nabcdefghij",
    "a length of more than 64 bits": POST + b"Content-Length: 18446744073709551620\r\n\r\nabcd",
    "digits of another script": POST + "Content-Length: \u0664\r\n\r\nabcd".encode(),
    "two codings without a comma": POST + b"Transfer-Encoding: identity chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two fields of coding": POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\nContent-Length: 4\r\n\r\nabcd",
    "a quoted coding": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "an empty coding": POST + b"Transfer-Encoding:\r\n\r\n",
    "a coding with a vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a tab before the colon": POST + b"Content-Length\t: 4\r\n\r\nabcd",
    "a folded field": GET + b"X-A: b\r\n c: d\r\n\r\n",
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a first field that begins with a space": b"GET / HTTP/1.1\r\n Host: web.example\r\n\r\n",
    "an underscore for a dash": POST + b"Transfer_Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
    "a bare LF after a field": GET + b"X-A: b\nX-C: d\r\n\r\n",
    "a bare LF after the request line": b"GET / HTTP/1.1\nHost: web.example\r\n\r\n",
    "bare LFs only": b"GET / HTTP/1.1\nHost: web.example\n\n",
    "a bare CR in a value": GET + b"X-A: b\rContent-Length: 5\r\n\r\n",
    "a bare CR before the end of a line": GET + b"X-A: b\r\r\n\r\n",
    "a NUL in a value": GET + b"X-A: b\x00c\r\n\r\n",
    "a NUL in a name": GET + b"X-\x00A: b\r\n\r\n",
    "a control character": GET + b"X-A: \x07\r\n\r\n",
    "DEL": GET + b"X-A: \x7f\r\n\r\n",
    "a name that is no token": GET + b"X(A): b\r\n\r\n",
    "a name of high bytes": GET + b"X-\xc3\xa4: b\r\n\r\n",
    "an empty name": GET + b": b\r\n\r\n",
    "no colon": GET + b"X-A\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: other.example\r\n\r\n",
    "two Hosts that agree": GET + b"Host: web.example\r\n\r\n",
    "two Hosts in one": b"GET / HTTP/1.1\r\nHost: web.example, other.example\r\n\r\n",
    "a Host with a path": b"GET / HTTP/1.1\r\nHost: web.example/x\r\n\r\n",
    "a Host with a path after its port": b"GET / HTTP/1.1\r\nHost: web.example:80/x\r\n\r\n",
    "two Hosts in one, with ports": b"GET / HTTP/1.1\r\nHost: web.example:80, other.example:80\r\n\r\n",
    "two Hosts in one, this one last": b"GET / HTTP/1.1\r\nHost: other.example, web.example\r\n\r\n",
    "a Host with a user": b"GET / HTTP/1.1\r\nHost: me@web.example\r\n\r\n",
    "an empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "a target with another host": b"GET http://other.example/ HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a target with a user": b"GET http://me@web.example/ HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "another scheme": b"GET ftp://web.example/ HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a target without a slash": b"GET x HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a star for GET": b"GET * HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a DEL in the target": b"GET /\x7f HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a high byte in the target": b"GET /\x80 HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a target of high bytes": b"GET /\xc3\xa4 HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "two spaces after the method": b"GET  / HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a tab for a space": b"GET\t/ HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a space before the method": b" GET / HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a space after the version": b"GET / HTTP/1.1 \r\nHost: web.example\r\n\r\n",
    "no version": b"GET /\r\nHost: web.example\r\n\r\n",
    "a lower-case version": b"GET / http/1.1\r\nHost: web.example\r\n\r\n",
    "a method that is no token": b"G(T / HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "a long version": b"GET / HTTP/1.10\r\nHost: web.example\r\n\r\n",
    "many empty lines": b"\r\n\r\n\r\n" + GET + b"\r\n",
    "a coding in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: web.example\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_request_with_two_readings_is_refused_and_the_connection_closed(stage: Stage, case: str) -> None:
    machine = await stage.machine()
    user = await stage.user()
    await user.send(REFUSED[case] + INNER)
    answer = await user.answer()
    assert (answer.status, answer["connection"]) == (400, "close")
    assert b"PH01" in answer.body
    assert await user.ended() == "closed"
    assert machine.visits == []


OTHERWISE = {
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: web.example\r\n\r\n", 505),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\nHost: web.example\r\n\r\n", 505),
    "a coding that is known elsewhere": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "two codings": (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n", 501),
    "another expectation": (POST + b"Expect: magic\r\nContent-Length: 0\r\n\r\n", 417),
    "a tunnel": (b"CONNECT web.example:80 HTTP/1.1\r\nHost: web.example:80\r\n\r\n", 405),
    "too many fields": (GET + b"X: y\r\n" * 200 + b"\r\n", 431),
    "too long a head": (GET + b"X: " + b"y" * 40000 + b"\r\n\r\n", 431),
    "too long a head without an end": (GET + b"X: " + b"y" * 40000, 431),
}


@pytest.mark.parametrize("case", OTHERWISE)
async def test_other_requests_that_are_not_taken(stage: Stage, case: str) -> None:
    machine = await stage.machine()
    data, status = OTHERWISE[case]
    user = await stage.user()
    await user.send(data)
    assert (await user.answer()).status == status
    assert machine.visits == []


CHUNKS: dict[str, bytes] = {
    "a size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a size with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "a size with a space before it": b" 5\r\nhello\r\n0\r\n\r\n",
    "a size with a space after it": b"5 \r\nhello\r\n0\r\n\r\n",
    "a size with an underscore": b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n",
    "a size of more than 64 bits": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
    "a size that ends in LF": b"5\nhello\r\n0\r\n\r\n",
    "a size that ends in CR": b"5\rhello\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "data longer than its size": b"4\r\nhello\r\n0\r\n\r\n",
    "data that ends in LF": b"5\r\nhello\n0\r\n\r\n",
    "an end in LF": b"5\r\nhello\r\n0\n\n",
    "a line break in an extension": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "a CR in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "a NUL in an extension": b"5;a=\x00\r\nhello\r\n0\r\n\r\n",
    "a folded trailer": b"5\r\nhello\r\n0\r\nX-A: b\r\n c\r\n\r\n",
    "a trailer that frames": b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a trailer with a space before its colon": b"5\r\nhello\r\n0\r\nX-A : b\r\n\r\n",
    "a trailer with a bare LF": b"5\r\nhello\r\n0\r\nX-A: b\n\r\n",
    "an endless extension": b"5;" + b"a" * 40000 + b"\r\nhello\r\n0\r\n\r\n",
    "endless trailers": b"5\r\nhello\r\n0\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n",
}


@pytest.mark.parametrize("case", CHUNKS)
async def test_a_chunked_body_with_two_readings_ends_request_and_connection(stage: Stage, case: str) -> None:
    machine = await stage.machine(echo)
    user = await stage.user()
    await user.send(POST + CHUNKED + b"\r\n" + CHUNKS[case] + INNER)
    answer = await user.answer("POST")
    assert (answer.status, answer["connection"]) == (400, "close")
    assert not any(visit.complete or visit.target == "/smuggled" for visit in machine.visits)


TAKEN: dict[str, tuple[bytes, bytes]] = {
    "an empty line before the request": (b"\r\n" + GET + b"\r\n", b"/"),
    "an absolute target": (b"GET HTTP://Web.example:80/a?b HTTP/1.1\r\nHost: web.example\r\n\r\n", b"/a?b"),
    "an absolute target without a path": (b"GET http://web.example HTTP/1.1\r\nHost: web.example\r\n\r\n", b"/"),
    "a star for OPTIONS": (b"OPTIONS * HTTP/1.1\r\nHost: web.example\r\n\r\n", b"*"),
    "a method of its own": (b"M-SEARCH /x HTTP/1.1\r\nHost: web.example\r\n\r\n", b"/x"),
    "high bytes in a value": (GET + b"X-A: \xc3\xa4\r\n\r\n", b"/"),
    "tabs and spaces around a value": (GET + b"X-A: \t b \t\r\n\r\n", b"/"),
    "an empty value": (GET + b"X-A:\r\n\r\n", b"/"),
    "chunked in capitals": (POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n0\r\n\r\n", b"/"),
    "chunk extensions": (POST + CHUNKED + b'\r\n5;a=b;c="d"\r\nhello\r\n0;e\r\n\r\n', b"/"),
    "an address as Host": (b"GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n", b""),
}


@pytest.mark.parametrize("case", TAKEN)
async def test_what_is_unusual_but_clear_is_taken(stage: Stage, case: str) -> None:
    machine = await stage.machine()
    stage.router.routes["[2001:db8::1]"] = stage.web
    data, target = TAKEN[case]
    user = await stage.user()
    await user.send(data + head("GET /next"))
    assert (await user.answer(data.split()[0].decode())).status == 200
    assert (await user.answer()).status == 200
    assert [visit.target for visit in machine.visits] == [target.decode() or "/", "/next"]


async def test_a_body_of_get_is_not_taken_for_a_request(stage: Stage) -> None:
    machine = await stage.machine(echo)
    answer = await stage.ask(f"GET / | Content-Length: {len(INNER)}", INNER)
    assert answer.body == INNER
    assert len(machine.visits) == 1


LIES: dict[str, bytes] = {
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded field": b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
    "a bare LF": b"HTTP/1.1 200 OK\r\nX-A: b\nX-C: d\r\nContent-Length: 0\r\n\r\n",
    "bare LFs only": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "a NUL": b"HTTP/1.1 200 OK\r\nX-A: \x00\r\nContent-Length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "another version": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no HTTP at all": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 10000,
    "endless interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 100,
    "a switch nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("case", LIES)
async def test_an_answer_with_two_readings_is_502(stage: Stage, case: str) -> None:
    await stage.machine(saying(LIES[case]))
    user = await stage.user()
    answer = await user.ask("POST / | Content-Length: 0")
    assert (answer.status, answer.all("connection")) == (502, []), "the user's connection is fine"
    assert b"PC03" in answer.body


async def test_more_than_an_answers_length_is_not_the_next_ones_beginning(stage: Stage) -> None:
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    machine = await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood" + evil))
    user = await stage.user()
    for _ in range(3):
        assert (await user.ask("GET /")).body == b"good"
    assert machine.connections == 3


async def test_an_answer_that_nobody_asked_for_ends_the_connection(stage: Stage) -> None:
    async def talkative(visit: Visit) -> None:
        await hello(visit)
        await visit.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    machine = await stage.machine(talkative)
    user = await stage.user()
    for _ in range(3):
        assert (await user.ask("GET /")).body == b"hello"
    assert machine.connections == 3
