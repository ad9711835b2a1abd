"""What a supervisor does: it answers the daemon, reaps what ended, moves output, takes over from the one before it.

It ends by itself when nothing runs and nobody is connected for a while.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import hashlib
import os
import resource
import signal
import socket
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.cgroups import Groups, Limits, find
from hawker.supervisor.command import Command
from hawker.supervisor.files import Files, in_memory
from hawker.supervisor.instance import CannotStart, Instance, group_of
from hawker.supervisor.loop import Loop
from hawker.supervisor.wire import Ask, Connection, Refused, listen

IDLE_S = 5.0
KILL_AGAIN_S = 0.002
KILL_AGAIN_MOST_S = 0.25
REAPED_S = 5.0  # how long the status of a program that is not our child may take: its parent must reap it first
_PR_SET_CHILD_SUBREAPER = 36


class Server:
    """All instances of one worker."""

    def __init__(self, directory: str, *, cgroups: bool) -> None:
        self._directory = directory
        self._files = Files(directory, in_memory())
        self._id = hashlib.blake2b(os.path.realpath(directory).encode(), digest_size=6).hexdigest()
        self._groups: Groups | None = find(f"hawker-{self._id}") if cgroups else None
        self._loop = Loop()
        self._connections: list[Connection] = []
        self._instances: dict[str, Instance] = {}
        self._by_pid: dict[int, Instance] = {}
        self._commands: dict[int, Command] = {}
        self._waiting: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._idle_since = time.monotonic()
        self._stopping = False

    def run(self) -> None:
        """Until told to stop, or idle."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._loop.on_child(self._reap)
        self._recover()
        listener = listen(self._directory)
        self._loop.watch(listener.fileno(), lambda mask: self._accept(listener))
        while not self._done():
            self._loop.turn()
        with contextlib.suppress(FileNotFoundError):
            os.unlink("socket")
        if self._groups:
            self._groups.close()
        self._files.close()

    def _done(self) -> bool:
        self._connections = [c for c in self._connections if c.open]
        busy = self._connections or any(i.exit is None for i in self._instances.values())
        if busy and not self._stopping:
            self._idle_since = time.monotonic()
            return False
        if self._stopping:
            return all(i.exit is not None for i in self._instances.values())
        return time.monotonic() - self._idle_since > IDLE_S

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            self._connections.append(Connection(self._loop, sock, self._handle))

    def _handle(self, ask: Ask) -> None:
        """Answer one request, now or when what it waits for has happened."""
        try:
            operation = getattr(self, f"_op_{ask['op']}")
            value = operation(ask)
            if value is not _LATER:
                ask.answer(value)
        except Refused as error:
            ask.refuse(error.kind, str(error))
        except Exception as error:  # also what a newer daemon asks and this one does not know
            ask.refuse("Failed", f"{type(error).__name__}: {error}")

    # --- operations --------------------------------------------------------------------------------------------------

    def _op_hello(self, ask: Ask) -> Any:
        return {
            "pid": os.getpid(),
            "cgroups": self._groups.kind if self._groups else "",
            "instances": [i.shown() for i in self._instances.values()],
        }

    def _op_start(self, ask: Ask) -> Any:
        key, machine = ask["key"], ask["machine"]
        if key not in self._instances:
            if self._stopping:
                raise Refused("StartFailed", "the host is shutting down")
            try:
                instance = Instance.start(
                    key=key,
                    machine=machine,
                    argv=ask["argv"],
                    env=ask["env"],
                    limits=Limits(**ask["limits"]),
                    files=self._files,
                    mark=self._mark(machine, key),
                    groups=self._groups,
                    cwd=ask.get("cwd", ""),
                    status=ask.get("status", False),
                )
            except CannotStart as error:
                if self._groups:
                    self._remove_group(self._groups, group_of(machine, key))
                raise Refused("StartFailed", str(error)) from error
            self._instances[key] = instance
            self._by_pid[instance.record.pid] = instance
            self._watch_output(instance)
        return self._instances[key].shown()

    def _op_list(self, ask: Ask) -> Any:
        return [i.shown() for i in self._instances.values()]

    def _op_inspect(self, ask: Ask) -> Any:
        return self._get(ask).shown()

    def _op_wait(self, ask: Ask) -> Any:
        instance = self._get(ask)
        if instance.exit is not None:
            return instance.exit
        self._waiting.setdefault(instance.record.key, []).append(ask.answer)
        return _LATER

    def _op_stop(self, ask: Ask) -> Any:
        instance = self._get(ask)
        if instance.exit is not None:
            return instance.exit
        self._waiting.setdefault(instance.record.key, []).append(ask.answer)
        if instance.suspended or ask["grace_s"] <= 0:
            self._kill(instance)
        else:
            instance.signal_main(ask["signal"])
            self._loop.later(ask["grace_s"], lambda: self._kill(instance))
        return _LATER

    def _op_destroy(self, ask: Ask) -> Any:
        instance = self._instances.get(ask["key"])
        if instance is None:
            return None
        if instance.exit is not None:
            del self._instances[instance.record.key]
            instance.destroy()
            return None
        if not ask["force"]:
            raise Refused("InstanceRunning", f"{instance.record.key} still runs")

        def ended(exit_: dict[str, Any]) -> None:
            self._instances.pop(instance.record.key, None)
            instance.destroy()
            ask.answer(None)

        self._waiting.setdefault(instance.record.key, []).append(ended)
        self._kill(instance)
        return _LATER

    def _op_purge(self, ask: Ask) -> Any:
        machine = ask["machine"]
        if not any(i.record.machine == machine for i in self._instances.values()):
            self._files.purge(machine)
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
        return proc.describe(self._running(ask).members())

    def _op_exec(self, ask: Ask) -> Any:
        instance = self._running(ask)
        stdin = base64.b64decode(ask["stdin"])
        try:
            command = Command(instance, ask["argv"], ask["env"], stdin, ask.answer)
        except (CannotStart, OSError) as error:
            raise Refused("StartFailed", str(error)) from error
        self._commands[command.pid] = command
        for fd in command.fds:
            self._loop.watch(fd, partial(self._read_command, command, fd))
        self._loop.later(ask["timeout_s"], partial(self._time_out, command.pid, weakref.ref(command)))
        return _LATER

    def _time_out(self, pid: int, command: weakref.ref[Command]) -> None:
        """The pid may be another command's by now; the reference keeps no output of one that has ended."""
        if (there := self._commands.get(pid)) and there is command():
            there.kill()

    def _op_follow(self, ask: Ask) -> Any:
        ask.connection.following.add(ask["machine"])

    def _op_unfollow(self, ask: Ask) -> Any:
        ask.connection.following.discard(ask["machine"])

    def _op_shutdown(self, ask: Ask) -> Any:
        """Stop everything, answer, and end."""
        self._stopping = True
        for instance in self._instances.values():
            if instance.exit is None:
                if instance.suspended:
                    self._kill(instance)
                else:
                    instance.signal_main(signal.SIGTERM)
                    self._loop.later(ask["grace_s"], partial(self._kill, instance))
        return None

    # --- ends --------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect every child that ended: programs, commands, and orphans that came to us as their subreaper."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if found is None:
                return
            status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if instance := self._by_pid.pop(found.si_pid, None):
                instance.status = status
                self._main_ended(instance)
            elif command := self._commands.pop(found.si_pid, None):
                for fd in command.fds:
                    self._loop.forget(fd)
                command.finish(status)

    def _main_ended(self, instance: Instance) -> None:
        """The program's main process is gone. The rest of its tree goes with it."""
        instance.main_ended = True
        instance.ended_at_s = time.monotonic()
        instance.note_oom()
        self._kill(instance)

    def _kill(self, instance: Instance, again_s: float = KILL_AGAIN_S) -> None:
        """Kill until nothing is left, then record the end and tell everyone."""
        if instance.exit is not None:
            return
        gone = instance.kill_tree() and instance.main_ended
        if not gone or not (instance.learn_status() or time.monotonic() - instance.ended_at_s > REAPED_S):
            longer = min(again_s * 2, KILL_AGAIN_MOST_S)
            if not instance.main_ended:
                instance.signal_main(signal.SIGKILL)
            self._loop.later(again_s, lambda: self._kill(instance, longer))
            return
        for pipe in instance.pipes:
            self._loop.forget(pipe.fd)
        ended = instance.finish()
        self._tell_log(instance.record.machine)
        for waiter in self._waiting.pop(instance.record.key, []):
            waiter(ended)
        for connection in self._connections:
            connection.send({"event": "exit", "exit": ended})

    # --- output ------------------------------------------------------------------------------------------------------

    def _watch_output(self, instance: Instance) -> None:
        for pipe in instance.pipes:
            self._loop.watch(pipe.fd, lambda mask: self._read_output(instance))

    def _read_output(self, instance: Instance) -> None:
        if instance.drain():
            self._tell_log(instance.record.machine)

    def _tell_log(self, machine: str) -> None:
        for connection in self._connections:
            if machine in connection.following:
                connection.send({"event": "log", "machine": machine})

    def _read_command(self, command: Command, fd: int, ready: int) -> None:
        if not command.read(fd):
            self._loop.forget(fd)

    # --- taking over -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over what an earlier supervisor started, also a program it had no time to write down."""
        for path in self._files.recorded():
            if instance := Instance.recover(path, self._files, self._mark, self._groups):
                self._instances[instance.record.key] = instance
        self._clear_unrecorded()
        for instance in self._instances.values():
            if instance.exit is None:
                self._watch_adopted(instance)

    def _clear_unrecorded(self) -> None:
        """Remove what an earlier supervisor began to start and had no time to write down: processes, groups, files.

        Their start was not acknowledged, so nobody relies on them; the same key may then be started once more.
        """
        known = {i.mark for i in self._instances.values()}
        for pid in proc.everyone():
            mark = proc.marker(pid)
            if mark.startswith(f"{self._id}:") and mark not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._files.remove_unrecorded()
        if self._groups:
            running = {i.record.group for i in self._instances.values() if i.exit is None}
            for name in self._groups.names():
                if name not in running:
                    self._remove_group(self._groups, name)

    def _remove_group(self, groups: Groups, name: str) -> None:
        with contextlib.suppress(OSError):  # a dying process may hold it a moment longer
            if groups.kill(name):
                groups.remove(name)
                return
        self._loop.later(KILL_AGAIN_S, partial(self._remove_group, groups, name))

    def _watch_adopted(self, instance: Instance) -> None:
        self._watch_output(instance)
        if instance.main_ended:
            self._loop.later(0, lambda: self._main_ended(instance))
        else:
            fd = instance.adopted_fd
            self._loop.watch(fd, lambda mask: self._adopted_ended(instance))

    def _adopted_ended(self, instance: Instance) -> None:
        self._loop.forget(instance.adopted_fd)
        self._main_ended(instance)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _get(self, ask: Ask) -> Instance:
        instance = self._instances.get(ask["key"])
        if instance is None:
            raise Refused("UnknownInstance", f"no instance {ask['key']}")
        return instance

    def _running(self, ask: Ask) -> Instance:
        instance = self._get(ask)
        if instance.exit is not None or instance.main_ended:
            raise Refused("UnknownInstance", f"{ask['key']} has ended")
        return instance

    def _mark(self, machine: str, key: str) -> str:
        return f"{self._id}:{machine}:{key}"


_LATER = object()


def main(directory: str, *, cgroups: bool) -> int:
    """Run the supervisor of `directory`. Returns 1 when another one holds it already."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    Server(directory, cgroups=cgroups).run()
    return 0
