"""A small program that begins anew as an agent does: `python begun_anew.py PORT LIMIT_S REPORT`.

It says on every connection its process, how often its loop has stood still, and whether it found the stacks of the
program before it. What a client writes makes its loop stand still (`tests.kit.stallable.STALLS`), or begins it anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    del sys.path[0]  # this directory
    sys.path.append(str(Path(__file__).parents[2]))

from tests.kit import stallable

from hawker.agent import restart
from hawker.agent.watchdog import Report, Watchdog
from hawker.listening import Listening

PROGRAM = __file__


async def main(port: int, limit_s: float, at: Path) -> None:
    past, sockets = restart.read(os.environ)
    listening = Listening(sockets)
    report = Report(at)
    stacks = report.take()
    restart.reap_inherited()

    def anew(past: restart.Past) -> NoReturn:
        restart.execute(past, listening.numbers(), {})

    class Said(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport
            told = f"{os.getpid()} {past.stalls} {len(stacks)}\n"
            transport.write(told.encode())

        def data_received(self, data: bytes) -> None:
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # tells the client, from this moment on
            wish(data.decode())

    def wish(word: str) -> None:
        if word == "anew":
            anew(past)
        getattr(stallable, word)(0, None)

    await listening.serve(Said, "127.0.0.1", port, backlog=100)
    Watchdog(limit_s * past.longer(time.monotonic()), report, lambda: anew(past.stalled(time.monotonic()))).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
