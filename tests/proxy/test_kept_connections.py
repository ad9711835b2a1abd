"""Connections to machines that are kept for further requests: never one that is not there any more."""

from __future__ import annotations

import asyncio
import socket
import struct

from tests.kit.raw_http import LIMIT_S, head
from tests.kit.routers import FakeMachine
from tests.proxy.conftest import Stage

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def test_a_connection_that_broke_while_its_answer_was_read_is_not_kept(stage: Stage) -> None:
    """The machine has answered and is gone when the last of the request is written. What it said still counts; the
    next request needs another connection."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        stage.web.machines.append(FakeMachine("m1", listening.getsockname()))
        user = await stage.user()
        await user.send(head("POST / | Transfer-Encoding: chunked") + b"5\r\nfirst\r\n")
        machine, _ = await asyncio.wait_for(loop.sock_accept(listening), LIMIT_S)
        came = b""
        while b"first" not in came:
            came += await asyncio.wait_for(loop.sock_recv(machine, 1 << 16), LIMIT_S)
        # Both are there when the proxy looks next, the end of the request before the answer and the reset.
        user.writer.write(b"0\r\n\r\n")
        machine.send(ANSWER)
        machine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        machine.close()
        assert (await user.answer("POST")).body == b"hello"

        asked = asyncio.create_task(stage.ask("GET /"))
        machine, _ = await asyncio.wait_for(loop.sock_accept(listening), LIMIT_S)
        with machine:
            machine.setblocking(False)
            await asyncio.wait_for(loop.sock_recv(machine, 1 << 16), LIMIT_S)
            await loop.sock_sendall(machine, ANSWER)
            assert (await asked).body == b"hello"
