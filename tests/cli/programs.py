"""The `hawker` command as a program of its own, as people and scripts run it."""

from __future__ import annotations

import functools
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.cli.forks import Forks

ENDS_S = 30.0
PROGRAM = (sys.executable, "-m", "hawker")


class Ended(msgspec.Struct, frozen=True):
    """How a run of the command ended and what it printed."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment without what a developer may have set for a market of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HAWKER_", "FLY_", "_HAWKER"))}
    return {**kept, **more}


def hawker(*arguments: str | Path, env: Mapping[str, str] = {}, stdin: str = "") -> Ended:
    status, out, err = _forks().run([*map(str, arguments)], environment(env), stdin.encode(), ENDS_S)
    return Ended(status, out.decode(), err.decode())


@functools.cache
def _forks() -> Forks:
    return Forks()


def close_forks() -> None:
    """The next command makes them anew."""
    if _forks.cache_info().currsize:
        _forks().close()
        _forks.cache_clear()


def on_terminal(
    *arguments: str, env: Mapping[str, str] = {}, typed: str = "", program: Sequence[str] = PROGRAM
) -> Ended:
    """With a terminal for input, output and errors; what it shows is in `out`."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*program, *arguments],
            env=environment({"TERM": "xterm", "COLUMNS": "80", **env}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    shown = b""
    try:
        os.write(ours, typed.encode())
        while piece := _read(ours):
            shown += piece
        return Ended(process.wait(ENDS_S), shown.decode().replace("\r\n", "\n"), "")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: the last one on the other side has closed it
        return b""
