"""Attacks by HTTP/2, which carries what HTTP/1.1 cannot: every byte at every place of a request, and fields that would
be others, or another request, once they are written as lines."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from tests.kit.authority import Authority
from tests.kit.http2 import User2, head2
from tests.kit.planes import Embedded, Haproxy
from tests.kit.raw_http import Broken, Fields, User
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter

from bench.torture_machine import Machine
from bench.torture_suites import Asked, Verdict
from hawker.proxy.base import ServicePort

ANSWERED_S = 10.0
NAME = "web.example"
_OURS = (b"fly-", b"x-forwarded-")
_OURS_TOO = {b"host", b"via", b"connection", b"content-length", b"transfer-encoding", b"trailer"}
"""Fields that a proxy adds."""


class Case2(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` with the pseudo-fields; a body, and trailers after it."""

    suite: str = "sweep: HTTP/2"
    name: str
    fields: Fields
    body: bytes = b""
    trailers: Fields = []


_TEXTS: dict[str, tuple[str, str]] = {
    "in the method": (":method", "GE%T"),
    "after the method": (":method", "GET%"),
    "before the path": (":path", "%/a"),
    "in the path": (":path", "/a%b"),
    "after the path": (":path", "/a%"),
    "in the scheme": (":scheme", "ht%tp"),
    "in the authority": (":authority", "web%example"),
    "after the authority": (":authority", "web.example%"),
    "before a name": ("%a", "b"),
    "in a name": ("a%b", "c"),
    "after a name": ("a%", "b"),
    "before a value": ("a", "%b"),
    "in a value": ("a", "b%c"),
    "after a value": ("a", "b%"),
    "in a disguised coding": ("transfer%encoding", "chunked"),
    "after a disguised coding": ("transfer-encoding%", "chunked"),
    "before a length": ("content-length", "%4"),
    "after a length": ("content-length", "4%"),
}
_LINES = {
    "a field": "\r\nx-added: y",
    "a field by LF": "\nx-added: y",
    "a field by CR": "\rx-added: y",
    "a coding": "\r\ntransfer-encoding: chunked",
    "a length": "\r\ncontent-length: 0",
    "a request": "\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: web.example\r\n\r\n",
    "a request by LF": "\n\nGET /smuggled HTTP/1.1\nhost: web.example\n\n",
    "the rest of a head": " HTTP/1.1\r\nhost: web.example\r\n\r\nGET /smuggled",
}
_FIELDS: dict[str, list[tuple[str, str]]] = {
    "a coding": [("transfer-encoding", "chunked")],
    "a coding in capitals": [("Transfer-Encoding", "chunked")],
    "a coding and a length": [("transfer-encoding", "chunked"), ("content-length", "4")],
    "a shorter length": [("content-length", "1")],
    "a longer length": [("content-length", "9")],
    "two lengths": [("content-length", "4"), ("content-length", "1")],
    "two lengths that agree": [("content-length", "4"), ("content-length", "4")],
    "a list of lengths": [("content-length", "4, 4")],
    "another Host": [("host", "other.example")],
    "two Hosts": [("host", "web.example"), ("host", "other.example")],
    "a connection": [("connection", "close, transfer-encoding")],
    "an upgrade": [("connection", "upgrade"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABkAAQAAP__")],
    "a second path": [(":path", "/other")],
    "a name with a colon": [("a: b\r\nc", "d")],
    "an underscore": [("transfer_encoding", "chunked")],
    "a proxy's word": [("fly-client-ip", "192.0.2.1"), ("x-forwarded-for", "192.0.2.1")],
}


def cases() -> Iterator[Case2]:
    for place, (name, value) in _TEXTS.items():
        for sign in range(256):
            yield _case(f"{sign:#04x} {place}", name.replace("%", chr(sign)), value.replace("%", chr(sign)))
        for what, text in _LINES.items():
            yield _case(f"{what} {place}", name.replace("%", text), value.replace("%", text))
    for what, fields in _FIELDS.items():
        more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        for body in (b"abcd", b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: web.example\r\n\r\n"):
            yield Case2(name=f"{what}, with {len(body)} bytes", fields=[*head2("POST /"), *more], body=body)
        yield Case2(name=f"{what}, in a trailer", fields=head2("POST /"), body=b"abcd", trailers=more)


def _case(name: str, key: str, value: str) -> Case2:
    field = key.encode("latin-1"), value.encode("latin-1")
    head = [field if each[0] == field[0] else each for each in head2("POST /")]
    return Case2(name=name, fields=head if field in head else [*head, field], body=b"abcd")


class Anyone(FakeRouter):
    def find(self, port: int, host: str) -> FakeRoute:
        return next(iter(self.routes.values()))


async def asked(
    plane: Embedded, attacks: Iterable[Case2], *, carried: bool = False
) -> list[tuple[Case2, Verdict, str]]:
    """`carried`: over TLS that HAProxy ends, and where it can be by HAProxy alone."""
    machine = Machine()
    await machine.open()
    service = ServicePort(handlers=("tls", "http") if carried else ("http",))
    router = Anyone(FakeRoute("web", [FakeMachine("m1", machine.address)], service))
    authority = Authority()
    found = []
    with TemporaryDirectory() as directory:
        authority.write(Path(directory), NAME)
        await plane.open(router, {"region": "ams", "h2_strikes": 1e9, "certificates": Path(directory)})
    try:
        while carried and not (isinstance(plane, Haproxy) and plane.haproxy.writing):
            machine.begin()
            user = await User.at(plane.tls, "", authority.client("http/1.1"), NAME)
            await user.ask(f"POST / | Host: {NAME} | Content-Length: 1", b"x")
            await user.close()
        tls = authority.client("h2") if carried else None
        for case in map(_with_length, attacks) if carried else attacks:
            machine.begin()
            status = await _told(case, plane, tls)
            found.append((case, *_judged(case, status, machine)))
    finally:
        await plane.close()
        await machine.close()
    return found


def _with_length(case: Case2) -> Case2:
    """HAProxy carries a body by itself if its length is told."""
    if any(name.lower().startswith(b"content-length") for name, _ in case.fields):
        return case
    return msgspec.structs.replace(case, fields=[*case.fields, (b"content-length", b"%d" % len(case.body))])


async def _told(case: Case2, plane: Embedded, tls: ssl.SSLContext | None) -> int:
    """The answer's status, 0: the stream or the connection ended."""
    user = await User2.at(plane.tls, tls, NAME) if tls else await User2.at(plane.http)
    try:
        async with asyncio.timeout(ANSWERED_S):
            stream = user.h2.get_next_available_stream_id()
            user.h2.send_headers(stream, case.fields)
            user.h2.send_data(stream, case.body, end_stream=not case.trailers)
            if case.trailers:
                user.h2.send_headers(stream, case.trailers, end_stream=True)
            await user.send()
            return (await user.answer(stream)).status
    except (Broken, TimeoutError):
        return 0
    finally:
        await user.close()


def _judged(case: Case2, status: int, machine: Machine) -> tuple[Verdict, str]:
    if problem := machine.misread():
        return "wrong", problem
    seen = machine.requests
    if status >= 400 or not status:
        return ("wrong", f"answered {status}, and the machine saw {seen}") if seen else ("refused", f"{status}")
    sent = dict(case.fields)
    asked = Asked(sent[b":method"].decode("latin-1"), sent[b":path"].decode("latin-1"), case.body)
    if seen != [asked]:
        return "wrong", f"the machine saw {seen}, not {asked}"
    known = {(name.lower(), value.strip(b" \t")) for name, value in case.fields}
    added = [
        field
        for field in machine.fields[0]
        if field not in known and not field[0].startswith(_OURS) and field[0] not in _OURS_TOO
    ]
    return ("wrong", f"the machine saw {added}") if added else ("taken", "")
