"""Instances from their start to their end: the supervisor moves their output to the log, kills their tree when they
end, and tells whoever waits."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hawker.supervisor.common import KILL_AGAIN_MOST_S, KILL_AGAIN_S, Common
from hawker.supervisor.instance import PROCESS, Instance
from hawker.supervisor.status_file import BYTES_MAX, STATUS

REAPED_S = 5.0  # how long the status of a program that is not our child may take: its parent must reap it first

Exit = dict[str, Any]


class Instances:
    """`by_key` has all that runs, and what has ended until somebody forgets it. `on_exit` is told of each end,
    `on_output` of machines whose log has grown."""

    def __init__(self, common: Common, on_exit: Callable[[Exit], None], on_output: Callable[[str], None]) -> None:
        self.by_key: dict[str, Instance] = {}
        self._common = common
        self._loop = common.loop
        self._on_exit = on_exit
        self._on_output = on_output
        self._heard: dict[str, int] = {}  # what is watched of it, by key
        self._waiting: dict[str, list[Callable[[Exit], None]]] = {}

    @property
    def busy(self) -> bool:
        """Whether one runs."""
        return any(instance.exit is None for instance in self.by_key.values())

    @property
    def running(self) -> list[Instance]:
        return [instance for instance in self.by_key.values() if instance.exit is None]

    def register(self, instance: Instance) -> None:
        """Take charge of an instance that was started."""
        self.by_key[instance.record.key] = instance
        self._watch_output(instance)
        self._watch_words(instance)
        if instance.status is None:
            self._common.children.watch(instance.record.pid, partial(self._ended, instance))
        else:
            self._main_ended(instance)

    def adopt(self, found: Mapping[str, Instance]) -> None:
        """Take over the instances of the supervisor before this one."""
        self.by_key.update(found)
        for instance in self.running:
            self._watch_output(instance)
            self._watch_words(instance)
            if instance.main_ended:
                self._loop.later(0, partial(self._main_ended, instance))
            else:
                self._loop.watch(instance.adopted_fd, partial(self._adopted_ended, instance))

    def when_ended(self, instance: Instance, then: Callable[[Exit], None]) -> None:
        """Call `then` when this instance, which runs, has ended."""
        self._waiting.setdefault(instance.record.key, []).append(then)

    def forget(self, instance: Instance) -> None:
        """Remove an ended instance and all that is left of it. Raises OSError, and then the instance is still known."""
        instance.destroy()
        self.by_key.pop(instance.record.key, None)
        if instance.record.group and not instance.group_gone:
            self._common.remove_group(instance.record.group)

    def kill(self, instance: Instance, again_s: float = KILL_AGAIN_S) -> None:
        """Kill until nothing is left, then record the end and tell everyone."""
        if instance.exit is not None:
            return
        gone = False
        try:
            gone = instance.kill_tree() and instance.main_ended
        except OSError:  # of its group: it is tried again
            traceback.print_exc()
        if not gone or not (instance.learn_status() or time.monotonic() - instance.ended_at_s > REAPED_S):
            longer = min(again_s * 2, KILL_AGAIN_MOST_S)
            if not instance.main_ended:
                instance.signal_main(signal.SIGKILL)
            self._loop.later(again_s, lambda: self.kill(instance, longer))
            return
        for pipe in instance.pipes:
            self._loop.forget(pipe.fd)
        if (watch := self._heard.pop(instance.record.key, None)) is not None:
            self._common.writes.forget(watch)
        ended = instance.finish()
        if instance.record.group:
            self._common.remove_group(instance.record.group, then=instance.lost_group)
        self._on_output(instance.record.machine)
        for waiter in self._waiting.pop(instance.record.key, []):
            waiter(ended)  # raises nothing
        self._on_exit(ended)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _ended(self, instance: Instance, status: int) -> None:
        instance.status = status
        self._main_ended(instance)

    def _adopted_ended(self, instance: Instance, mask: int) -> None:
        self._loop.forget(instance.adopted_fd)
        self._main_ended(instance)

    def _main_ended(self, instance: Instance) -> None:
        """The program's main process is gone. The rest of its tree goes with it."""
        instance.main_ended = True
        instance.ended_at_s = time.monotonic()
        instance.note_oom()
        self.kill(instance)

    # --- output ------------------------------------------------------------------------------------------------------

    def _watch_output(self, instance: Instance) -> None:
        for pipe in instance.pipes:
            self._loop.watch(pipe.fd, lambda mask: self._read_output(instance))

    def _read_output(self, instance: Instance) -> None:
        if instance.drain():
            self._on_output(instance.record.machine)

    def _watch_words(self, instance: Instance) -> None:
        """End a hypervisor that writes more than an exit into its status file: a stranger may have taken it over, and
        what is in the file takes the host's memory."""
        if not instance.record.status or instance.record.kind != PROCESS:
            return
        path = instance.path + STATUS

        def look() -> None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.getsize(path) > BYTES_MAX:
                    instance.signal_main(signal.SIGKILL)
                    os.truncate(path, 0)

        with contextlib.suppress(OSError):  # it has ended
            self._heard[instance.record.key] = self._common.writes.watch(path, look)
            look()
