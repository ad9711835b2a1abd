"""A container: an instance whose first process was made by an OCI runtime, and is our child once the runtime has ended.

What it needs as long as it runs is in `<instance>.d`, beside its record: `config.json`, `files/` shown inside, `state/`
of the runtime. Its root file system is mounted in the supervisor's own mount namespace while the runtime works, and
then in the container's alone. The runtime is not asked for anything later but to run commands in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any, Final

from hawker.supervisor import mounts, proc
from hawker.supervisor.children import Children
from hawker.supervisor.files import DIRECTORY
from hawker.supervisor.instance import Beside, Instance, Record
from hawker.supervisor.programs import Invocation
from hawker.supervisor.roots import Root, Roots

ID: Final = "c"  # every container has a state directory of its own, so the runtime's name for it may be the same
CONTAINER: Final = "container"
_numbers = count()


class Container(Instance):
    """`record.made_of` has `runtime`, the program's path, and `root`, the fields of a `Root`."""

    roots: Roots
    children: Children

    @property
    def directory(self) -> str:
        return directory_of(self.path)

    @property
    def root(self) -> Root:
        return Root(**self.record.made_of["root"])

    def members(self) -> list[int]:
        """Without control groups these are all processes of its namespace, which end before its first one does."""
        if self.grouped:
            return super().members()
        return [] if self.main_ended else proc.in_namespace_of(self.record.pid)

    def describe(self) -> list[dict[str, Any]]:
        return proc.describe(self.members(), inside=self.record.pid)

    def clear(self) -> None:
        super().clear()
        clear_directory(self.directory)
        self.roots.drop(self.root)

    def run_beside(self, invocation: Invocation, done: Beside) -> None:
        with open(f"{self.directory}/config.json") as file:
            process: dict[str, Any] = json.load(file)["process"]
        terminal = invocation.terminal
        env = invocation.environment(dict(entry.split("=", 1) for entry in process.get("env", [])))
        process["args"] = list(invocation.argv)
        process["env"] = [f"{name}={value}" for name, value in env.items()]
        process["terminal"] = bool(terminal)
        path = f"{self.directory}/beside-{next(_numbers)}"
        _remove_all(path)  # of a supervisor that was killed
        command = ["exec", "--detach", "--process", f"{path}.json", "--pid-file", f"{path}.pid"]
        listener = None
        if terminal:
            process["consoleSize"] = {"width": terminal[0], "height": terminal[1]}
            # A socket's name has 108 bytes at most, and the runtime has our working directory.
            where = min(f"{path}.sock", os.path.relpath(f"{path}.sock"), key=len)
            command += ["--console-socket", where]
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            listener.bind(where)
            listener.listen(1)
        fd = os.open(f"{path}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)  # it has environments
        with open(fd, "w") as file:
            json.dump(process, file)

        def ended(status: int) -> None:
            pid = read_pid(f"{path}.pid")
            master = _received(listener) if listener else -1
            why = "" if status == 0 and pid else complaint(f"{path}.log") or f"the runtime ended with {status}"
            _remove_all(path)
            try:
                done([] if why else [pid, runtime], master, why)
            finally:
                self.children.expect(False)

        self.children.expect(True)
        try:
            runtime = self.children.spawn(
                runtime_argv(self.record.made_of["runtime"], self.directory, f"{path}.log", *command, ID),
                {"PATH": os.defpath, proc.MARKER: self.mark},
                invocation.descriptors,
                ended,
            )
        except OSError:
            self.children.expect(False)
            raise


def _remove_all(path: str) -> None:
    """What a command that is started beside a container needs meanwhile."""
    for suffix in ("json", "pid", "log", "sock"):
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.{suffix}")


def new_record(
    key: str,
    machine: str,
    pid: int,
    group: str,
    note: dict[str, Any],
    runtime: str,
    root: Root,
    kind: str = CONTAINER,
    more: Mapping[str, Any] | None = None,
) -> Record:
    now = proc.stat(pid)
    return Record(
        key=key,
        machine=machine,
        pid=pid,
        start_ticks=now.start if now else 0,
        started_at_ms=proc.now_ms(),
        group=group,
        status=True,
        kind=kind,
        note=note,
        made_of={"runtime": runtime, "root": asdict(root), **(more or {})},
    )


def directory_of(instance: str) -> str:
    """The directory of an instance whose files' names begin with `path`. It is absolute, because the runtime reads it
    from elsewhere."""
    return f"{os.path.realpath(os.path.dirname(instance))}/{os.path.basename(instance)}{DIRECTORY}"


def clear_directory(directory: str) -> None:
    """Remove it. Nothing mounted in it is followed. Not there: success."""
    if not os.path.exists(directory):
        return
    for place in unmount_all(directory):
        if os.path.isdir(place):
            os.rmdir(place)  # fails where something is still mounted, and nothing below is touched then
    shutil.rmtree(directory, ignore_errors=True)


def unmount_all(directory: str) -> list[str]:
    """Take off what is mounted in it, here. Gives the places."""
    places = [e.path for e in os.scandir(directory) if e.name in ("rootfs", "disk", "init") or e.name[:6] == "mount-"]
    for place in places:
        mounts.unmount(place)
    return places


def runtime_argv(program: str, directory: str, log: str, *command: str) -> list[str]:
    return [program, "--root", f"{directory}/state", "--log", log, "--log-format", "json", *command]


def complaint(log: str) -> str:
    """What a runtime gave as the reason of its failure in its log of JSON lines; "" for nothing."""
    reasons: list[str] = []
    with contextlib.suppress(FileNotFoundError), open(log, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if said.get("level") in ("error", "fatal") and said.get("msg") not in reasons:
                    reasons.append(str(said.get("msg", "")))
    return "; ".join(reasons)


def read_pid(path: str) -> int:
    """0 when there is none."""
    try:
        with open(path) as file:
            return int(file.read() or 0)
    except FileNotFoundError:
        return 0


def _received(listener: socket.socket) -> int:
    """The terminal that the runtime sent before it ended; -1 for none."""
    with listener:
        try:
            sender, _ = listener.accept()
        except BlockingIOError:
            return -1
        with sender:
            _, fds, _, _ = socket.recv_fds(sender, 4096, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0] if fds else -1
