"""Simulated hosts, and the processes on them.

A `Station` is a host. A `Process` is one life of a program on it. A context variable says which process a task or
callback belongs to, and whatever that starts inherits it. `sim.platform.loop` handles killed and paused processes.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, Protocol

FIRST_FREE_PORT = 40_000


class Killed(BaseException):
    """Raised in a process that was killed in the middle of a step, to get out of it."""


class Connection(Protocol):
    """An end of a connection, as its host has it."""

    process: Process

    def unread_by(self, process: Process) -> bool:
        """Whether bytes wait here for this process."""

    def orphan(self, *, silently: bool) -> None:
        """The program has died."""


class Station:
    """A host on the network. `up` False: it has no power, nothing answers."""

    def __init__(self, name: str, region: str, address: str) -> None:
        self.name = name
        self.region = region
        self.address = address
        self.up = True
        self.ends: dict[Connection, None] = {}
        self._next_port = FIRST_FREE_PORT

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port


class Process:
    """One life of a program on `station`. `name` is for records."""

    def __init__(self, name: str, station: Station | None = None) -> None:
        self.name = name
        self.station = station
        self.dead = False
        self.paused = False
        self.stopped = False  # dead or paused: nothing of it runs
        self.went_on_s = 0.0  # when its last pause ended
        self.held: list[Handled] = []
        self.tasks: list[asyncio.Task[Any]] = []  # at its death

    def __repr__(self) -> str:
        return f"<Process {self.name}{' dead' * self.dead}{' paused' * self.paused}>"


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)
"""The process that the running code belongs to; None for the simulation itself."""

Handled = tuple[asyncio.Handle, Process | None]


def current_process() -> Process:
    """Raises `RuntimeError` outside of every process."""
    process = PROCESS.get()
    if process is None:
        raise RuntimeError("this runs in no simulated process")
    return process
