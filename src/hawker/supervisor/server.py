"""What a supervisor does: it answers the daemon, reaps what ended, takes over from the one before it.

It ends by itself when nothing runs and nobody is connected for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from hawker.supervisor.cgroups import CannotResize, Limits
from hawker.supervisor.command import Command, Conversation
from hawker.supervisor.common import Common
from hawker.supervisor.confined import Confinement
from hawker.supervisor.foreseen import Foreseen
from hawker.supervisor.instance import Instance, group_of
from hawker.supervisor.instances import Exit, Instances
from hawker.supervisor.kinds import Containers
from hawker.supervisor.programs import CannotStart
from hawker.supervisor.protocol import HINDERED, PROTOCOL, features
from hawker.supervisor.starting import start
from hawker.supervisor.taking_over import one_that_runs, take_over
from hawker.supervisor.wire import Ask, Connection, Refused, listen

_T = TypeVar("_T")

IDLE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class Server:
    """All instances of one worker."""

    def __init__(self, directory: str, options: Sequence[str], host_namespace: int = -1) -> None:
        self._directory = directory
        self._features = features(options)
        self._common = Common(directory, cgroups="--no-cgroups" not in options)
        self._common.host_namespace = host_namespace
        if "--user-each" in options:
            self._common.show_work()
        self._files, self._groups, self._loop = self._common.files, self._common.groups, self._common.loop
        self._children = self._common.children
        self._instances = Instances(self._common, self._tell_exit, self._tell_log)
        self._containers = Containers(self._common, self._instances.register) if "--mounts" in options else None
        self._foreseen = Foreseen(self._common, self._instances.register, lambda key: key in self._instances.by_key)
        self._connections: list[Connection] = []
        self._idle_since = time.monotonic()
        self._stopping = False

    def run(self) -> None:
        """Until told to stop, or idle."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._loop.on_child(self._children.reap)
        self._instances.adopt(take_over(self._common, self._containers))
        listener = listen(self._directory)
        self._loop.watch(listener.fileno(), lambda mask: self._accept(listener))
        while not self._done():
            self._loop.turn()
        self._foreseen.forsake(every=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink("socket")
        self._common.trash.close()
        if self._groups:
            self._groups.close()
        self._files.close()

    def _done(self) -> bool:
        self._connections = [c for c in self._connections if c.open]
        self._foreseen.forsake(every=self._stopping)
        if self._foreseen.busy:
            return False
        if self._containers:
            self._containers.forsake()
            if self._containers.busy:
                return False
        if self._stopping:
            return not self._instances.busy
        if self._connections or self._instances.busy:
            self._idle_since = time.monotonic()
            return False
        return time.monotonic() - self._idle_since > IDLE_S

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            self._connections.append(Connection(self._loop, sock, self._handle))

    def _handle(self, ask: Ask) -> None:
        """Answer one request, now or when what it waits for has happened."""
        try:
            operation = getattr(self, f"_op_{ask['op']}", None)
            if operation is None:
                raise Refused("NotSupported", f"a supervisor of protocol {PROTOCOL} knows no order {ask['op']!r}")
            value = operation(ask)
            if value is not _LATER:
                ask.answer(value)
        except Refused as error:
            ask.refuse(error.kind, str(error))
        except OSError as error:
            ask.refuse(HINDERED, str(error))
        except Exception as error:
            ask.refuse("Failed", f"{type(error).__name__}: {error}")

    # --- operations --------------------------------------------------------------------------------------------------

    def _op_hello(self, ask: Ask) -> Any:
        return {
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "features": self._features,
            "cgroups": self._groups.kind if self._groups else "",
            "instances": [i.shown() for i in self._instances.by_key.values()],
        }

    def _op_start(self, ask: Ask) -> Any:
        key = ask["key"]
        if key not in self._instances.by_key:
            if self._stopping:
                raise Refused("StartFailed", "the host is shutting down")
            self._instances.register(self._started(lambda: self._foreseen.take(ask) or self._start(ask), ask))
        return self._instances.by_key[key].shown()

    def _op_keep(self, ask: Ask) -> Any:
        """Have what `foresee` needs ready before it is asked for."""
        if not self._stopping:
            self._foreseen.keep(ask)
        return _LATER

    def _op_foresee(self, ask: Ask) -> Any:
        """Prepare a `start` that will be asked for, as far as it leaves nothing. Nobody waits for an answer."""
        with contextlib.suppress(Refused):
            if not self._stopping:
                self._started(lambda: self._foreseen.add(ask), ask)
        return _LATER

    def _started(self, start: Callable[[], _T], ask: Ask) -> _T:
        try:
            return start()
        except CannotStart as error:
            self._common.remove_group(group_of(ask["machine"], ask["key"]))
            raise Refused("StartFailed", str(error)) from error

    def _start(self, ask: Ask) -> Instance:
        with self._common.host_mounts():
            return start(
                key=ask["key"],
                machine=ask["machine"],
                argv=ask["argv"],
                env=ask["env"],
                limits=Limits.of(ask["limits"]),
                common=self._common,
                cwd=ask.get("cwd", ""),
                users=ask.get("users", None),
                status=ask.get("status", False),
                confinement=self._confinement(ask),
                note=ask.get("note", {}),
            )

    def _confinement(self, ask: Ask) -> Confinement | None:
        wanted = ask.get("confined", None)
        if not wanted:
            return None
        most_mib = Limits.of(ask["limits"]).memory_mib  # what it writes of its own is its state, when it is suspended
        return Confinement(**wanted, scratch=f"{self._directory}/empty", most_mib=most_mib)

    def _op_make(self, ask: Ask) -> Any:
        """Make a container and hold it: its first process's pid, or the instance where it is there already."""
        if instance := self._instances.by_key.get(ask["key"]):
            return {"instance": instance.shown()}
        if self._stopping:
            raise Refused("StartFailed", "the host is shutting down")
        self._containers_here().make(ask)
        return _LATER

    def _op_go(self, ask: Ask) -> Any:
        """Let a container's program start."""
        self._containers_here().go(ask)
        return _LATER

    def _op_unmake(self, ask: Ask) -> Any:
        """Remove a container that was not let go."""
        self._containers_here().unmake(ask)
        return _LATER

    def _containers_here(self) -> Containers:
        if self._containers is None:
            raise Refused("StartFailed", "this supervisor was started without mounts")
        return self._containers

    def _op_list(self, ask: Ask) -> Any:
        return [i.shown() for i in self._instances.by_key.values()]

    def _op_inspect(self, ask: Ask) -> Any:
        return self._get(ask).shown()

    def _op_wait(self, ask: Ask) -> Any:
        instance = self._get(ask)
        if instance.exit is not None:
            return instance.exit
        self._instances.when_ended(instance, ask.answer)
        return _LATER

    def _op_stop(self, ask: Ask) -> Any:
        instance = self._get(ask)
        if instance.exit is not None:
            return instance.exit
        self._instances.when_ended(instance, ask.answer)
        if instance.suspended or ask["grace_s"] <= 0:
            self._instances.kill(instance)
        else:
            instance.signal_main(ask["signal"])
            self._loop.later(ask["grace_s"], lambda: self._instances.kill(instance))
        return _LATER

    def _op_destroy(self, ask: Ask) -> Any:
        self._foreseen.drop(ask["key"])
        instance = self._instances.by_key.get(ask["key"])
        if instance is None:
            return None
        if instance.exit is not None:
            self._instances.forget(instance)
            return None
        if not ask["force"]:
            raise Refused("InstanceRunning", f"{instance.record.key} still runs")

        def ended(exit_: Exit) -> None:
            try:
                self._instances.forget(instance)
            except OSError as error:
                ask.refuse(HINDERED, str(error))
            else:
                ask.answer(None)

        self._instances.when_ended(instance, ended)
        self._instances.kill(instance)
        return _LATER

    def _op_purge(self, ask: Ask) -> Any:
        machine = ask["machine"]
        if not any(i.record.machine == machine for i in self._instances.by_key.values()):
            self._common.trash.discard(self._files.work(machine))
            self._files.purge_log(machine)
            if self._containers:
                self._containers.roots.purge(machine)
        return None

    def _op_signal(self, ask: Ask) -> Any:
        instance = self._running(ask)
        if not instance.signal_main(ask["signal"]):
            raise Refused("UnknownInstance", f"{instance.record.key} has ended")
        return None

    def _op_suspend(self, ask: Ask) -> Any:
        self._running(ask).freeze(True)

    def _op_resume(self, ask: Ask) -> Any:
        self._running(ask).freeze(False)

    def _op_stats(self, ask: Ask) -> Any:
        return self._running(ask).stats()

    def _op_processes(self, ask: Ask) -> Any:
        return self._running(ask).describe()

    def _op_resize(self, ask: Ask) -> Any:
        try:
            self._running(ask).resize(Limits.of(ask["limits"]))
        except CannotResize as error:
            raise Refused("Refused", str(error)) from error

    def _op_exec(self, ask: Ask) -> Any:
        Command(ask, self._running(ask), self._common)
        return _LATER

    def _op_converse(self, ask: Ask) -> Any:
        Conversation(ask, self._running(ask), self._common)
        return _LATER

    def _op_follow(self, ask: Ask) -> Any:
        ask.connection.following.add(ask["machine"])

    def _op_unfollow(self, ask: Ask) -> Any:
        ask.connection.following.discard(ask["machine"])

    def _op_shutdown(self, ask: Ask) -> Any:
        """Stop everything, answer, and end."""
        self._stopping = True
        self._foreseen.forsake(every=True)
        if self._containers:
            self._containers.forsake(every=True)
        for instance in self._instances.running:
            if instance.suspended:
                self._instances.kill(instance)
            else:
                instance.signal_main(signal.SIGTERM)
                self._loop.later(ask["grace_s"], partial(self._instances.kill, instance))
        return None

    # --- what the daemon hears by itself ------------------------------------------------------------------------------

    def _tell_exit(self, ended: Exit) -> None:
        for connection in self._connections:
            connection.send({"event": "exit", "exit": ended})

    def _tell_log(self, machine: str) -> None:
        for connection in self._connections:
            if machine in connection.following:
                connection.send({"event": "log", "machine": machine})

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _get(self, ask: Ask) -> Instance:
        instance = self._instances.by_key.get(ask["key"])
        if instance is None:
            raise Refused("UnknownInstance", f"no instance {ask['key']}")
        return instance

    def _running(self, ask: Ask) -> Instance:
        instance = self._get(ask)
        if instance.exit is not None or instance.main_ended:
            raise Refused("UnknownInstance", f"{ask['key']} has ended")
        return instance


_LATER = object()


def main(directory: str, options: Sequence[str]) -> int:
    """Run the supervisor of `directory`. Returns 1 when another one holds it already.

    `--no-cgroups` does without control groups. `--user-each` is for root's: each machine of programs of the host has a
    user of its own. `--mounts` lets it mount file systems, in a namespace of its own; it needs root, or `--own-users`,
    which makes an ordinary user root of a user namespace.
    """
    directory = os.path.abspath(directory)  # our own is another one soon
    os.makedirs(directory, mode=0o700, exist_ok=True)
    os.chmod(directory, 0o700)  # machines' environments are in it, and whoever made it may have been careless
    lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    if "--own-users" in options:
        from hawker.supervisor.ordinary import become_root

        become_root(one_that_runs(directory))
    host_namespace = -1
    if "--own-users" not in options and {"--mounts", "--user-each"} & set(options):
        host_namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if "--mounts" in options:
        from hawker.supervisor.mounts import private_namespace

        private_namespace(cgroups="--own-users" not in options)
    Server(directory, options, host_namespace).run()
    return 0
