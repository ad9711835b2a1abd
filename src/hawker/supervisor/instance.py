"""One program's life: spawned into its group with its pipes, watched, killed to the last process, its end recorded.

Everything a new supervisor needs to take over is in files: the record, appended to before anyone is told, and the
pipes `out` and `err` (see `hawker.supervisor.files`).

A program may itself know better than the kernel how it ended, or what ran inside it: one that is started with `status`
gets a descriptor of a file to tell it by (see `hawker.supervisor.words`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.cgroups import CannotResize, Groups, Limits
from hawker.supervisor.confined import Confinement
from hawker.supervisor.disks import disks_of
from hawker.supervisor.files import Files, RecordFile
from hawker.supervisor.output import MachineLog, Pipe
from hawker.supervisor.programs import CannotStart, Gate, Invocation, Launch, open_terminal, spawn, take_terminal, which
from hawker.supervisor.words import STATUS, last_words

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
    kind: str = PROCESS
    note: dict[str, Any] = field(default_factory=dict)  # the daemon's own
    made_of: dict[str, Any] = field(default_factory=dict)  # of its kind


class Instance:
    """A program that runs or ran. `exit` is None while it runs."""

    def __init__(self, record: Record, files: Files, mark: str, groups: Groups | None) -> None:
        self.record = record
        self.work = files.work(record.machine)
        self.log = MachineLog(files.log(record.machine))
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
        self.pipes: list[Pipe] = []
        self.gate: Gate | None = None  # while it waits to become its program
        self.path = files.instance(record.key)
        self._file = RecordFile(self.path)
        self._groups = groups if record.group else None

    # --- starting and taking over ------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        *,
        key: str,
        machine: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        limits: Limits,
        files: Files,
        mark: str,
        groups: Groups | None,
        cwd: str = "",
        status: bool = False,
        confinement: Confinement | None = None,
        hold: str = "",
    ) -> Instance:
        """Spawn, in the machine's working directory unless `cwd` says where. Raises `CannotStart`.

        With `status`, `{status}` in its arguments becomes the number of the descriptor to tell its end by, and so do
        the names of what it is handed with a `confinement`.

        With `hold`, the file of what waits in front of a program, it is not written down yet and does not run its
        program before `begin`; it ends with this process, or at `forsake`.
        """
        program = which(argv[0], env.get("PATH", os.defpath))
        path, work = files.instance(key), files.work(machine)
        group = group_of(machine, key) if groups else ""
        pipes: list[Pipe] = []
        ends: list[int] = []
        inherited: dict[str, int] = {}
        gate: Gate | None = None
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(work, 0o700)
            for stream in STREAMS:
                pipes.append(Pipe(f"{path}.{stream}", stream[0], key))
                ends.append(pipes[-1].open_for_child())
            if status:
                ends.append(os.open(path + STATUS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
                inherited["status"] = ends[-1]
            if confinement:
                confinement.give(ends)
                inherited |= confinement.open(cwd or work)
                ends += [fd for fd in inherited.values() if fd not in ends]
            own = argv.index("--") if "--" in argv else len(argv)  # what follows is another program's
            argv = [_numbered(word, inherited) if n < own else word for n, word in enumerate(argv)]
            if groups:
                groups.create(group, limits, disks_of({work, cwd or work}))
            launch = Launch(
                program,
                argv,
                {**env, proc.MARKER: mark},
                cwd=cwd or work,
                output=(ends[0], ends[1]),
                kept=list(inherited.values()),
            )
            if hold:
                gate = Gate(hold, program)
                launch = gate.before(launch, groups.entrances(group) if groups else ())
            with groups.entered(group) if groups and not hold else contextlib.nullcontext():
                pid = confinement.spawn(launch) if confinement else spawn(launch)
        except (OSError, ValueError) as error:
            for pipe in pipes:
                pipe.remove()
            _remove(path + STATUS)
            if gate:
                gate.close()
            raise CannotStart(f"{argv[0]}: cannot be started: {error}") from error
        finally:
            for fd in ends:
                os.close(fd)
            if gate:
                gate.spawned()
        now = proc.stat(pid)
        record = Record(
            key=key,
            machine=machine,
            pid=pid,
            start_ticks=now.start if now else 0,
            started_at_ms=int(time.time() * 1000),
            group=group,
            status=status,
        )
        instance = cls(record, files, mark, groups)
        instance.pipes, instance.gate = pipes, gate
        if gate is None:
            instance.begin()
        return instance

    def begin(self) -> None:
        """Have it known from now on, and run its program where it waits for that. Raises `CannotStart`, and `Gone` when
        it has ended while it waited: `forsake` it then."""
        gate = self.gate
        try:
            if gate:
                gate.open()
                self.record = replace(self.record, started_at_ms=int(time.time() * 1000))
            try:
                self.write_down()  # the kernel starts the program meanwhile
            except OSError as error:  # nobody would know of it
                raise CannotStart(f"machine {self.record.machine}: cannot be recorded: {error}") from error
            if gate:
                gate.passed()
                gate.close()
                self.gate = None
        except (CannotStart, OSError) as error:
            self.forsake()
            if isinstance(error, CannotStart):
                raise
            raise CannotStart(f"{error.filename}: cannot be started: {error}") from error

    def forsake(self) -> None:
        """Kill what has not begun, and leave nothing of it but its group."""
        if not self.main_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.record.pid, signal.SIGKILL)
        if self.gate:
            self.gate.close()
            self.gate = None
        for pipe in self.pipes:
            pipe.remove()
        self.pipes = []
        _remove(self.path + STATUS)
        self._file.remove()

    def write_down(self) -> None:
        """From now on it is taken over by the next supervisor. Raises OSError."""
        self._file.write(asdict(self.record))

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
        try:
            with self.outside():
                child = subprocess.Popen(
                    argv,
                    executable=program,
                    env=env,
                    cwd=self.work,
                    stdin=ends[0],
                    stdout=ends[1],
                    stderr=ends[2],
                    start_new_session=True,
                    preexec_fn=take_terminal if terminal else None,
                )
        except BaseException:
            if terminal:
                os.close(master)
            raise
        finally:
            if terminal:
                os.close(slave)
        child.returncode = 0  # reaped by the loop's waitid
        if self._groups:  # not by entering: the group may be at its memory limit
            self._groups.attach(self.record.group, child.pid)
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
        self.drain(last=True)
        for pipe in self.pipes:
            pipe.remove()
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
        self.clear()
        return self.exit

    def _told(self) -> dict[str, Any] | None:
        """How it ended in its own words. None when it has none: it was not asked, or had no time to say."""
        told = last_words(self.path + STATUS) if self.record.status else None
        return told and {**told, "oom_killed": told["oom_killed"] or self.oom}

    def _seen(self) -> dict[str, Any]:
        """How it ended as its parent sees it."""
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


def _numbered(word: str, descriptors: Mapping[str, int]) -> str:
    for name, number in descriptors.items():
        word = word.replace(f"{{{name}}}", str(number))
    return word


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def group_of(machine: str, key: str) -> str:
    """The name of an instance's cgroup."""
    return f"{machine}.{key.rpartition('/')[0][-10:]}"
