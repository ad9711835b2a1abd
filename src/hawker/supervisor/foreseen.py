"""Programs whose start is about to be ordered: their processes are there and wait (`hawker.supervisor.gates`).

A daemon says what it will order while its database makes the order durable. Then it lets the process go itself, or has
us do it by the order. What was said binds nobody and leaves nothing: it is forgotten when the order does not come, when
the daemon is gone, and with this process. But a program that the daemon has let go is what a start has made, whether or
not we hear of the order: so whatever ends a wait first finds out which it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from hawker.supervisor.cgroups import Limits
from hawker.supervisor.common import Common
from hawker.supervisor.gates import Gate, Gates, Gone
from hawker.supervisor.instance import Instance
from hawker.supervisor.loop import Timer
from hawker.supervisor.programs import CannotStart
from hawker.supervisor.starting import wait_in_front
from hawker.supervisor.users import refusal
from hawker.supervisor.wire import Ask, Connection

WAITS_S: Final = 1.0
"""For its order. One that comes later, from a slow disk, finds nothing and starts the program as any other."""
MOST: Final = 64
_FIELDS: Final = ("machine", "argv", "env", "limits", "cwd", "users", "status")


class _Waiting:
    def __init__(self, gate: Gate, instance: Instance, fields: list[Any], connection: Connection, timer: Timer) -> None:
        self.gate = gate
        self.instance = instance
        self.fields = fields
        self.connection = connection
        self.timer = timer


class Foreseen:
    """`began` is told of a program that was let go without us. `known` says whether a key is an instance's."""

    def __init__(self, common: Common, began: Callable[[Instance], None], known: Callable[[str], bool]) -> None:
        self._common = common
        self._began = began
        self._known = known
        self._gates = Gates(common)
        self._keeper: Connection | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._ending: dict[int, str] = {}  # keys by process

    @property
    def busy(self) -> bool:
        """Whether a process of ours is left that was told something."""
        return bool(self._waiting or self._ending)

    def keep(self, ask: Ask) -> None:
        """Have processes ready for what a daemon will foresee, as long as it is there."""
        self._keeper = ask.connection
        self._gates.keep(ask["hold"])

    def add(self, ask: Ask) -> None:
        """Raises `CannotStart`: the order will meet the same, and is told."""
        key = ask["key"]
        if self._known(key) or key in self._waiting or len(self._waiting) >= MOST:
            return
        gate = self._gates.take(ask["hold"])
        common = self._common
        try:
            with common.host_mounts():
                instance = wait_in_front(
                    gate,
                    key=key,
                    machine=ask["machine"],
                    argv=ask["argv"],
                    env=ask["env"],
                    limits=Limits.of(ask["limits"]),
                    common=common,
                    cwd=ask.get("cwd", ""),
                    users=ask.get("users", None),
                    note=ask.get("note", {}),
                )
        except BaseException as error:
            gate.close()
            if isinstance(error, Gone):
                raise CannotStart(f"{ask['argv'][0]}: what waited for its start has ended") from error
            raise
        timer = common.loop.later(WAITS_S, lambda: self.drop(key))
        self._waiting[key] = _Waiting(gate, instance, _fields(ask), ask.connection, timer)
        common.children.watch(gate.pid, partial(self._ended, key, instance))

    def take(self, ask: Ask) -> Instance | None:
        """What waits for this order, or has been let go, as its program. None: nothing does, or it was told of another
        order. Raises `CannotStart`."""
        waiting = self._waiting.get(ask["key"])
        if waiting is None:
            return None
        if waiting.fields != _fields(ask):
            return self._decided(waiting)
        try:
            waiting.gate.open()
        except Gone:
            return self._decided(waiting)
        return self._decided(waiting, shut=False)

    def drop(self, key: str) -> None:
        """Nobody will order it."""
        if waiting := self._waiting.get(key):
            try:
                instance = self._decided(waiting)
            except CannotStart:  # its daemon asks for it again, and is told
                return
            if instance is not None:
                self._began(instance)

    def forsake(self, *, every: bool = False) -> None:
        """Those whose daemon is gone: nobody will order them."""
        if every or (self._keeper is not None and not self._keeper.open):
            self._keeper = None
            self._gates.keep("")
        for key, waiting in list(self._waiting.items()):
            if every or not waiting.connection.open:
                self.drop(key)

    def _decided(self, waiting: _Waiting, *, shut: bool = True) -> Instance | None:
        """It waits no more: what it has become, if somebody let it go. Raises `CannotStart`."""
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
            raise CannotStart(f"{waiting.fields[1][0]}: cannot be started: {why}") from problem
        return None

    def _ended(self, key: str, instance: Instance, status: int) -> None:
        """Its process is gone: because we wished so, or by itself, perhaps as the program. What only waited leaves its
        group, which goes unless its key has an instance by now."""
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


def _fields(ask: Ask) -> list[Any]:
    return [ask.get(name, None) for name in _FIELDS]
