"""Tells a service manager how the agent does, in the way of systemd: sd_notify(3). Without a service manager it says
nothing.

With its *file descriptor store* (systemd.service(5), FileDescriptorStoreMax=) a service manager keeps the listening
sockets, too, so that not even `kill -9` refuses a connection: the next process gets them back (`LISTEN_FDS`).
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from time import monotonic_ns

from hawker.listening import Listening

LOOK_S = 1.0
BARRIER_S = 5.0
NAME = "hawker-"
"""A stored socket's name begins with this, and ends with its inode."""
_OURS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE")


class ServiceManager:
    """`environment` is what the service manager put into this process's environment. It belongs into that of the next
    program, but into no child's."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self.environment = {name: environ.pop(name) for name in _OURS if name in environ}
        found = self.environment
        self._at = found.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        watched = found.get("WATCHDOG_USEC", "")
        mine = found.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watch_s = int(watched) / 1e6 if watched.isdecimal() and mine else 0.0
        self._stores = found.get("FDSTORE", "0") not in ("", "0")
        self._stored: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def ready(self, listening: Listening) -> None:
        """The agent serves. From now on the service manager hears that its loop turns, and keeps its sockets."""
        unused = listening.close_rest()
        if not self._at:
            return
        if self._stores:
            for inode in unused:
                self._tell(f"FDSTOREREMOVE=1\nFDNAME={NAME}{inode}")
        self._store(listening)
        self._tell("READY=1")
        self._task = asyncio.get_running_loop().create_task(self._run(listening), name="service manager")

    def reloading(self) -> None:
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self.leave_off()
        self._tell("STOPPING=1")

    def refused(self, why: str) -> None:
        """A restart was asked for and is refused: the agent goes on."""
        self._tell(f"READY=1\nSTATUS=not begun anew: {' '.join(why.split())[:200]}")

    def forget(self, inode: int) -> None:
        """This socket is in the way of a new one. Returns once the service manager has released it, too: otherwise it
        would hand the socket to every agent that it starts, and none of them could start."""
        if not self._stores:
            return
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={NAME}{inode}")
        ours, its = os.pipe2(os.O_CLOEXEC)
        try:
            self._tell("BARRIER=1", [its])  # sd_notify_barrier(3)
        finally:
            os.close(its)
        heard = select.poll()
        heard.register(ours, 0)
        heard.poll(BARRIER_S * 1000)
        os.close(ours)

    def hold(self) -> None:
        """Keep what is stored: sockets that are closed now are closed because the next program has them."""
        self._stores = False

    def leave_off(self) -> None:
        """Say nothing more of the loop, nor of sockets that are closed now because the agent ends."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, listening: Listening) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._watch_s / 3 or LOOK_S))
            if self._watch_s:
                self._tell("WATCHDOG=1")
            self._store(listening)

    def _store(self, listening: Listening) -> None:
        """Release a socket that was closed while the agent runs. Otherwise connections would wait in it for ever."""
        if not self._stores:
            return
        open_now = {f"{NAME}{os.fstat(number).st_ino}": number for number in listening.numbers()}
        for name in self._stored.keys() - open_now.keys():
            self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")
        for name in open_now.keys() - self._stored.keys():
            self._tell(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [open_now[name]])
        self._stored = open_now

    def _tell(self, text: str, numbers: Sequence[int] = ()) -> None:
        if self._at:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(self._at)
                if numbers:
                    socket.send_fds(sock, [text.encode()], numbers)
                else:
                    sock.send(text.encode())
