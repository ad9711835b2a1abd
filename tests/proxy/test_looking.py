"""Looking whether a machine takes connections."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from hawker.proxy.waking import Looking, connects


@pytest.fixture
def listener() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_port_takes_connections_once_somebody_listens(host: str) -> None:
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no {host}")
        address = host, sock.getsockname()[1]
        assert not await connects(address)
        sock.listen()
        assert await connects(address)


async def test_a_host_may_be_known_by_its_name(listener: socket.socket) -> None:
    with closing(listener):
        listener.listen()
        assert await connects(("localhost", listener.getsockname()[1]), 5.0)
    assert not await connects(("no-such-host.invalid", 80))


async def test_nobody_waits_long_for_a_host_that_says_nothing(listener: socket.socket) -> None:
    """The kernel answers no more connections than are to be taken."""
    with closing(listener):
        listener.listen(0)
        waiting = [socket.socket() for _ in range(2)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        async with asyncio.timeout(5):
            assert not await connects(listener.getsockname(), 0.01)
        for sock in waiting:
            sock.close()


async def test_a_program_is_seen_to_listen_however_many_others_are_looked_at(listener: socket.socket) -> None:
    looking = Looking()
    with closing(listener), closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        others = [asyncio.ensure_future(looking.until_listening([silent.getsockname()])) for _ in range(20)]
        mine = asyncio.ensure_future(looking.until_listening([silent.getsockname(), listener.getsockname()]))
        await asyncio.sleep(0)
        assert looking.machines == 21
        listener.listen()
        async with asyncio.timeout(5):
            assert await mine == listener.getsockname()
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert looking.machines == 0
