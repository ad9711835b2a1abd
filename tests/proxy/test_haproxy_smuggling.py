"""What leaves room for two readings never gets two: HAProxy refuses it, or passes it on as it has read it itself."""

from __future__ import annotations

import shutil

import pytest
from tests.kit.raw_http import Broken, echo, head, saying
from tests.proxy.test_haproxy import hot
from tests.proxy.test_smuggling import CHUNKED, CHUNKS, INNER, LIES, POST, REFUSED

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")

REPAIRED = {
    "both lengths",
    "both lengths, the other order",
    "two lengths that agree",
    "a list of lengths",
    "a folded field",
    "a folded coding",
    "a bare LF after a field",
    "a bare LF after the request line",
    "bare LFs only",
    "two Hosts that agree",
    "two spaces after the method",
    "a tab for a space",
    "many empty lines",
}
"""Requests that are clear to HAProxy 2.6. The embedded plane refuses them; here it gets, as a machine does, what
HAProxy makes of them, which has one reading."""
REPAIRED_CHUNKS = {
    "a size with a space after it",
    "a size that ends in LF",
    "data that ends in LF",
    "an end in LF",
    "a NUL in an extension",
    "a folded trailer",
    "a trailer with a bare LF",
}
REPAIRED_ANSWERS = {
    "both lengths",
    "a list of lengths",
    "a coding in HTTP/1.0",
    "a folded field",
    "a bare LF",
    "bare LFs only",
    "another version",
}
"""The same of machines' answers."""
CASES = {
    **{name: (data, name in REPAIRED) for name, data in REFUSED.items()},
    **{f"chunks: {name}": (POST + CHUNKED + b"\r\n" + data, name in REPAIRED_CHUNKS) for name, data in CHUNKS.items()},
}


@pytest.mark.parametrize("warm", [False, True])
async def test_a_request_with_two_readings_is_refused_or_repaired(warm: bool) -> None:
    """By way of the activator, and to an app that HAProxy carries. A machine is strict about what it gets."""
    async with hot() as stage:
        machine = await stage.machine(echo)
        if warm:
            await stage.warm()
        for name, (data, repaired) in CASES.items():
            machine.visits.clear()
            user = await stage.user()
            await user.send(data + INNER)
            answer = await user.answer("POST")
            assert (answer.status == 200) == repaired, name
            if repaired:
                if not answer.all("connection"):
                    assert (await user.answer()).status == 200, name  # what follows it is a request to all
                assert [visit.target for visit in machine.visits] in (["/"], ["/", "/smuggled"]), name
                assert machine.visits[0].body in (b"", b"abcd", b"hello"), name
            else:
                assert 400 <= answer.status < 500, name
                assert await user.ended() in ("closed", "reset"), name
                assert not any(visit.complete for visit in machine.visits), name
            assert machine.errors == [], name


async def test_answers_with_two_readings_do_not_reach_a_user_or_are_repaired() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm()
        for name, data in LIES.items():
            machine.behaviour = saying(data, then="close")
            user = await stage.user()
            await user.send(head("GET /"))
            try:
                status = (await user.answer()).status
            except Broken:
                status = 0
            assert status in ((200,) if name in REPAIRED_ANSWERS else (0, 502)), name
            user.reset()
