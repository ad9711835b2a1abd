"""A command run beside a program: same environment, directory and limits, its output collected, killed at its
time-out."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.instance import Instance, which

OUTPUT_BYTES_MAX = 1 << 20


class Command:
    """Started by the constructor, which raises `CannotStart` or OSError. `done` is told the result once it has
    ended."""

    def __init__(
        self,
        instance: Instance,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes,
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        base = proc.environ(instance.record.pid)
        full = {**base, **env, proc.MARKER: instance.mark}
        program = which(argv[0], full.get("PATH", os.defpath))
        source = os.memfd_create("stdin")
        os.write(source, stdin)
        os.lseek(source, 0, os.SEEK_SET)
        pairs = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for _, end in pairs:
                os.set_blocking(end, True)
            child = subprocess.Popen(
                argv,
                executable=program,
                env=full,
                cwd=instance.work,
                stdin=source,
                stdout=pairs[0][1],
                stderr=pairs[1][1],
                start_new_session=True,
            )
        except BaseException:
            for read_end, _ in pairs:
                os.close(read_end)
            raise
        finally:
            os.close(source)
            for _, end in pairs:
                os.close(end)
        child.returncode = 0  # reaped by the loop's waitid
        instance.attach(child.pid)  # not by entering: the group may be at its memory limit
        self.pid = child.pid
        self.fds = [pairs[0][0], pairs[1][0]]
        self.timed_out = False
        self._done = done
        self._output = {fd: bytearray() for fd in self.fds}

    def read(self, fd: int) -> bool:
        """Take what is there, up to the limit; the rest is read and dropped. False at the end of the stream."""
        while True:
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            kept = self._output[fd]
            kept += chunk[: OUTPUT_BYTES_MAX - len(kept)]

    def kill(self) -> None:
        """The time is up: end it and what it started in its session."""
        self.timed_out = True
        for pid, s in proc.everyone().items():
            if s.session == self.pid or pid == self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def finish(self, status: int) -> None:
        """Its main process ended with this status (minus a signal). What it left in the background goes on."""
        for fd in self.fds:
            self.read(fd)
        stdout, stderr = (base64.b64encode(self._output[fd]).decode() for fd in self.fds)
        for fd in self.fds:
            os.close(fd)
        self._done(
            {
                "code": status if status >= 0 else 128 - status,
                "signal": -status if status < 0 else None,
                "stdout": stdout,
                "stderr": stderr,
                "timed_out": self.timed_out,
            }
        )
