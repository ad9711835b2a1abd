"""Looking whether a machine takes connections."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import closing
from pathlib import Path

import pytest

from hawker.proxy.machines.listen_probe import TRY_S, ListenProbe
from hawker.sockets import Sockets


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
        assert not await ListenProbe(Sockets()).connects(address, TRY_S)
        sock.listen()
        assert await ListenProbe(Sockets()).connects(address, TRY_S)


async def test_a_host_may_be_known_by_its_name(listener: socket.socket) -> None:
    with closing(listener):
        listener.listen()
        assert await ListenProbe(Sockets()).connects(("localhost", listener.getsockname()[1]), 5.0)
    assert not await ListenProbe(Sockets()).connects(("no-such-host.invalid", 80), TRY_S)


async def test_nobody_waits_long_for_a_host_that_says_nothing(listener: socket.socket) -> None:
    """The kernel answers no more connections than are to be taken."""
    with closing(listener):
        listener.listen(0)
        waiting = [socket.socket() for _ in range(2)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        async with asyncio.timeout(5):
            assert not await ListenProbe(Sockets()).connects(listener.getsockname(), 0.01)
        for sock in waiting:
            sock.close()


async def test_a_program_is_seen_to_listen_however_many_others_are_looked_at(listener: socket.socket) -> None:
    listen_probe = ListenProbe(Sockets())
    with closing(listener), closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        others = [asyncio.ensure_future(listen_probe.until_listening([silent.getsockname()])) for _ in range(20)]
        mine = asyncio.ensure_future(listen_probe.until_listening([silent.getsockname(), listener.getsockname()]))
        await asyncio.sleep(0)
        assert listen_probe.machines == 21
        listener.listen()
        async with asyncio.timeout(5):
            assert await mine == listener.getsockname()
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert listen_probe.machines == 0


async def test_machines_that_wake_at_once_hold_up_nobody(listener: socket.socket) -> None:
    """The loop slept before the second look at each of them. A thread that sleeps gives its processor away of its own
    accord, and the system counts that."""

    def slept() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    listen_probe = ListenProbe(Sockets())
    with closing(listener):
        before = slept()
        waiting = [asyncio.ensure_future(listen_probe.until_listening([listener.getsockname()])) for _ in range(100)]
        await asyncio.sleep(0)
        assert listen_probe.machines == len(waiting)
        assert slept() - before < 20
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_memory_of_an_earlier_connection_keeps_no_look_waiting() -> None:
    """A machine that closes first remembers the connection for a minute. The kernel answers for it to who comes from
    the same port, in a way that neither takes nor refuses, while nobody listens."""
    for _ in range(200):
        with closing(socket.socket()) as server, closing(socket.socket()) as user:
            server.bind(("127.0.0.1", 0))
            at: tuple[str, int] = server.getsockname()
            try:
                user.bind(("127.0.0.1", refused_from(at) + 2))  # the kernel goes on by two, most times
            except (OSError, OverflowError):
                continue  # somebody has it
            source: tuple[str, int] = user.getsockname()
            server.listen()
            user.connect(at)
            with closing(server.accept()[0]) as taken:
                taken.shutdown(socket.SHUT_WR)
                assert user.recv(1) == b""
                user.close()
                assert taken.recv(1) == b""
        assert remembered(at, source)
        with pytest.raises(StopIteration) as known:
            Sockets().connected(at, TRY_S).send(None)  # it is known within the call, or this goes on and waits
        assert known.value.value is None
        if not remembered(at, source):
            return  # it was met
    pytest.fail("no look had the port of an earlier connection")


def refused_from(at: tuple[str, int]) -> int:
    """The port that a connection had which was refused at an address."""
    with closing(socket.socket()) as sock:
        assert sock.connect_ex(at) == errno.ECONNREFUSED
        return int(sock.getsockname()[1])


def remembered(at: tuple[str, int], source: tuple[str, int]) -> bool:
    """Whether the end of a connection is remembered at its end `at`."""
    ends = [f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}" for host, port in (at, source)]
    return any(line.split()[1:4] == [*ends, "06"] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
