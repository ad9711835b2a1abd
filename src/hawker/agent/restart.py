"""The agent begun anew in its own process: its program is executed once more, with the sockets that it listens on.

The process keeps its number, its parent and those sockets; all else is as after `kill -9`: threads and memory are gone,
files and locks are let go. Whoever connects meanwhile waits in the kernel's queue. That is enough for another
configuration, for another version of Hawker, and for a program that hangs.

A service manager hands sockets over in nearly the same way (systemd's `LISTEN_FDS`, sd_listen_fds(3)), so both are read
here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NoReturn

import msgspec

VARIABLE = "HAWKER_BEGUN_ANEW"
"""What a program tells the one after it, in the environment: `Past` in JSON."""
HELD = "HAWKER_HELD"
"""What it tells its `--check`: addresses in JSON."""
CHECK_S = 60.0
FIRST_FD = 3
SIGNALS = frozenset((signal.SIGHUP, signal.SIGTERM, signal.SIGINT))
"""Those with a meaning. From the old program's end until the new one knows them they are kept back: they would end
it."""
FORGOTTEN_S = 3600.0
TIMES_LONGER = 64


class Past(msgspec.Struct, frozen=True):
    """Of the programs that this process ran before. `stalls` are those whose event loop stood still, `stalled_at` when
    that was lately, `ended_at` when the last one ended: of the monotonic clock, which goes on. 0: there was none."""

    pid: int
    ended_at: float = 0.0
    sockets: tuple[int, ...] = ()
    stalls: int = 0
    stalled_at: tuple[float, ...] = ()

    def stalled(self, now_s: float) -> Past:
        """And now once more."""
        lately = tuple(at for at in self.stalled_at if now_s - at < FORGOTTEN_S)
        return msgspec.structs.replace(self, stalls=self.stalls + 1, stalled_at=(*lately, now_s))

    def longer(self, now_s: float) -> int:
        """How many times as long as usual a loop that stands still is waited for: a restart that does not help is not
        made again and again."""
        lately = sum(now_s - at < FORGOTTEN_S for at in self.stalled_at)
        return int(min(TIMES_LONGER, 1 << min(lately, 30)))


def read(environ: MutableMapping[str, str]) -> tuple[Past, list[socket.socket]]:
    """What the environment says of this process's past, and the listening sockets that come with it. Taken out of the
    environment: children get neither."""
    past, numbers = Past(os.getpid()), list[int]()
    with suppress(msgspec.MsgspecError):
        told = msgspec.json.decode(environ.pop(VARIABLE, ""), type=Past)
        if told.pid == past.pid:
            past = msgspec.structs.replace(told, sockets=())
            numbers += told.sockets
    whose, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if whose == str(past.pid) and count.isdecimal():
        numbers += range(FIRST_FD, FIRST_FD + int(count))
    return past, [sock for number in numbers if (sock := _listener(number)) is not None]


def _listener(number: int) -> socket.socket | None:
    """The socket with this number, if it is one that listens for TCP; else it is closed."""
    try:
        os.set_inheritable(number, False)
        sock = socket.socket(fileno=number)
    except OSError:
        with suppress(OSError):
            os.close(number)
        return None
    stream = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if stream and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return sock
    sock.close()
    return None


def execute(
    past: Past, sockets: Iterable[int], extra: Mapping[str, str], unheeded: Callable[[], Iterable[int]] = tuple
) -> NoReturn:
    """Begin anew, with these sockets and with `extra` in the environment. For any thread; the others are gone then.
    `unheeded` gives signals that had no effect on this program: the next one gets them. Raises `OSError` when it cannot
    be done."""
    kept = frozenset(sockets)
    past = msgspec.structs.replace(past, pid=os.getpid(), sockets=tuple(kept), ended_at=monotonic())
    told = msgspec.json.encode(past).decode()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2:
            with suppress(OSError):  # it was of this very look
                os.set_inheritable(number, number in kept)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for waiting in unheeded():
            signal.pthread_kill(threading.get_ident(), waiting)  # by `kill` another thread might get it
        os.execve(sys.executable, command(), {**os.environ, **extra, VARIABLE: told})
    finally:  # it has failed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def command() -> list[str]:
    """As this program was begun."""
    return [sys.executable, *sys.orig_argv[1:]]


async def refusal(held: Sequence[tuple[str, int]] = ()) -> str:
    """What keeps this program from being begun anew, as it is on disk now; "": nothing does. It may listen at the
    addresses `held`, since it lets them go."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command(),
            "--check",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, HELD: msgspec.json.encode(held).decode()},
        )
    except OSError as error:
        return f"{sys.executable}: {error.strerror}"
    try:
        async with asyncio.timeout(CHECK_S):
            said, _ = await process.communicate()
    except TimeoutError:
        return f"its check took longer than {CHECK_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return "" if process.returncode == 0 else said.decode(errors="replace").strip()[-2000:] or "its check failed"


def held(environ: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """Where the program listens that asks for this check; None: nobody does."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(environ.get(HELD, ""), type=list[tuple[str, int]])
    return None


def reap_inherited() -> None:
    """See to the end of children that an earlier program of this process had, such as supervisors: nobody else knows
    of them, and they would be zombies then. On the running loop, before it has children of its own."""
    loop = asyncio.get_running_loop()

    def ended(pid: int, pidfd: int) -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in map(int, (thread / "children").read_text().split()):
                pidfd = os.pidfd_open(pid)
                loop.add_reader(pidfd, ended, pid, pidfd)
