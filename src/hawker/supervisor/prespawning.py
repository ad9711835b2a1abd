"""Prespawned programs: each has its process, which waits at a start gate (`hawker.supervisor.standby`).

A daemon asks for the process while its database makes the start durable. Then the daemon opens the gate itself, or its
`Start` has the supervisor open it. A prespawned process commits nobody to anything: it ends without a trace when no
start comes, when the daemon is gone, and when this supervisor ends. But once the daemon has opened the gate, the
program counts as started, whether or not the supervisor hears of the start: so whatever ends a wait first finds out
which it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from hawker.supervisor.calls import KeepStandby, Prespawn, Start
from hawker.supervisor.common import Common
from hawker.supervisor.instance import Instance
from hawker.supervisor.loop import Timer
from hawker.supervisor.programs import CannotStart
from hawker.supervisor.standby import Gone, StandbyProcesses, StartGate
from hawker.supervisor.starting import prespawn
from hawker.supervisor.users import refusal
from hawker.supervisor.wire import Connection

WAITS_S: Final = 1.0
"""How long a prespawned process waits for its start. A later start, from a slow disk, finds nothing and starts the
program as usual."""
MOST: Final = 64


@dataclass(frozen=True)
class _Waiting:
    gate: StartGate
    instance: Instance
    start: Start
    connection: Connection
    timer: Timer


class Prespawning:
    """`began` is told of a program that its daemon released. `known` says whether a key is an instance's."""

    def __init__(self, common: Common, began: Callable[[Instance], None], known: Callable[[str], bool]) -> None:
        self._common = common
        self._began = began
        self._known = known
        self._standby = StandbyProcesses(common)
        self._keeper: Connection | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._ending: dict[int, str] = {}  # keys by process

    @property
    def busy(self) -> bool:
        """Whether a prespawned process is left."""
        return bool(self._waiting or self._ending)

    def keep(self, request: KeepStandby, connection: Connection) -> None:
        """Have standby processes ready as long as the daemon is connected."""
        self._keeper = connection
        self._standby.keep(request.program)

    def add(self, request: Prespawn, connection: Connection) -> None:
        """Raises `CannotStart`: the start will meet the same, and is told."""
        start = request.start
        key = start.key
        if self._known(key) or key in self._waiting or len(self._waiting) >= MOST:
            return
        gate = self._standby.take(request.standby)
        common = self._common
        try:
            with common.host_mounts():
                instance = prespawn(start, gate, common)
        except BaseException as error:
            gate.close()
            if isinstance(error, Gone):
                raise CannotStart(f"{start.argv[0]}: what waited for its start has ended") from error
            raise
        timer = common.loop.later(WAITS_S, lambda: self.drop(key))
        self._waiting[key] = _Waiting(gate, instance, start, connection, timer)
        common.children.watch(gate.pid, partial(self._ended, key, instance))

    def take(self, start: Start) -> Instance | None:
        """The program that was prespawned for this start, released by now. None: there is none, or it was prespawned
        for another start of the same key. Raises `CannotStart`."""
        waiting = self._waiting.get(start.key)
        if waiting is None:
            return None
        if waiting.start != start:
            return self._decided(waiting)
        try:
            waiting.gate.open()
        except Gone:
            return self._decided(waiting)
        return self._decided(waiting, shut=False)

    def drop(self, key: str) -> None:
        """End a prespawned process whose start will not come."""
        if waiting := self._waiting.get(key):
            try:
                instance = self._decided(waiting)
            except CannotStart:  # its daemon asks for it again, and is told
                return
            if instance is not None:
                self._began(instance)

    def forsake(self, *, every: bool = False) -> None:
        """Drop those whose daemon is gone."""
        if every or (self._keeper is not None and not self._keeper.open):
            self._keeper = None
            self._standby.keep("")
        for key, waiting in list(self._waiting.items()):
            if every or not waiting.connection.open:
                self.drop(key)

    def _decided(self, waiting: _Waiting, *, shut: bool = True) -> Instance | None:
        """End the wait. Returns the instance that the process has become, if somebody released it. Raises
        `CannotStart`."""
        instance, problem, became = waiting.instance, None, False
        waiting.timer.cancel()
        del self._waiting[instance.record.key]
        if shut:
            waiting.gate.shut()
        try:
            became = waiting.gate.became()
        except OSError as error:
            problem = error
        waiting.gate.close()
        if became:
            return instance
        self._ending[instance.record.pid] = instance.record.key
        instance.forsake()
        if problem:
            why = refusal(problem, instance.record.user)
            raise CannotStart(f"{waiting.start.argv[0]}: cannot be started: {why}") from problem
        return None

    def _ended(self, key: str, instance: Instance, status: int) -> None:
        """Its process has ended: because we ended it, or by itself, perhaps as the program. A process that only waited
        leaves its control group, which is removed unless its key has an instance by now."""
        instance.main_ended = True
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.instance is instance:
            with contextlib.suppress(CannotStart):
                if self._decided(waiting):
                    instance.status = status
                    self._began(instance)
                    return
        self._ending.pop(instance.record.pid, None)
        if instance.record.group:
            self._common.remove_group(instance.record.group, unless=lambda: key in self._waiting or self._known(key))
