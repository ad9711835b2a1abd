"""How a program comes to run: with its pipes, in its group; at once, or as a process that waits at a gate.

What waits has its record already: whoever takes over after a supervisor that was killed tells by its pipe's name
whether it was let go (`hawker.supervisor.gates`), and then has what runs as if the order had been carried out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.cgroups import Limits
from hawker.supervisor.common import Common
from hawker.supervisor.confined import Confinement
from hawker.supervisor.disks import disks_of
from hawker.supervisor.gates import Gate, Gone
from hawker.supervisor.instance import STREAMS, Instance, Record, group_of, remove_empty
from hawker.supervisor.output import Pipe
from hawker.supervisor.programs import CannotStart, Launch, spawn, which
from hawker.supervisor.protocol import RELEASE
from hawker.supervisor.users import give, refusal
from hawker.supervisor.words import STATUS


def start(
    *,
    key: str,
    machine: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    limits: Limits,
    common: Common,
    cwd: str = "",
    users: int | None = None,
    status: bool = False,
    confinement: Confinement | None = None,
    note: dict[str, Any] | None = None,
) -> Instance:
    """Spawn, in the machine's working directory unless `cwd` says where, as a user of its own among those from `users`
    on. Raises `CannotStart`. `note` is kept.

    With `status`, `{status}` in its arguments becomes the number of the descriptor to tell its end by, and so do the
    names of what it is handed with a `confinement`. What tells its end is our own program, which runs the machine's as
    its user, `{user}`.
    """
    program = which(argv[0], env.get("PATH", os.defpath))
    making = _Making(key, machine, common, users)
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
            making.group(limits, cwd)
            launch = Launch(
                program,
                argv,
                making.environment(env),
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
    instance = making.instance(pid, now.start if now else 0, status=status, note=note or {})
    instance.begin()
    return instance


def wait_in_front(
    gate: Gate,
    *,
    key: str,
    machine: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    limits: Limits,
    common: Common,
    cwd: str = "",
    users: int | None = None,
    note: dict[str, Any] | None = None,
) -> Instance:
    """Have what waits at a gate be ready to become this program. It is recorded as that: let it go, or `forsake` it.
    Raises `CannotStart`, and `Gone`."""
    program = which(argv[0], env.get("PATH", os.defpath))
    making = _Making(key, machine, common, users)
    with making.or_nothing(argv[0]):
        making.pipe()
        making.group(limits, cwd)
        instance = making.instance(gate.pid, gate.start_ticks, waits=True, fresh=making.fresh, note=note or {})
        instance.write_down()
        where, user = cwd or making.place, making.user
        launch = Launch(program, argv, making.environment(env), cwd=where, output=(-1, -1), user=user)
        entrances = common.groups.entrances(making.name) if common.groups else ()
        gate.tell(launch, [pipe.path for pipe in making.pipes], entrances, making.path + RELEASE)
    return instance


class _Making:
    """What a program finds when it begins."""

    def __init__(self, key: str, machine: str, common: Common, users: int | None) -> None:
        files = common.files
        self.path, self.work = files.instance(key), files.work(machine)
        self.place = files.work(machine)
        self.name = group_of(machine, key) if common.groups else ""
        self.pipes: list[Pipe] = []
        self.fresh = False
        self.user: int | None = None
        self._key, self._machine, self._users = key, machine, users
        self._common = common
        self._mark = common.mark(machine, key)
        self._instance: Instance | None = None

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, proc.MARKER: self._mark}

    @contextlib.contextmanager
    def or_nothing(self, program: str) -> Iterator[None]:
        """What fails leaves nothing but a group."""
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
        """Its directory, its user, and where its output goes."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.work, 0o700)
            self.fresh = True
        if self._users is not None:
            self.user = self._common.files.owners.of(self._machine, self._users)
            self.place = self._common.place(self._machine, self.user)
        for stream in STREAMS:
            self.pipes.append(Pipe(f"{self.path}.{stream}", stream[0], self._key))
        give((pipe.fd for pipe in self.pipes), self.user)

    def group(self, limits: Limits, cwd: str) -> None:
        if self._common.groups:
            self._common.groups.create(self.name, limits, disks_of({self.work, cwd or self.work}))

    def instance(self, pid: int, start_ticks: int, **more: Any) -> Instance:
        record = Record(
            key=self._key,
            machine=self._machine,
            pid=pid,
            start_ticks=start_ticks,
            started_at_ms=int(time.time() * 1000),
            group=self.name,
            user=self.user,
            **more,
        )
        instance = self._instance = self._common.instance(record)
        instance.pipes = self.pipes
        return instance


def _numbered(word: str, descriptors: Mapping[str, int]) -> str:
    for name, number in descriptors.items():
        word = word.replace(f"{{{name}}}", str(number))
    return word
