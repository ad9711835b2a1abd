"""Public ports that an app has to itself: opened as it claims them, closed with its last machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.kit.doors import free_port, house
from tests.kit.waiting import until

SAYS_HELLO = """
import os, socket
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(os.environ["PORT"])))
s.listen()
while True:
    c, _ = s.accept()
    c.sendall(b"hello")
    c.close()
"""


def plain(port: int) -> dict[str, Any]:
    return {"ports": [{"port": port}]}


async def said(port: int) -> bytes:
    async with asyncio.timeout(15):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return await reader.read(-1)
        finally:
            writer.close()


async def test_a_connection_to_a_port_of_an_app_wakes_its_machine(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        public = free_port()
        machine = await it.machine("mail", program=SAYS_HELLO, service=plain(public))
        ports = it.proxy.ports
        assert ports is not None
        await until(lambda: public in ports.opened)
        assert await said(public) == b"hello"
        assert it.story(machine).count("start starting") == 1
        await it.destroy(machine)
        await until(lambda: public not in ports.opened)


async def test_a_port_that_somebody_has_is_opened_when_it_is_free(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        public = server.sockets[0].getsockname()[1]
        await it.machine("mail", program=SAYS_HELLO, service=plain(public))
        ports = it.proxy.ports
        assert ports is not None
        await until(lambda: public in ports.missing)
        assert "in use" in it.proxy.health().closed[public]
        server.close()
        await server.wait_closed()
        await it.machine("news", program=SAYS_HELLO, service=plain(free_port()))  # another look
        await until(lambda: public in ports.opened)
        assert await said(public) == b"hello"


async def test_a_port_that_a_machine_of_this_host_listens_at_itself_is_left_to_it(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        port = free_port()
        machine = await it.machine("mail", port=port, program=SAYS_HELLO, service=plain(port), started=True)
        ports = it.proxy.ports
        assert ports is not None
        await until(lambda: port in ports.missing)
        assert "listens there itself" in ports.missing[port]
        assert it.shown(machine) == "started"
