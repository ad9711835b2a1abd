"""One program's life, once it was started (`hawker.supervisor.starting`): watched, killed to the last process, its end
recorded.

Everything a new supervisor needs to take over is in files: the record, appended to before anyone is told, and the
pipes `out` and `err` (see `hawker.supervisor.files`).

A program may itself know better than the kernel how it ended, or what ran inside it: one that is started with `status`
gets a descriptor of a file to tell it by (see `hawker.supervisor.status_file`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.calls import Limits
from hawker.supervisor.cgroups import CannotResize, Groups
from hawker.supervisor.files import Files, RecordFile
from hawker.supervisor.output import MachineWriter, Pipe
from hawker.supervisor.programs import CannotStart, Invocation, open_terminal, take_terminal, which
from hawker.supervisor.status_file import STATUS, last_words
from hawker.supervisor.users import become, give, refusal

STREAMS = ("out", "err")
PROCESS = "process"  # the kind

Beside = Callable[[list[int], int, str], None]
"""Is told of a command that was started: its pid and then further leaders of sessions it may be in, its terminal's
other end or -1; or, without pids, why it was not."""


@dataclass(frozen=True)
class Record:
    """How it was started. `group` is the cgroup's name, "" without cgroups; `start_ticks` tells a reused pid."""

    key: str
    machine: str
    pid: int
    start_ticks: int
    started_at_ms: int
    group: str
    status: bool = False  # it tells itself how it ended
    user: int | None = None  # of the host, that its programs run as; None for the supervisor's own
    waits: bool = False  # it was written down while it waited to become its program
    fresh: bool = False  # and its machine's directory was made then
    kind: str = PROCESS
    note: dict[str, Any] = field(default_factory=dict)  # the daemon's own
    made_of: dict[str, Any] = field(default_factory=dict)  # of its kind


class Instance:
    """A program that runs or ran. `exit` is None while it runs."""

    def __init__(self, record: Record, files: Files, mark: str, groups: Groups | None) -> None:
        self.record = record
        self.work = files.work(record.machine)
        self.place = self.work  # the same, as its programs see it
        self.log = MachineWriter(files.log(record.machine))
        self.mark = mark
        self.outside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.suspended = False
        self.exit: dict[str, Any] | None = None
        self.adopted_fd = -1  # a pidfd when we are not the parent
        self._leader = record.pid  # -1 once that number may be another process's
        self.main_ended = False
        self.ended_at_s = 0.0  # monotonic
        self.status: int | None = None  # of waitid: the exit code, or minus the signal
        self.oom = False
        self.group_gone = False
        self.pipes: list[Pipe] = []
        self.path = files.instance(record.key)
        self._file = RecordFile(self.path)
        self._groups = groups if record.group else None

    # --- its beginning, and taking over ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have it known from now on. Raises `CannotStart`, and then nothing is left of it but its group."""
        try:
            self.write_down()
        except OSError as error:  # nobody would know of it
            self.forsake()
            raise CannotStart(f"machine {self.record.machine}: cannot be recorded: {error}") from error

    def forsake(self) -> None:
        """Kill what nobody is to know of, and leave nothing of it but its group. Its machine may never come to be."""
        if not self.main_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signal.SIGKILL)
        for pipe in self.pipes:
            pipe.remove()
        self.pipes = []
        self.clear()
        if self.record.fresh:
            remove_empty(self.work)
        self._file.remove()

    def write_down(self) -> None:
        """Write its record: from now on the next supervisor takes it over. Raises OSError."""
        self._file.write(vars(self.record))

    def take_over(self, known: Mapping[str, Any]) -> None:
        """What else an earlier supervisor wrote down."""
        self.exit = known.get("exit")
        if self.exit is None:
            self.suspended = known.get("suspended", False)
            self.adopt()

    def adopt(self) -> None:
        """Watch a program whose parent is gone. One that ended meanwhile is found ended, its status lost."""
        self.pipes = [Pipe(f"{self.path}.{stream}", stream[0], self.record.key) for stream in STREAMS]
        self.adopted_fd = proc.open_pidfd(self.record.pid, self.record.start_ticks)
        if self.adopted_fd < 0:
            self.main_ended = True
            self._leader = -1

    @property
    def grouped(self) -> bool:
        """Whether it has a control group."""
        return self._groups is not None

    # --- acting on it ------------------------------------------------------------------------------------------------

    def members(self) -> list[int]:
        if self._groups:
            return self._groups.pids(self.record.group)
        return proc.members(self._leader, self.mark)

    def signal_main(self, number: int) -> bool:
        """False when the program has ended. A pid of our own child cannot be reused before we reap it."""
        if self.main_ended:
            return False
        with contextlib.suppress(ProcessLookupError):
            if self.adopted_fd >= 0:
                signal.pidfd_send_signal(self.adopted_fd, number)
            else:
                os.kill(self.record.pid, number)
            return True
        return False

    def kill_tree(self) -> bool:
        """Kill every process. True once none is left; call again until then."""
        if self._groups:
            return self._groups.kill(self.record.group)
        pids = self.members()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def freeze(self, frozen: bool) -> None:
        if self._groups:
            self._groups.freeze(self.record.group, frozen)
        else:
            for pid in self.members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)
        self.suspended = frozen
        self._file.write({"suspended": frozen})

    def resize(self, limits: Limits) -> None:
        """Raises `CannotResize`, and then nothing was changed."""
        if not self._groups:
            raise CannotResize("there are no control groups here")
        self._groups.resize(self.record.group, limits)

    def run_beside(self, invocation: Invocation, done: Beside) -> None:
        """Start a command with the program's environment and directory, in its group. Raises `CannotStart` or
        OSError."""
        argv, terminal, descriptors = invocation.argv, invocation.terminal, invocation.descriptors
        env = {**invocation.environment(proc.environ_of_program(self.record.pid)), proc.MARKER: self.mark}
        program = which(argv[0], env.get("PATH", os.defpath))
        master, slave = open_terminal(*terminal) if terminal else (-1, -1)
        ends = [slave] * 3 if terminal else [descriptors[number] for number in range(3)]
        user = self.record.user
        try:
            give(ends, user)
            with self.outside():
                child = subprocess.Popen(
                    argv,
                    executable=program,
                    env=env,
                    cwd=self.place,
                    stdin=ends[0],
                    stdout=ends[1],
                    stderr=ends[2],
                    start_new_session=True,
                    preexec_fn=partial(_begin, bool(terminal), user) if terminal or user is not None else None,
                )
        except BaseException as error:
            if terminal:
                os.close(master)
            if isinstance(error, subprocess.SubprocessError):  # all that it says of an error in `_begin`
                raise CannotStart(f"{argv[0]}: it cannot become user {user}") from error
            if isinstance(error, PermissionError):
                raise CannotStart(f"{argv[0]}: {refusal(error, user)}") from error
            raise
        finally:
            if terminal:
                os.close(slave)
        child.returncode = 0  # reaped by the loop's waitid
        try:
            if self._groups:  # not by entering: the group may be at its memory limit
                self._groups.attach(self.record.group, child.pid)
        except OSError:  # it would run beside the program's limits, and outlive it
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            if terminal:
                os.close(master)
            raise
        done([child.pid], master, "")

    def describe(self) -> list[dict[str, Any]]:
        """What `ps` shows."""
        return proc.describe(self.members())

    def stats(self) -> dict[str, Any]:
        pids = self.members()
        cpu, memory, count = proc.usage(pids)
        if self._groups:
            cpu, memory = self._groups.usage(self.record.group)
        return {"cpu_s": cpu, "memory_bytes": memory, "processes": count}

    # --- its end -----------------------------------------------------------------------------------------------------

    def drain(self, *, last: bool = False) -> bool:
        """Move what was written into the log. True when there was something."""
        some = False
        for pipe in self.pipes:
            if lines := pipe.read_lines(last=last):
                self.log.write(lines)
                some = True
        return some

    def finish(self) -> dict[str, Any]:
        """Nothing of it runs any more: keep its last words, record its end, give the group back."""
        try:
            self.drain(last=True)
            for pipe in self.pipes:
                pipe.remove()
        except OSError:
            traceback.print_exc()
        self.pipes = []
        if self.adopted_fd >= 0:
            os.close(self.adopted_fd)
            self.adopted_fd = -1
        self.exit = {
            "key": self.record.key,
            "machine": self.record.machine,
            **(self._told() or self._seen()),
            "at_ms": int(time.time() * 1000),
        }
        self.suspended = False
        try:
            self._file.write({"exit": self.exit})
        except OSError:  # a full disk: it is told all the same
            traceback.print_exc()
        try:
            self.clear()
        except OSError:  # whoever destroys it meets the same, and is told
            traceback.print_exc()
        return self.exit

    def _told(self) -> dict[str, Any] | None:
        """How it says that it ended. None when it says nothing: it was not asked to, or had no time."""
        told = last_words(self.path + STATUS) if self.record.status else None
        return told and {**told, "oom_killed": told["oom_killed"] or self.oom}

    def _seen(self) -> dict[str, Any]:
        """How its parent saw it end."""
        status = self.status
        silent = self.record.status and status is not None and status >= 0
        if silent:
            error = f"it ended with exit code {status} before it said how"
        else:
            error = "" if status is not None else "the exit status was lost with an earlier supervisor"
        return {
            "code": status if status is not None and status >= 0 and not silent else None,
            "signal": -status if status is not None and status < 0 else None,
            "oom_killed": self.oom,
            "error": error,
        }

    def learn_status(self) -> bool:
        """Ask the kernel for the status of a program that was not our child. True once there is no more to learn."""
        if self.status is None and self.adopted_fd >= 0:
            try:
                self.status = proc.exit_status(self.adopted_fd)
            except OSError:
                return True
            return self.status is not None
        return True

    def note_oom(self) -> None:
        """Read the group's count of kills for want of memory; it is gone with the group."""
        if self._groups:
            self.oom = self._groups.oom_kills(self.record.group) > 0

    def lost_group(self) -> None:
        self.group_gone = True

    def clear(self) -> None:
        """Remove what only a running one needs. May be repeated."""
        _remove(self.path + STATUS)

    def destroy(self) -> None:
        """Forget it. Only once it has ended."""
        self.clear()
        self._file.remove()

    def shown(self) -> dict[str, Any]:
        """As the driver's `Instance`."""
        return {
            "key": self.record.key,
            "machine": self.record.machine,
            "pid": None if self.exit else self.record.pid,
            "started_at_ms": self.record.started_at_ms,
            "suspended": self.suspended,
            "exit": self.exit,
            "note": self.record.note,
        }


def _begin(terminal: bool, user: int | None) -> None:
    """In the child."""
    if terminal:
        take_terminal()
    if user is not None:
        become(user)


def remove_empty(directory: str) -> None:
    """Unless somebody has put something into it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def group_of(machine: str, key: str) -> str:
    """The name of an instance's cgroup."""
    return f"{machine}.{key.rpartition('/')[0][-10:]}"
