"""The other direction of bench/torture.py: odd answers of machines, those that llhttp is held against, and our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.kit.planes import Embedded, Haproxy
from tests.kit.raw_http import Broken, Upstream, User, Visit
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter
from tests.kit.waiting import until
from tests.proxy.test_smuggling import LIES

from bench.torture_suites import PAUSED, UPGRADED, Verdict, parsed

ANSWERED_S = 5.0
TRIES = 2
"""To have HAProxy answer by itself: what it leaves to this program both times is answered so."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """`data` is what a machine says before it closes. `taken`: the user gets this status and body; else nothing that
    looks like an answer of the machine's."""

    suite: str
    name: str
    data: bytes
    taken: bool
    status: int = 0
    body: bytes = b""


def said(directory: Path) -> Iterator[Said]:
    for name, data, log in parsed(directory, "response"):
        answer = _of_log(name, data, log)
        if answer is not None:
            yield answer
    yield from lies()


def lies() -> Iterator[Said]:
    for name, data in LIES.items():
        yield Said(suite="answers: own", name=name, data=data, taken=False)


def _of_log(name: str, data: bytes, log: str) -> Said | None:
    """By what the parser says of the first final answer."""
    status = 0
    body = b""
    complete = framed = False
    for line in log.splitlines():
        if head := re.search(r"headers complete status=(\d+) .*flags=([0-9a-f]+) ", line):
            status, framed = int(head[1]), bool(int(head[2], 16) & (_CHUNKED | _LENGTH))
        elif span := re.match(r"off=(\d+) len=(\d+) span\[body\]", line):
            body += data[int(span[1]) : int(span[1]) + int(span[2])]
        elif line.endswith("message complete"):
            if status < 200 and status != 101:
                status, body = 0, b""
            else:
                complete = True
                break
        elif error := re.match(r"off=\d+ error code=(\d+)", line):
            if int(error[1]) in (PAUSED, UPGRADED):
                return None
            return Said(suite="answers: llhttp", name=name, data=data, taken=False)
    if status == 101:
        return None
    whole = complete or (status >= 200 and not framed)
    return Said(suite="answers: llhttp", name=name, data=data, taken=whole, status=status, body=body if whole else b"")


_CHUNKED, _LENGTH = 0x8, 0x20
"""Flags of llhttp: the body is framed."""


async def answered(
    answers: list[Said], kind: type[Embedded], *, carried: bool
) -> list[tuple[Said, tuple[Verdict, str]]]:
    data = b""

    async def saying(visit: Visit) -> None:
        await visit.read()
        await visit.send(data)
        visit.close()

    async def plain(visit: Visit) -> None:
        await visit.read()
        await visit.answer()

    upstream = Upstream(plain)
    await upstream.open()
    plane: Embedded | None = None
    found = []
    try:
        for answer in answers:
            for _ in range(TRIES):
                upstream.behaviour = plain
                if plane is None:
                    plane = await _opened(kind, upstream, carried=carried)
                upstream.behaviour, data = saying, answer.data
                before = sum(plane.context.counters.statuses.values())
                outcome = await _judged(answer, plane)
                if not carried or sum(plane.context.counters.statuses.values()) == before:
                    break
                await plane.close()  # it carries the app no more: an answer before has told that it gives interim ones
                plane = None
            found.append((answer, outcome))
    finally:
        if plane is not None:
            await plane.close()
        await upstream.close()
    return found


async def _opened(kind: type[Embedded], upstream: Upstream, *, carried: bool) -> Embedded:
    """`carried`: the app is, by HAProxy."""
    plane = kind()
    settings = {"region": "ams", "idle_timeout_s": 1.0}
    await plane.open(FakeRouter(FakeRoute("web", [FakeMachine("m1", upstream.address)])), settings)
    if isinstance(plane, Haproxy):
        if carried:
            user = await User.at(plane.http)
            await user.ask("GET /")
            await user.close()
            await until(lambda: bool(plane.haproxy.carried))
        else:
            plane.delegator.slots = 0
    return plane


async def _judged(answer: Said, plane: Embedded) -> tuple[Verdict, str]:
    user = await User.at(plane.http)
    try:
        heard = await user.ask("GET /", within=ANSWERED_S)
    except Broken as broken:
        return ("stricter" if answer.taken else "refused"), f"broken off: {broken}"
    except TimeoutError:
        return "wrong", "no answer"
    finally:
        user.writer.transport.abort()
    if heard.status in (502, 504) and b"proxy-status" in dict(heard.fields):
        return ("stricter" if answer.taken else "refused"), heard.body.decode().strip()
    if not answer.taken:
        return "laxer", f"taken as {heard.status} {heard.body!r}"
    if (heard.status, heard.body) != (answer.status, answer.body):
        return "wrong", f"{heard.status} {heard.body!r}, not {answer.status} {answer.body!r}"
    return "taken", ""
