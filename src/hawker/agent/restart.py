"""Restarts the agent in place: the process executes its program once more, with the sockets that it listens on.

The process keeps its number, its parent and those sockets; everything else is as after `kill -9`: threads and memory
are gone, files and locks are released. Whoever connects meanwhile waits in the kernel's queue. That is enough for
another configuration, for another version of Hawker, and for a program that hangs.

A service manager hands sockets over in nearly the same way (systemd's `LISTEN_FDS`, sd_listen_fds(3)), so this module
reads both.
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
"""What a program tells the next one, in the environment: `Past` in JSON."""
HELD = "HAWKER_HELD"
"""What a program tells its `--check`: addresses in JSON."""
CHECK_S = 60.0
FIRST_FD = 3
SIGNALS = frozenset((signal.SIGHUP, signal.SIGTERM, signal.SIGINT))
"""The signals that have a meaning. They are blocked from the old program's end until the new one handles them: they
would end it."""
FORGOTTEN_S = 3600.0
TIMES_LONGER = 64


class Past(msgspec.Struct, frozen=True):
    """The programs that this process ran before. `stalls` counts those whose event loop stood still; `stalled_at` is
    when that was, if it was lately, and `ended_at` when the last one ended, by the monotonic clock, which goes on. 0:
    there was none."""

    pid: int
    ended_at: float = 0.0
    sockets: tuple[int, ...] = ()
    stalls: int = 0
    stalled_at: tuple[float, ...] = ()

    def stalled(self, now_s: float) -> Past:
        """The past of the next program, when this one's loop stands still now."""
        lately = tuple(at for at in self.stalled_at if now_s - at < FORGOTTEN_S)
        return msgspec.structs.replace(self, stalls=self.stalls + 1, stalled_at=(*lately, now_s))

    def longer(self, now_s: float) -> int:
        """How many times as long as usual the watchdog waits for a loop that stands still: a restart that does not help
        is not made again and again."""
        lately = sum(now_s - at < FORGOTTEN_S for at in self.stalled_at)
        return int(min(TIMES_LONGER, 1 << min(lately, 30)))


def read(environ: MutableMapping[str, str]) -> tuple[Past, list[socket.socket]]:
    """What the environment says of this process's past, and the listening sockets that come with it. Both are taken out
    of the environment, so that children get neither."""
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
    """The socket with this number, if it listens for TCP; otherwise it is closed."""
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
    """Execute the program again, with these sockets and with `extra` in the environment. Any thread may call it; the
    others are gone then. `unheeded` gives signals that had no effect on this program: the next one gets them. Raises
    `OSError` when it cannot be done."""
    kept = frozenset(sockets)
    past = msgspec.structs.replace(past, pid=os.getpid(), sockets=tuple(kept), ended_at=monotonic())
    told = msgspec.json.encode(past).decode()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2:
            with suppress(OSError):  # it was the descriptor of this very listing
                os.set_inheritable(number, number in kept)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for waiting in unheeded():
            signal.pthread_kill(threading.get_ident(), waiting)  # `kill` might give it to another thread
        os.execve(sys.executable, command(), {**os.environ, **extra, VARIABLE: told})
    finally:  # executing has failed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def command() -> list[str]:
    """The command line as this program was started."""
    return [sys.executable, *sys.orig_argv[1:]]


async def refusal(held: Sequence[tuple[str, int]] = ()) -> str:
    """What keeps this program, as it is on disk now, from being restarted; "" when nothing does. It may listen at the
    addresses `held`, since this process releases them."""
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
    """Where the program listens that asks for this check; None when nobody asks."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(environ.get(HELD, ""), type=list[tuple[str, int]])
    return None


def reap_inherited() -> None:
    """Reap the children that an earlier program of this process had, such as supervisors: nobody else knows of them,
    and they would become zombies. Call it on the running loop, before the program has children of its own."""
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
