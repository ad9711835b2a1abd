"""Where a supervisor keeps what: the machines' own files on disk, what ends with the host in memory.

Under the supervisor's directory: `work/<machine>/`, the program's working directory, and `logs/<machine>`, its output,
whose end `old-logs` keeps for a while (`hawker.supervisor.old_logs`).
`run` is for what a reboot makes worthless anyway, a record and two named pipes of each instance. Creating a file
costs 0.02 to 0.5 ms on a disk and 0.005 ms in memory, and every start creates three: so for root `run` is a symbolic
link into a file system in memory. Others keep it on disk: what lies in memory of theirs may go when they log out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from hawker.supervisor import old_logs, ordinary
from hawker.supervisor.output import FILES
from hawker.supervisor.users import Owners

IN_MEMORY = ("/run", "/dev/shm")  # the first of these that is a tmpfs


class Files:
    """The paths of one supervisor. Makes its directories. `memory` is a directory in memory to use, "" for none."""

    def __init__(self, directory: str, memory: str) -> None:
        self.directory = directory
        for path in (f"{directory}/work", f"{directory}/logs", old_logs.place(directory)):
            os.makedirs(path, mode=0o700, exist_ok=True)
        self.owners = Owners(f"{directory}/work")
        self._run = f"{directory}/run"
        self._take_up_move()
        if os.path.islink(self._run) and not self._ours():
            os.unlink(self._run)
        if memory and not os.path.islink(self._run):
            self._into_memory(memory)
        os.makedirs(self._run, mode=0o700, exist_ok=True)

    def work(self, machine: str) -> str:
        return os.path.join(self.directory, "work", machine)

    @property
    def shown(self) -> str:
        """Where programs that are users of their own see the directory of all working directories, once it is shown
        there: the way to ours may be closed to them. "" where there is no such place."""
        return f"{os.path.realpath(self._run)}/{SHOWN}" if os.path.islink(self._run) else ""

    def log(self, machine: str) -> str:
        """The newest file; older ones have `.1`, `.2` behind it."""
        return f"{self.directory}/logs/{machine}"

    def instance(self, key: str) -> str:
        """What the names of an instance's files begin with."""
        return f"{self._run}/{key.replace('/', '.')}"

    def recorded(self) -> Iterator[str]:
        """`instance(...)` of all that have a record."""
        for name in _records(self._run):
            yield f"{self._run}/{name.removesuffix(RECORD)}"

    def directories(self) -> list[str]:
        """The directories of containers, whether the containers have a record or not."""
        run = os.path.realpath(self._run)
        return [f"{run}/{name}" for name in os.listdir(run) if name.endswith(DIRECTORY)]

    def remove_unrecorded(self) -> None:
        """Remove what is there of instances that have no record."""
        recorded = {os.path.basename(path) for path in self.recorded()}
        for name in os.listdir(self._run):
            if name.rpartition(".")[0] not in recorded and not name.endswith(DIRECTORY):
                with contextlib.suppress(IsADirectoryError):  # not ours
                    os.unlink(f"{self._run}/{name}")

    def purge_log(self, machine: str) -> None:
        """Remove all that a machine wrote out but its last words."""
        log = self.log(machine)
        logs = [log, *(f"{log}.{number}" for number in range(1, FILES))]
        old_logs.retire(self.directory, machine, logs)
        for path in logs:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Bring what is left from memory to the disk: records of programs that have ended and nobody has heard of."""
        if os.path.islink(self._run):
            memory = os.path.realpath(self._run)
            _copy_records(memory, f"{self._run}.new")
            os.rename(f"{self._run}.new", f"{self._run}.kept")
            os.unlink(self._run)
            os.rename(f"{self._run}.kept", self._run)
            shutil.rmtree(memory, ignore_errors=True)

    def _ours(self) -> bool:
        """Check who owns the target: the link outlives a reboot, which empties the memory, and then somebody else may
        own what it points to."""
        try:
            return os.stat(self._run).st_uid == os.geteuid()
        except FileNotFoundError:
            return False

    def _take_up_move(self) -> None:
        """Finish a move that a kill cut off: what is whole has the name `run`, or else `run.kept`."""
        if os.path.lexists(self._run):
            shutil.rmtree(f"{self._run}.kept", ignore_errors=True)
        elif os.path.isdir(f"{self._run}.kept"):
            os.rename(f"{self._run}.kept", self._run)
        if os.path.islink(f"{self._run}.new"):
            os.unlink(f"{self._run}.new")
        shutil.rmtree(f"{self._run}.new", ignore_errors=True)

    def _into_memory(self, memory: str) -> None:
        there = os.path.isdir(self._run)
        if there and any(not name.endswith(RECORD) for name in os.listdir(self._run)):
            return  # programs that run have their pipes here
        target = tempfile.mkdtemp(prefix="hawker-", dir=memory)
        os.chmod(target, 0o711)  # the root of a container with users of its own has to find its place in it
        if there:
            _copy_records(self._run, target)
        os.symlink(target, f"{self._run}.new")
        if there:
            os.rename(self._run, f"{self._run}.kept")
        os.rename(f"{self._run}.new", self._run)
        shutil.rmtree(f"{self._run}.kept", ignore_errors=True)


def _records(directory: str) -> list[str]:
    """Names of records. An empty one is of a start that a kill cut off."""
    return [n for n in os.listdir(directory) if n.endswith(RECORD) and os.path.getsize(f"{directory}/{n}")]


def _copy_records(source: str, target: str) -> None:
    os.makedirs(target, mode=0o700, exist_ok=True)
    for name in _records(source):
        shutil.copy(f"{source}/{name}", f"{target}/{name}")


RECORD = ".record"
DIRECTORY = ".d"
SHOWN = "work"


class RecordFile:
    """What is known of an instance: a JSON object a line, later fields win.

    Appended to, so that it is whole after a kill at any moment. Not synced: a power cut ends the programs, too.
    """

    def __init__(self, instance: str) -> None:
        self._path = instance + RECORD

    def write(self, fields: dict[str, Any]) -> None:
        """Raises OSError; what is there of the line is not read then."""
        line = b"\n" + json.dumps(fields).encode() + b"\n"  # begun anew: a full disk may have cut the one before off
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        finally:
            os.close(fd)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def read(self) -> dict[str, Any]:
        """Empty when there is none."""
        known: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # an empty line, or one that was cut off
                    if isinstance(said := json.loads(line), dict):
                        known |= said
        return known


def in_memory() -> str:
    """A directory for what may be lost at a reboot, "" where there is none or it may be lost earlier."""
    if os.geteuid() != 0 or ordinary.inside():
        return ""
    with open("/proc/self/mounts") as file:
        mounted = {target: kind for _, target, kind, *_ in map(str.split, file)}
    return next((path for path in IN_MEMORY if mounted.get(path) == "tmpfs" and os.access(path, os.W_OK)), "")
