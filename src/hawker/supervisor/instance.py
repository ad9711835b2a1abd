"""One program's life: spawned into its group with its pipes, watched, killed to the last process, its end recorded.

Everything a new supervisor needs to take over is in files: the record, appended to before anyone is told, and the
pipes `out` and `err` (see `hawker.supervisor.files`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat as stats
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.cgroups import Groups, Limits
from hawker.supervisor.files import Files, RecordFile
from hawker.supervisor.output import MachineLog, Pipe

STREAMS = ("out", "err")


class CannotStart(Exception):
    """The program cannot be started; nothing is left of the attempt but its group, if it was made."""


@dataclass(frozen=True)
class Record:
    """How it was started. `group` is the cgroup's name, "" without cgroups; `start_ticks` tells a reused pid."""

    key: str
    machine: str
    pid: int
    start_ticks: int
    started_at_ms: int
    group: str


class Instance:
    """A program that runs or ran. `exit` is None while it runs."""

    def __init__(self, record: Record, files: Files, mark: str, groups: Groups | None) -> None:
        self.record = record
        self.work = files.work(record.machine)
        self.mark = mark
        self.suspended = False
        self.exit: dict[str, Any] | None = None
        self.adopted_fd = -1  # a pidfd when we are not the parent
        self._leader = record.pid  # -1 once that number may be another process's
        self.main_ended = False
        self.ended_at_s = 0.0  # monotonic
        self.status: int | None = None  # of waitid: the exit code, or minus the signal
        self.oom = False
        self.pipes: list[Pipe] = []
        self.log = MachineLog(files.log(record.machine))
        self._path = files.instance(record.key)
        self._file = RecordFile(self._path)
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
    ) -> Instance:
        """Spawn. Raises `CannotStart`."""
        program = which(argv[0], env.get("PATH", os.defpath))
        path, work = files.instance(key), files.work(machine)
        group = group_of(machine, key) if groups else ""
        pipes: list[Pipe] = []
        ends: list[int] = []
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(work, 0o700)
            for stream in STREAMS:
                pipes.append(Pipe(f"{path}.{stream}", stream[0], key))
                ends.append(pipes[-1].open_for_child())
            if groups:
                groups.create(group, limits)
            with groups.entered(group) if groups else contextlib.nullcontext():
                child = subprocess.Popen(
                    argv,
                    executable=program,
                    env={**env, proc.MARKER: mark},
                    cwd=work,
                    stdin=subprocess.DEVNULL,
                    stdout=ends[0],
                    stderr=ends[1],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            for pipe in pipes:
                pipe.remove()
            raise CannotStart(f"{argv[0]}: cannot be started: {error}") from error
        finally:
            for fd in ends:
                os.close(fd)
        child.returncode = 0  # reaped by the loop's waitid, not by subprocess
        try:
            now = proc.stat(child.pid)
            record = Record(
                key=key,
                machine=machine,
                pid=child.pid,
                start_ticks=now.start if now else 0,
                started_at_ms=int(time.time() * 1000),
                group=group,
            )
            instance = cls(record, files, mark, groups)
            instance._file.write(asdict(record))
        except OSError as error:  # nobody would know of it
            os.killpg(child.pid, signal.SIGKILL)
            for pipe in pipes:
                pipe.remove()
            RecordFile(path).remove()
            raise CannotStart(f"{argv[0]}: cannot be recorded: {error}") from error
        instance.pipes = pipes
        return instance

    @classmethod
    def recover(cls, path: str, files: Files, mark_of: Any, groups: Groups | None) -> Instance | None:
        """Take over what an earlier supervisor recorded at `path`. None when it was killed before it had."""
        known = RecordFile(path).read()
        if not known:
            return None
        suspended, ended = known.pop("suspended", False), known.pop("exit", None)
        record = Record(**known)
        instance = cls(record, files, mark_of(record.machine, record.key), groups)
        instance.exit = ended
        if ended is None:
            instance.suspended = suspended
            instance.adopt()
        return instance

    def adopt(self) -> None:
        """Watch a program whose parent is gone. One that ended meanwhile is found ended, its status lost."""
        self.pipes = [Pipe(f"{self._path}.{stream}", stream[0], self.record.key) for stream in STREAMS]
        self.adopted_fd = proc.open_pidfd(self.record.pid, self.record.start_ticks)
        if self.adopted_fd < 0:
            self.main_ended = True
            self._leader = -1

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

    def attach(self, pid: int) -> None:
        """Bring a command run beside the program into its group."""
        if self._groups:
            self._groups.attach(self.record.group, pid)

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
        status = self.status
        self.exit = {
            "key": self.record.key,
            "machine": self.record.machine,
            "code": status if status is not None and status >= 0 else None,
            "signal": -status if status is not None and status < 0 else None,
            "oom_killed": self.oom,
            "error": "" if status is not None else "the exit status was lost with an earlier supervisor",
            "at_ms": int(time.time() * 1000),
        }
        self.suspended = False
        try:
            self._file.write({"exit": self.exit})
        except OSError:  # a full disk: it is told all the same
            traceback.print_exc()
        self._remove_group()
        return self.exit

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

    def destroy(self) -> None:
        """Forget it. Only once it has ended."""
        self._remove_group()
        self._file.remove()

    def _remove_group(self) -> None:
        if self._groups:
            with contextlib.suppress(OSError):  # a dying process may hold it a moment longer; destroy tries again
                self._groups.remove(self.record.group)

    def shown(self) -> dict[str, Any]:
        """As the driver's `Instance`."""
        return {
            "key": self.record.key,
            "machine": self.record.machine,
            "pid": None if self.exit else self.record.pid,
            "started_at_ms": self.record.started_at_ms,
            "suspended": self.suspended,
            "exit": self.exit,
        }


def group_of(machine: str, key: str) -> str:
    """The name of an instance's cgroup."""
    return f"{machine}.{key.rpartition('/')[0][-10:]}"


def which(program: str, path: str) -> str:
    """The program's file, looked up in `path` unless it has a slash. Raises `CannotStart` with what is wrong."""
    names = [program] if "/" in program else [f"{d or '.'}/{program}" for d in path.split(":")]
    for name in names:
        with contextlib.suppress(OSError):
            mode = os.stat(name).st_mode
            if stats.S_ISREG(mode) and os.access(name, os.X_OK):
                return name
            if "/" in program:
                raise CannotStart(f"{program}: not an executable file")
    raise CannotStart(f"{program}: not found" + ("" if "/" in program else f" in PATH ({path})"))
