"""Commands that run beside a program, in its environment, directory and limits: either to their end with their output
collected, or with a client that talks to them meanwhile."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.calls import Converse, Execute
from hawker.supervisor.common import KILL_AGAIN_S, Common
from hawker.supervisor.instance import Instance
from hawker.supervisor.loop import Timer
from hawker.supervisor.programs import CannotStart, Invocation
from hawker.supervisor.wire import Ask

OUTPUT_BYTES_MAX = 1 << 20


class _Beside:
    """The processes of one command. The command may be killed before its processes are known."""

    def __init__(self, instance: Instance, common: Common) -> None:
        self._instance = instance
        self._common = common
        self._sessions: set[int] = set()
        self._killed = False

    def _watch(self, pids: Sequence[int]) -> None:
        found = proc.stat(pids[0])  # crun makes a session on the way
        self._sessions = {*pids, found.session if found else pids[0]} - {0, os.getsid(0)}
        self._common.children.watch(pids[0], self._ended)
        if self._killed:
            self._kill()

    def _kill(self) -> None:
        """Kill the command, and what it started in its session."""
        self._killed = True
        its = [pid for pid, s in proc.everyone().items() if self._sessions & {s.session, pid}]
        if its:  # long after its end the number may be a stranger's
            inside = set(self._instance.members())
            its = [pid for pid in its if pid in inside or proc.marker(pid) == self._instance.mark]
        for pid in its:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if its:  # one of them may have forked meanwhile
            self._common.loop.later(KILL_AGAIN_S, self._kill)

    def _ended(self, status: int) -> None:
        raise NotImplementedError


class Command(_Beside):
    """Runs a command and answers with what it gave back. The command is killed at its time-out."""

    def __init__(self, request: Execute, ask: Ask, instance: Instance, common: Common) -> None:
        super().__init__(instance, common)
        self._ask = ask
        self._output: dict[int, bytearray] = {}
        self._truncated = False
        self._over = False
        self._timer: Timer | None = None
        source = os.memfd_create("stdin")
        os.write(source, base64.b64decode(request.stdin))
        os.lseek(source, 0, os.SEEK_SET)
        pairs = [_pipe() for _ in range(2)]
        for read, _ in pairs:
            os.set_blocking(read, False)
        self._output = {read: bytearray() for read, _ in pairs}
        ends = {0: source, 1: pairs[0][1], 2: pairs[1][1]}
        try:
            instance.run_beside(Invocation(request.argv, request.env, ends), self._started)
        except (CannotStart, OSError, ValueError) as error:
            self._refuse(str(error))
        finally:
            for fd in ends.values():
                os.close(fd)
        for fd in self._output:
            common.loop.watch(fd, partial(self._ready, fd))
        if not self._over:
            self._timer = common.loop.later(request.timeout_s, self._late)

    def _started(self, pids: list[int], master: int, why: str) -> None:
        if pids:
            self._watch(pids)
        else:
            self._refuse(why)

    def _ready(self, fd: int, mask: int) -> None:
        if not self._read(fd):
            self._common.loop.forget(fd)

    def _read(self, fd: int) -> bool:
        """Take what is there, up to the limit; the rest is read and dropped. False at the end of the stream."""
        while True:
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            kept = self._output[fd]
            room = OUTPUT_BYTES_MAX - len(kept)
            kept += chunk[:room]
            self._truncated |= len(chunk) > room

    def _late(self) -> None:
        if not self._over:
            self._kill()

    def _ended(self, status: int) -> None:
        """Answer. Processes that the command left in the background go on."""
        for fd in self._output:
            self._read(fd)
        stdout, stderr = (base64.b64encode(data).decode() for data in self._output.values())
        self._close()
        how = ended(status)
        cut = {"timed_out": self._killed, "truncated": self._truncated}
        self._ask.answer({**how, "stdout": stdout, "stderr": stderr, **cut})

    def _refuse(self, why: str) -> None:
        self._close()
        self._ask.refuse("StartFailed", why)

    def _close(self) -> None:
        self._over = True
        if self._timer:
            self._timer.cancel()
        for fd in self._output:
            self._common.loop.forget(fd)
            os.close(fd)
        self._output = {}


class Conversation(_Beside):
    """Its connection is a command's alone: the other ends of its descriptors go over it with the answer, its end is
    told on it, and it is killed when the connection closes."""

    def __init__(self, request: Converse, ask: Ask, instance: Instance, common: Common) -> None:
        super().__init__(instance, common)
        self._ask = ask
        self._ours: list[int] = []
        ask.connection.on_close = self._kill
        theirs: dict[int, int] = {}
        terminal = (request.columns, request.rows) if request.tty else None
        if not terminal:
            (theirs[0], stdin), (stdout, theirs[1]), (stderr, theirs[2]) = (_pipe() for _ in range(3))
            self._ours = [stdin, stdout, stderr]
            for fd in self._ours:
                os.set_blocking(fd, False)
        try:
            instance.run_beside(Invocation(request.argv, request.env, theirs, terminal), self._started)
        except (CannotStart, OSError, ValueError) as error:
            self._refuse(str(error))
        finally:
            for fd in theirs.values():
                os.close(fd)

    def _started(self, pids: list[int], master: int, why: str) -> None:
        if master >= 0:
            self._ours = [master]
        if not pids:
            self._refuse(why)
            return
        self._watch(pids)
        self._ask.answer_with(self._ours)
        self._close()

    def _ended(self, status: int) -> None:
        self._ask.connection.send({"event": "ended", **ended(status)})

    def _refuse(self, why: str) -> None:
        self._ask.refuse("StartFailed", why)
        self._close()

    def _close(self) -> None:
        for fd in self._ours:
            os.close(fd)
        self._ours = []


def ended(status: int) -> dict[str, Any]:
    """The fields of `ExecResult` that tell how it ended."""
    return {"code": status if status >= 0 else 128 - status, "signal": -status if status < 0 else None}


def _pipe() -> tuple[int, int]:
    """A pipe: its end for reading and its end for writing."""
    return os.pipe2(os.O_CLOEXEC)
