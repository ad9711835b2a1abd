"""Programs whose start is about to be ordered: their processes are there and wait (`hawker.supervisor.programs.Gate`).

A daemon says what it will order while its database makes the order durable. What was said binds nobody and leaves
nothing: it is forgotten when the order does not come, when the daemon is gone, and with this process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from hawker.supervisor.common import Common
from hawker.supervisor.instance import Instance
from hawker.supervisor.loop import Timer
from hawker.supervisor.programs import CannotStart, Gone
from hawker.supervisor.wire import Ask, Connection

WAITS_S: Final = 1.0
"""For its order. One that comes later, from a slow disk, finds nothing and starts the program as any other."""
MOST: Final = 64
_FIELDS: Final = ("machine", "argv", "env", "limits", "cwd", "status")


class _Waiting:
    def __init__(self, instance: Instance, fields: list[Any], connection: Connection, timer: Timer) -> None:
        self.instance = instance
        self.fields = fields
        self.connection = connection
        self.timer = timer


class Foreseen:
    """`start` makes an instance of an order, with the file of what waits in front of its program. `known` says whether
    a key is an instance's."""

    def __init__(self, common: Common, start: Callable[[Ask, str], Instance], known: Callable[[str], bool]) -> None:
        self._common = common
        self._start = start
        self._known = known
        self._waiting: dict[str, _Waiting] = {}
        self._ending: dict[int, str] = {}  # keys by process

    @property
    def busy(self) -> bool:
        """Whether a process of ours is left."""
        return bool(self._waiting or self._ending)

    def add(self, ask: Ask) -> None:
        """Raises `CannotStart`: the order will meet the same, and is told."""
        key = ask["key"]
        if self._known(key) or key in self._waiting or len(self._waiting) >= MOST:
            return
        instance = self._start(ask, ask["hold"])
        timer = self._common.loop.later(WAITS_S, lambda: self.drop(key))
        self._waiting[key] = _Waiting(instance, _fields(ask), ask.connection, timer)
        self._common.children.watch(instance.record.pid, partial(self._ended, key, instance))

    def take(self, ask: Ask) -> Instance | None:
        """What waits for this order, begun. None: nothing does, or it was told of another order. Raises
        `CannotStart`."""
        waiting = self._waiting.get(ask["key"])
        if waiting is None:
            return None
        if waiting.fields != _fields(ask):
            self.drop(ask["key"])
            return None
        waiting.timer.cancel()
        del self._waiting[ask["key"]]
        try:
            waiting.instance.begin()
        except Gone:
            waiting.instance.forsake()
            return None
        except CannotStart:
            self._common.children.forget(waiting.instance.record.pid)
            raise
        return waiting.instance

    def drop(self, key: str) -> None:
        if waiting := self._waiting.pop(key, None):
            waiting.timer.cancel()
            self._ending[waiting.instance.record.pid] = key
            waiting.instance.forsake()

    def forsake(self, *, every: bool = False) -> None:
        """Those whose daemon is gone: nobody will order them."""
        for key, waiting in list(self._waiting.items()):
            if every or not waiting.connection.open:
                self.drop(key)

    def _ended(self, key: str, instance: Instance, status: int) -> None:
        """Its process is gone, because we wished so or by itself. Its group goes, unless its key has an instance by
        now."""
        instance.main_ended = True
        self._ending.pop(instance.record.pid, None)
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.instance is instance:
            self.drop(key)
            del self._ending[instance.record.pid]
        if instance.record.group:
            self._common.remove_group(instance.record.group, unless=lambda: key in self._waiting or self._known(key))


def _fields(ask: Ask) -> list[Any]:
    return [ask.get(name, None) for name in _FIELDS]
