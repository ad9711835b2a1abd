"""Where a supervisor keeps what: the machines' own files on disk, what ends with the host in memory.

Under the supervisor's directory: `work/<machine>/`, the program's working directory, and `logs/<machine>`, its output.
`run` is for what a reboot makes worthless anyway, a record and two named pipes of each instance. Creating a file
costs 0.02 to 0.5 ms on a disk and 0.005 ms in memory, and every start creates three: so for root `run` is a symbolic
link into a file system in memory. Others keep it on disk: what lies in memory of theirs may go when they log out.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

IN_MEMORY = ("/run", "/dev/shm")  # the first of these that is a tmpfs


class Files:
    """The paths of one supervisor. Makes its directories. `memory` is a directory in memory to use, "" for none."""

    def __init__(self, directory: str, memory: str) -> None:
        self.directory = directory
        for name in ("work", "logs"):
            os.makedirs(f"{directory}/{name}", mode=0o700, exist_ok=True)
        self._run = f"{directory}/run"
        if os.path.islink(self._run) and not self._ours():
            os.unlink(self._run)
        if memory and not os.path.islink(self._run):
            self._into_memory(memory)
        os.makedirs(self._run, mode=0o700, exist_ok=True)

    def work(self, machine: str) -> str:
        return os.path.join(self.directory, "work", machine)

    def log(self, machine: str) -> str:
        """The newest file; older ones have `.1`, `.2` behind it."""
        return f"{self.directory}/logs/{machine}"

    def instance(self, key: str) -> str:
        """What the names of an instance's files begin with."""
        return f"{self._run}/{key.replace('/', '.')}"

    def recorded(self) -> Iterator[str]:
        """`instance(...)` of all that have a record."""
        for name in os.listdir(self._run):
            if name.endswith(RECORD):
                yield f"{self._run}/{name.removesuffix(RECORD)}"

    def remove_unrecorded(self) -> None:
        """Remove the pipes of instances that have no record."""
        recorded = {os.path.basename(path) for path in self.recorded()}
        for name in os.listdir(self._run):
            if name.rpartition(".")[0] not in recorded:
                os.unlink(f"{self._run}/{name}")

    def purge(self, machine: str) -> None:
        """Remove a machine's own files."""
        work = self.work(machine)
        try:
            os.rmdir(work)
        except FileNotFoundError:
            pass
        except OSError:  # not empty
            shutil.rmtree(work, ignore_errors=True)
        number = 0
        log = self.log(machine)
        while True:
            try:
                os.unlink(f"{log}.{number}" if number else log)
            except FileNotFoundError:
                return
            number += 1

    def close(self) -> None:
        """Bring what is left from memory to the disk: records of programs that have ended and nobody has heard of."""
        if os.path.islink(self._run):
            memory = os.path.realpath(self._run)
            os.unlink(self._run)
            os.mkdir(self._run, 0o700)
            _move_all(memory, self._run)

    def _ours(self) -> bool:
        """A link outlives the reboot that empties the memory, and then somebody else may own what it points to."""
        try:
            return os.stat(self._run).st_uid == os.geteuid()
        except FileNotFoundError:
            return False

    def _into_memory(self, memory: str) -> None:
        if os.path.isdir(self._run):
            if any(not name.endswith(RECORD) for name in os.listdir(self._run)):
                return  # programs that run have their pipes here
        else:
            os.mkdir(self._run, 0o700)
        target = tempfile.mkdtemp(prefix="hawker-", dir=memory)
        _move_all(self._run, target)
        os.symlink(target, self._run)


def _move_all(source: str, target: str) -> None:
    """Records only: pipes cannot be moved."""
    for name in os.listdir(source):
        shutil.move(f"{source}/{name}", f"{target}/{name}")
    os.rmdir(source)


RECORD = ".record"


class RecordFile:
    """What is known of an instance: a JSON object a line, later fields win.

    Appended to, so that it is whole after a kill at any moment. Not synced: a power cut ends the programs, too.
    """

    def __init__(self, instance: str) -> None:
        self._path = instance + RECORD

    def write(self, fields: dict[str, Any]) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(fields).encode() + b"\n")
        finally:
            os.close(fd)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def read(self) -> dict[str, Any]:
        """Empty when there is none."""
        known: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    known |= json.loads(line)
        return known


def in_memory() -> str:
    """A directory for what may be lost at a reboot, "" where there is none or it may be lost earlier."""
    if os.geteuid() != 0:
        return ""
    with open("/proc/self/mounts") as file:
        mounted = {target: kind for _, target, kind, *_ in map(str.split, file)}
    return next((path for path in IN_MEMORY if mounted.get(path) == "tmpfs" and os.access(path, os.W_OK)), "")
