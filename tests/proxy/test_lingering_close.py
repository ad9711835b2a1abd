"""How connections of users end: what was said to them arrives, however slowly they take it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from h2.settings import SettingCodes
from tests.kit.authority import Authority
from tests.kit.http2 import User2
from tests.kit.raw_http import Visit, head
from tests.kit.waiting import at_rest
from tests.proxy.conftest import Stage

# HAProxy ends its connections itself.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

SIZE = 1_000_000


async def long(visit: Visit) -> None:
    await visit.answer(b"x" * SIZE)


async def written(stage: Stage) -> None:
    """The proxy has handed all of it to its transport, and as much as there is room for to the system."""
    connections: Collection[Any] = stage.plane.context.connections

    def left() -> int:
        transports = [getattr(each, "transport", None) or each._transport for each in connections]
        return sum(transport.get_write_buffer_size() for transport in transports)

    await at_rest(left, 0.3)


@pytest.mark.parametrize("text", ["GET / | Connection: close", "POST / | Content-Length: 900"])
async def test_who_still_sends_may_take_its_last_answer_slowly(stage: Stage, text: str) -> None:
    stage.settings |= {"linger_s": 0.1, "window_bytes": 2 * SIZE, "replay_bytes": 100}
    await stage.machine(long)
    user = await stage.user()
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
    await user.send(head(text) + b"more of it")
    await written(stage)
    await user.send(b"and more")
    user.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len((await user.answer(text.split()[0])).body) == SIZE


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_closing_lets_an_answer_arrive_to_its_end(stage: Stage, secure: bool, tmp_path: Path) -> None:
    """Although its user takes it slowly, and says still what it has taken."""
    more: dict[str, Any] = {}
    if secure:
        authority = Authority()
        authority.write(tmp_path, "web.example")
        stage.settings["certificates"] = tmp_path
        stage.serves(handlers=("tls", "http"))
        more = {"tls": authority.client("h2"), "name": "web.example"}
    await stage.machine(long)
    plane = await stage.open()
    user = await User2.at(plane.tls if secure else plane.http, **more)
    user.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 23})
    user.h2.increment_flow_control_window(1 << 23)
    await user.send()
    stream = await user.begin("GET / | :scheme: https" if secure else "GET /")
    await user.until(lambda: len(user.answers[stream].body) > 0)
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # both ways are one transport
    closing = asyncio.create_task(stage.plane.close())
    await written(stage)
    user.h2.increment_flow_control_window(1)
    await user.send()
    user.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len((await user.answer(stream)).body) == SIZE
    await user.close()
    await closing
