"""What HAProxy gets of a program that has listened itself."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.kit.routers import FakeLender, FakeRouter

import hawker.host
from hawker.listening import Listening
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.plane import HaproxyEngine
from hawker.proxy.haproxy.settings import HaproxySettings


async def test_it_listens_where_the_program_before_this_one_did_so_itself(tmp_path: Path) -> None:
    """The configuration has changed: there was no HAProxy yet, and the socket was handed over."""
    with socket.create_server(("127.0.0.1", 0)) as handed:
        address = handed.getsockname()
        router, host = FakeRouter(), hawker.host.live(Listening([handed]))
        engine = HaproxyEngine(
            router, FakeLender(router), Settings(), HaproxySettings(backends=1), tmp_path / "h", host
        )
        try:
            assert await engine.listen(*address, public=80) == address
        finally:
            await engine.close()
