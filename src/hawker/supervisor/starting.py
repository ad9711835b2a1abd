"""How a program comes to run: with its pipes, in its control group; at once, or prespawned behind a start gate.

A prespawned process has its record already. After a supervisor was killed, the next one tells by the name of the gate's
pipe whether the process was released (`hawker.supervisor.standby`); a released one counts as started.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.calls import Start
from hawker.supervisor.common import Common
from hawker.supervisor.confined import Confinement
from hawker.supervisor.disks import disks_of
from hawker.supervisor.instance import STREAMS, Instance, Record, group_of, remove_empty
from hawker.supervisor.output import Pipe
from hawker.supervisor.programs import CannotStart, Launch, spawn, which
from hawker.supervisor.protocol import GATE
from hawker.supervisor.standby import Gone, StartGate
from hawker.supervisor.status_file import STATUS
from hawker.supervisor.users import give, refusal


def start(request: Start, common: Common, confinement: Confinement | None) -> Instance:
    """Spawn the program. Raises `CannotStart`.

    With a `confinement`, the names of what it hands over stand for their descriptors in the arguments, as `{status}`
    does. A program that tells its end is our own: it runs the machine's as its user, `{user}`.
    """
    argv, cwd, status = list(request.argv), request.cwd, request.status
    program = which(argv[0], request.env.get("PATH", os.defpath))
    making = _Making(request, common)
    ends: list[int] = []
    inherited: dict[str, int] = {}
    with making.or_nothing(argv[0]):
        try:
            making.pipe()
            ends += [pipe.open_for_child() for pipe in making.pipes]
            if status:
                ends.append(os.open(making.path + STATUS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
                inherited["status"] = ends[-1]
            if confinement:
                give(ends, confinement.user)
                inherited |= confinement.open(cwd or making.work)
                ends += [fd for fd in inherited.values() if fd not in ends]
            numbers = inherited if making.user is None else {**inherited, "user": making.user}
            own = argv.index("--") if "--" in argv else len(argv)  # what follows is another program's
            argv = [_numbered(word, numbers) if n < own else word for n, word in enumerate(argv)]
            making.group()
            launch = Launch(
                program,
                argv,
                making.environment(),
                cwd=cwd or making.place,
                output=(ends[0], ends[1]),
                kept=list(inherited.values()),
                user=None if status else making.user,
            )
            groups = common.groups
            with groups.entered(making.name) if groups else contextlib.nullcontext():
                pid = confinement.spawn(launch) if confinement else spawn(launch)
        finally:
            for fd in ends:
                os.close(fd)
    now = proc.stat(pid)
    instance = making.instance(pid, now.start if now else 0, status=status)
    instance.begin()
    return instance


def prespawn(request: Start, gate: StartGate, common: Common) -> Instance:
    """Have a standby process be ready to become this program. It is recorded as that: open its gate, or `forsake` the
    instance. Raises `CannotStart`, and `Gone`."""
    program = which(request.argv[0], request.env.get("PATH", os.defpath))
    making = _Making(request, common)
    with making.or_nothing(request.argv[0]):
        making.pipe()
        making.group()
        instance = making.instance(gate.pid, gate.start_ticks, waits=True, fresh=making.fresh)
        instance.write_down()
        where, user = request.cwd or making.place, making.user
        launch = Launch(program, request.argv, making.environment(), cwd=where, output=(-1, -1), user=user)
        entrances = common.groups.entrances(making.name) if common.groups else ()
        gate.tell(launch, [pipe.path for pipe in making.pipes], entrances, making.path + GATE)
    return instance


class _Making:
    """Prepares what a program finds when it begins."""

    def __init__(self, request: Start, common: Common) -> None:
        key, machine, files = request.key, request.machine, common.files
        self.path, self.work = files.instance(key), files.work(machine)
        self.place = files.work(machine)
        self.name = group_of(machine, key) if common.groups else ""
        self.pipes: list[Pipe] = []
        self.fresh = False
        self.user: int | None = None
        self._request = request
        self._common = common
        self._mark = common.mark(machine, key)
        self._instance: Instance | None = None

    def environment(self) -> dict[str, str]:
        return {**self._request.env, proc.MARKER: self._mark}

    @contextlib.contextmanager
    def or_nothing(self, program: str) -> Iterator[None]:
        """Undo everything but the control group when the start fails."""
        try:
            yield
        except (OSError, ValueError, Gone) as error:
            for pipe in self.pipes:
                pipe.remove()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path + STATUS)
            if self._instance:
                self._instance.destroy()
            if self.fresh:
                remove_empty(self.work)
            if isinstance(error, Gone):
                raise
            raise CannotStart(f"{program}: cannot be started: {refusal(error, self.user)}") from error

    def pipe(self) -> None:
        """Make its directory, choose its user, and open the pipes of its output."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.work, 0o700)
            self.fresh = True
        if self._request.users is not None:
            self.user = self._common.files.owners.of(self._request.machine, self._request.users)
            self.place = self._common.place(self._request.machine, self.user)
        for stream in STREAMS:
            self.pipes.append(Pipe(f"{self.path}.{stream}", stream[0], self._request.key))
        give((pipe.fd for pipe in self.pipes), self.user)

    def group(self) -> None:
        if self._common.groups:
            disks = disks_of({self.work, self._request.cwd or self.work})
            self._common.groups.create(self.name, self._request.limits, disks)

    def instance(self, pid: int, start_ticks: int, **more: Any) -> Instance:
        record = Record(
            key=self._request.key,
            machine=self._request.machine,
            pid=pid,
            start_ticks=start_ticks,
            started_at_ms=int(time.time() * 1000),
            group=self.name,
            user=self.user,
            note=dict(self._request.note),
            **more,
        )
        instance = self._instance = self._common.instance(record)
        instance.pipes = self.pipes
        return instance


def _numbered(word: str, descriptors: Mapping[str, int]) -> str:
    for name, number in descriptors.items():
        word = word.replace(f"{{{name}}}", str(number))
    return word
