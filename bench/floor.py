"""What this machine itself costs: a durable write, an HTTP round trip, a process. Printed beside every figure of
ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from hawker.client.connection import Peer

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"


def fdatasync_ms(directory: Path, rounds: int) -> list[float]:
    """Append 256 bytes and make them durable."""
    fd = os.open(directory / "fdatasync", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times = []
    for _ in range(rounds):
        began = perf_counter()
        os.write(fd, b"x" * 256)
        os.fdatasync(fd)
        times.append((perf_counter() - began) * 1000)
    os.close(fd)
    return times


def process_ms(rounds: int) -> list[float]:
    """Start the benchmark's program by a bare vfork and exec, until its first byte arrives."""
    return [first_byte_ms() for _ in range(rounds)]


def first_byte_ms() -> float:
    read, write = os.pipe()
    began = perf_counter()
    child = subprocess.Popen(["/bin/echo", "x"], stdout=write, start_new_session=True)
    os.close(write)
    os.read(read, 1)
    took = (perf_counter() - began) * 1000
    os.close(read)
    child.wait()
    return took


async def http_ms(rounds: int) -> list[float]:
    """A round trip to a bare asyncio server in another process, with the client that our agents use."""
    server = await asyncio.create_subprocess_exec(sys.executable, __file__, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    peer = Peer("127.0.0.1", port)
    times = []
    for _ in range(rounds):
        began = perf_counter()
        await peer.request("POST", "/", body=b"{}", timeout_s=5)
        times.append((perf_counter() - began) * 1000)
    await peer.close()
    server.terminate()
    await server.wait()
    return times


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(REPLY)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
