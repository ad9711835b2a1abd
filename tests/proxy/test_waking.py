"""A sleeping machine behind its door, with a real worker, real programs and real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.kit.doors import house


async def test_the_first_request_starts_a_machine_and_is_answered_by_it(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        assert await it.get("web") == (200, b"ok")
        assert it.story(machine) == ["launch created", "start starting", "start started"]
        assert it.causes(machine)[-1].startswith("proxy autostart")


async def test_two_hundred_requests_at_once_begin_one_start(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        answers = await asyncio.gather(*(it.get("web") for _ in range(200)))
        assert answers == [(200, b"ok")] * 200
        assert it.story(machine).count("start starting") == 1
