"""What HAProxy gets of a program that has listened itself."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from tests.kit.routers import FakeDelegator, FakeRouter

import hawker.host
from hawker.listening import Listening
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstreams import UpstreamPools
from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.process import Process
from hawker.proxy.haproxy.settings import HaproxySettings


async def test_it_listens_where_the_program_before_this_one_did_so_itself(tmp_path: Path) -> None:
    """The configuration has changed: there was no HAProxy yet, and the socket was handed over."""
    with socket.create_server(("127.0.0.1", 0)) as handed:
        address = handed.getsockname()
        router, host = FakeRouter(), hawker.host.live(Listening([handed]))
        upstreams = UpstreamPools(Settings(), host.sockets)
        parts = PlaneParts(router=router, settings=Settings(), host=host, upstreams=upstreams)
        engine = HaproxyPlane(parts, FakeDelegator(router), HaproxySettings(backends=1), tmp_path / "h")
        try:
            assert await engine.listen(*address, public=80) == address
        finally:
            await engine.close()


@pytest.mark.slow
async def test_one_that_is_slow_to_answer_is_not_taken_for_none(tmp_path: Path) -> None:
    """Beside another one it would serve on, and nobody would tell it anything."""
    process = Process(HaproxySettings(), tmp_path / "h", "ord-1", lambda: None)
    process.prepare()
    there = await asyncio.create_subprocess_exec("sleep", "infinity")
    asked = 0

    async def master(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read(-1)
        if asked > 1:
            writer.write(f"#<PID> <type> <reloads> <uptime>\n{there.pid} master 0 0d00h00m01s\n".encode())
        else:
            await over.wait()
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(master, process.directory / "master.sock")
    try:
        assert await process.find([]) is None
        assert await asyncio.wait_for(there.wait(), 30) == -signal.SIGUSR1, "it was of another version, and was told"
        assert asked == 2
    finally:
        over.set()
        server.close()
        if there.returncode is None:
            there.kill()
            await there.wait()
