"""Runs `hawker` commands in forks of one process that has imported for them.

Each command is a process of its own as when a person runs it, with its own arguments, environment, input and output.
Only the imports are spared: a third of a second of processor time, hundreds of times. What a command imports and how it
begins is left to the tests that start a Python of their own (`programs.PROGRAM`).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

MESSAGE_MOST = 1 << 20
PIPE_TAKES = select.PIPE_BUF
"""What one that is ready takes without waiting."""
MODULES = ("apps", "app_logs", "catalog", "fleet", "images", "machines", "main", "visiting")


class Forks:
    """Made with the first command; `close` ends it. Several threads may run commands at once."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "tests.cli.forks", str(theirs.fileno())]
        self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], stdin: bytes, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Status, output and errors. Raises `TimeoutError` for a command that takes longer; it is killed."""
        (in_, writes), *read = pipes = [os.pipe() for _ in range(4)]
        request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}).encode()
        theirs = [in_, *(write for _, write in read)]
        try:
            socket.send_fds(self._ours, [request], theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        try:
            out, err, told = _communicate(writes, stdin, [fd for fd, _ in read], timeout_s)
        finally:
            for fd in (fd for fd, _ in pipes[1:]):
                os.close(fd)
        return int(told.split()[1]), out, err

    def close(self) -> None:
        self._ours.close()
        self._process.wait()


def _communicate(writes: int, data: bytes, reads: Sequence[int], timeout_s: float) -> list[bytes]:
    """All that comes from `reads` while `data` goes to `writes`. The last of them tells the process first."""
    got = dict.fromkeys(reads, b"")
    with selectors.DefaultSelector() as selector:
        for fd in reads:
            selector.register(fd, selectors.EVENT_READ)
        selector.register(writes, selectors.EVENT_WRITE)
        while selector.get_map():
            ready = selector.select(timeout_s)
            if not ready:
                os.kill(int(got[reads[-1]].split()[0]), signal.SIGKILL)
                raise TimeoutError(f"no end after {timeout_s} s: {got}")
            for key, _ in ready:
                if key.fd == writes:
                    try:
                        data = data[os.write(writes, data[:PIPE_TAKES]) :] if data else b""
                    except BrokenPipeError:
                        data = b""
                    if not data:
                        selector.unregister(writes)
                        os.close(writes)
                elif piece := os.read(key.fd, 1 << 16):
                    got[key.fd] += piece
                else:
                    selector.unregister(key.fd)
    return [got[fd] for fd in reads]


def main(fd: int) -> None:
    for name in MODULES:
        importlib.import_module(f"hawker.cli.{name}")
    gc.freeze()
    requests = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MESSAGE_MOST, 4)
        if not data:
            return
        if os.fork() == 0:
            requests.close()
            _keep(json.loads(data)["arguments"], json.loads(data)["env"], json.loads(data)["cwd"], fds)
        for each in fds:
            os.close(each)
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _keep(arguments: list[str], env: dict[str, str], cwd: str, fds: list[int]) -> NoReturn:
    """Runs the command, and tells its process and then its status."""
    pid = os.fork()
    if pid == 0:
        _command(arguments, env, cwd, fds)
    for fd in fds[:3]:
        os.close(fd)
    os.write(fds[3], f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(fds[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _command(arguments: list[str], env: dict[str, str], cwd: str, fds: list[int]) -> NoReturn:
    from hawker.__main__ import main as hawker

    for place, fd in enumerate(fds[:3]):
        os.dup2(fd, place)
    for fd in fds:
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["hawker", *arguments]
    status = 1
    try:
        hawker()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        atexit._run_exitfuncs()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
