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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, assert_never

from hawker.supervisor import calls
from hawker.supervisor.calls import Request
from hawker.supervisor.cgroups import CannotResize
from hawker.supervisor.command import Command, Conversation
from hawker.supervisor.common import Common
from hawker.supervisor.confined import Confinement
from hawker.supervisor.container_set import Containers
from hawker.supervisor.instance import Instance, group_of
from hawker.supervisor.instances import Exit, Instances
from hawker.supervisor.prespawning import Prespawning
from hawker.supervisor.programs import CannotStart
from hawker.supervisor.protocol import HINDERED, PROTOCOL, features
from hawker.supervisor.starting import start
from hawker.supervisor.taking_over import one_that_runs, take_over
from hawker.supervisor.wire import Ask, Connection, Refused, UnknownCall, listen, request_of

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
        self._prespawning = Prespawning(
            self._common, self._instances.register, lambda key: key in self._instances.by_key
        )
        self._connections: list[Connection] = []
        self._idle_since = time.monotonic()
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop, or until idle for a while."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._loop.on_child(self._children.reap)
        self._instances.adopt(take_over(self._common, self._containers))
        listener = listen(self._directory)
        self._loop.watch(listener.fileno(), lambda mask: self._accept(listener))
        while not self._done():
            self._loop.turn()
        self._prespawning.forsake(every=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink("socket")
        self._common.trash.close()
        if self._groups:
            self._groups.close()
        self._files.close()

    def _done(self) -> bool:
        self._connections = [c for c in self._connections if c.open]
        self._prespawning.forsake(every=self._stopping)
        if self._prespawning.busy:
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
        """Reply to one request, now or when what it waits for has happened."""
        try:
            value = self._reply(request_of(ask.message), ask)
            if value is not _LATER:
                ask.answer(value)
        except UnknownCall as error:
            ask.refuse("NotSupported", f"a supervisor of protocol {PROTOCOL} knows no call {str(error)!r}")
        except Refused as error:
            ask.refuse(error.kind, str(error))
        except OSError as error:
            ask.refuse(HINDERED, str(error))
        except Exception as error:
            ask.refuse("Failed", f"{type(error).__name__}: {error}")

    def _reply(self, request: Request, ask: Ask) -> Any:
        """What to answer at once, or `_LATER`."""
        match request:
            case calls.Hello():
                return self._hello()
            case calls.ListInstances():
                return [i.shown() for i in self._instances.by_key.values()]
            case calls.ShutDown():
                return self._shut_down(request)
            case calls.Start():
                return self._start(request)
            case calls.KeepStandby():
                if not self._stopping:
                    self._prespawning.keep(request, ask.connection)
                return _LATER
            case calls.Prespawn():
                return self._prespawn(request, ask)
            case calls.MakeContainer() | calls.MakeTree():
                return self._make(request, ask)
            case calls.ReleaseContainer():
                self._containers_here().release(request, ask)
                return _LATER
            case calls.DiscardContainer():
                self._containers_here().discard(request, ask)
                return _LATER
            case calls.Inspect():
                return self._get(request.key).shown()
            case calls.Wait():
                return self._wait(self._get(request.key), ask)
            case calls.Stop():
                return self._stop(request, ask)
            case calls.Destroy():
                return self._destroy(request, ask)
            case calls.Signal():
                if not self._running(request.key).signal_main(request.signal):
                    raise Refused("UnknownInstance", f"{request.key} has ended")
            case calls.Suspend():
                self._running(request.key).freeze(True)
            case calls.Resume():
                self._running(request.key).freeze(False)
            case calls.Resize():
                self._resize(request)
            case calls.ReadStats():
                return self._running(request.key).stats()
            case calls.ListProcesses():
                return self._running(request.key).describe()
            case calls.Execute():
                Command(request, ask, self._running(request.key), self._common)
                return _LATER
            case calls.Converse():
                Conversation(request, ask, self._running(request.key), self._common)
                return _LATER
            case calls.Purge():
                self._purge(request.machine)
            case calls.Follow():
                ask.connection.following.add(request.machine)
            case calls.Unfollow():
                ask.connection.following.discard(request.machine)
            case _:
                assert_never(request)
        return None

    def _hello(self) -> Any:
        return {
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "features": self._features,
            "cgroups": self._groups.kind if self._groups else "",
            "instances": [i.shown() for i in self._instances.by_key.values()],
        }

    def _start(self, request: calls.Start) -> Any:
        if request.key not in self._instances.by_key:
            if self._stopping:
                raise Refused("StartFailed", "the host is shutting down")
            with self._refusing(request):
                self._instances.register(self._prespawning.take(request) or self._spawned(request))
        return self._instances.by_key[request.key].shown()

    def _prespawn(self, request: calls.Prespawn, ask: Ask) -> Any:
        with contextlib.suppress(Refused), self._refusing(request.start):
            if not self._stopping:
                self._prespawning.add(request, ask.connection)
        return _LATER

    @contextlib.contextmanager
    def _refusing(self, request: calls.Start) -> Iterator[None]:
        """A program that cannot be started leaves no control group."""
        try:
            yield
        except CannotStart as error:
            self._common.remove_group(group_of(request.machine, request.key))
            raise Refused("StartFailed", str(error)) from error

    def _spawned(self, request: calls.Start) -> Instance:
        confinement = None
        if request.confined:
            most_mib = request.limits.memory_mib  # what it writes of its own is its state, when it is suspended
            scratch = f"{self._directory}/empty"
            confinement = Confinement(**vars(request.confined), scratch=scratch, most_mib=most_mib)
        with self._common.host_mounts():
            return start(request, self._common, confinement)

    def _make(self, request: calls.MakeContainer | calls.MakeTree, ask: Ask) -> Any:
        if instance := self._instances.by_key.get(request.key):
            return {"instance": instance.shown()}
        if self._stopping:
            raise Refused("StartFailed", "the host is shutting down")
        self._containers_here().make(request, ask)
        return _LATER

    def _containers_here(self) -> Containers:
        if self._containers is None:
            raise Refused("StartFailed", "this supervisor was started without mounts")
        return self._containers

    def _wait(self, instance: Instance, ask: Ask) -> Any:
        if instance.exit is not None:
            return instance.exit
        self._instances.when_ended(instance, ask.answer)
        return _LATER

    def _stop(self, request: calls.Stop, ask: Ask) -> Any:
        instance = self._get(request.key)
        answer = self._wait(instance, ask)
        if answer is not _LATER:
            return answer
        if instance.suspended or request.grace_s <= 0:
            self._instances.kill(instance)
        else:
            instance.signal_main(request.signal)
            self._loop.later(request.grace_s, lambda: self._instances.kill(instance))
        return _LATER

    def _destroy(self, request: calls.Destroy, ask: Ask) -> Any:
        self._prespawning.drop(request.key)
        instance = self._instances.by_key.get(request.key)
        if instance is None:
            return None
        if instance.exit is not None:
            self._instances.forget(instance)
            return None
        if not request.force:
            raise Refused("InstanceRunning", f"{request.key} still runs")

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

    def _resize(self, request: calls.Resize) -> None:
        try:
            self._running(request.key).resize(request.limits)
        except CannotResize as error:
            raise Refused("Refused", str(error)) from error

    def _purge(self, machine: str) -> None:
        if not any(i.record.machine == machine for i in self._instances.by_key.values()):
            self._common.trash.discard(self._files.work(machine))
            self._files.purge_log(machine)
            if self._containers:
                self._containers.roots.purge(machine)

    def _shut_down(self, request: calls.ShutDown) -> None:
        self._stopping = True
        self._prespawning.forsake(every=True)
        if self._containers:
            self._containers.forsake(every=True)
        for instance in self._instances.running:
            if instance.suspended:
                self._instances.kill(instance)
            else:
                instance.signal_main(signal.SIGTERM)
                self._loop.later(request.grace_s, partial(self._instances.kill, instance))

    # --- what the daemon hears by itself ------------------------------------------------------------------------------

    def _tell_exit(self, ended: Exit) -> None:
        for connection in self._connections:
            connection.send({"event": "exit", "exit": ended})

    def _tell_log(self, machine: str) -> None:
        for connection in self._connections:
            if machine in connection.following:
                connection.send({"event": "log", "machine": machine})

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _get(self, key: str) -> Instance:
        instance = self._instances.by_key.get(key)
        if instance is None:
            raise Refused("UnknownInstance", f"no instance {key}")
        return instance

    def _running(self, key: str) -> Instance:
        instance = self._get(key)
        if instance.exit is not None or instance.main_ended:
            raise Refused("UnknownInstance", f"{key} has ended")
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
