"""The `hawker` command, whose event loop stands still when its process is told to:

    [sys.executable, stallable.PROGRAM, "hawker", "agent", "--config", ...]

SIGUSR1: busy with Python code. SIGUSR2: asleep in C, without the interpreter's lock. SIGWINCH: the same with it, so
that no other thread gets on. Real defects look like these.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from types import FrameType

PROGRAM = __file__
LONG_S = 600


def busy(number: int, frame: FrameType | None) -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        pass


def asleep(number: int, frame: FrameType | None) -> None:
    time.sleep(LONG_S)


def locked(number: int, frame: FrameType | None) -> None:
    ctypes.PyDLL(None).sleep(LONG_S)


STALLS = {"busy": signal.SIGUSR1, "asleep": signal.SIGUSR2, "locked": signal.SIGWINCH}


if __name__ == "__main__":
    del sys.path[0]  # this directory
    for name, number in STALLS.items():
        signal.signal(number, globals()[name])
    sys.argv = sys.argv[1:]
    from hawker.cli.main import main

    main()
