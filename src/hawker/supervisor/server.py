"""The supervisor's loop: one thread, one selector, requests from the daemon, ends of programs, their output.

The wire is a JSON object a line over a unix socket: requests `{"id", "op", ...}`, answers `{"id", "ok"}` or `{"id",
"error", "message"}`, and events `{"event": "exit" | "log", ...}` to every connection that said hello. It ends by
itself when nothing runs and nobody is connected for a while.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import hashlib
import heapq
import json
import os
import resource
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from hawker.supervisor import proc
from hawker.supervisor.cgroups import Groups, Limits, find
from hawker.supervisor.command import Command
from hawker.supervisor.instance import CannotStart, Instance

IDLE_S = 5.0
KILL_AGAIN_S = 0.002
KILL_AGAIN_MOST_S = 0.25
OUTBOX_BYTES_MAX = 64 << 20
_PR_SET_CHILD_SUBREAPER = 36


class Refused(Exception):
    """An answer that is an error. `kind` is the driver's exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Connection:
    """A daemon. Answers are queued when it reads slowly; one that does not read at all is dropped."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.following: set[str] = set()

    def on_ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if mask & selectors.EVENT_READ:
            try:
                data = self.sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._server.drop(self)
                return
            self._in += data
            *lines, rest = self._in.split(b"\n")
            self._in = bytearray(rest)
            for line in lines:
                self._server.handle(self, json.loads(line))

    def send(self, message: dict[str, Any]) -> None:
        self._out += json.dumps(message).encode() + b"\n"
        if len(self._out) > OUTBOX_BYTES_MAX:
            self._server.drop(self)
        else:
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self._out) if self._out else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._server.drop(self)
            return
        del self._out[:sent]
        self._server.watch(self, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0))


class Server:
    """All instances of one worker."""

    def __init__(self, directory: str, *, cgroups: bool) -> None:
        self._directory = directory
        self._machines = f"{directory}/machines"
        os.makedirs(self._machines, mode=0o700, exist_ok=True)
        self._id = hashlib.blake2b(os.path.realpath(directory).encode(), digest_size=6).hexdigest()
        self._groups: Groups | None = find(f"hawker-{self._id}") if cgroups else None
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, Connection] = {}
        self._instances: dict[str, Instance] = {}
        self._by_pid: dict[int, Instance] = {}
        self._commands: dict[int, Command] = {}
        self._waiting: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._idle_since = time.monotonic()
        self._stopping = False

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until told to stop, or idle."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            # A handler that does nothing, not SIG_IGN: programs inherit what is ignored and could not be stopped.
            signal.signal(number, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda mask: self._reap(wake_read))
        self._recover()
        listener = self._listen()
        self._selector.register(listener, selectors.EVENT_READ, lambda mask: self._accept(listener))
        while not self._done():
            for key, mask in self._selector.select(self._sleep_s()):
                if key.fd in self._selector.get_map():  # not taken out by an event before it
                    self._guarded(key.data, mask)
            self._run_timers()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._directory}/socket")
        if self._groups:
            self._groups.close()

    def _listen(self) -> socket.socket:
        """Bound by a path relative to the directory: absolute ones may be longer than the 108 bytes a socket takes."""
        os.chdir(self._directory)
        with contextlib.suppress(FileNotFoundError):
            os.unlink("socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        old = os.umask(0o177)
        try:
            listener.bind("socket.new")
        finally:
            os.umask(old)
        listener.listen(16)
        os.rename("socket.new", "socket")
        return listener

    def _done(self) -> bool:
        busy = self._connections or any(i.exit is None for i in self._instances.values())
        if busy and not self._stopping:
            self._idle_since = time.monotonic()
            return False
        if self._stopping:
            return all(i.exit is not None for i in self._instances.values())
        return time.monotonic() - self._idle_since > IDLE_S

    def _sleep_s(self) -> float:
        if not self._timers:
            return 1.0
        return max(0.0, min(1.0, self._timers[0][0] - time.monotonic()))

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guarded(heapq.heappop(self._timers)[2])

    def _guarded(self, call: Callable[..., None], *args: Any) -> None:
        """A bug met with one program must not take the parent of all the others down. It is told in the log."""
        try:
            call(*args)
        except Exception:
            traceback.print_exc()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    # --- connections -------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            connection = Connection(self, sock)
            self._connections[sock] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection.on_ready)

    def drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.sock, None):
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def watch(self, connection: Connection, mask: int) -> None:
        if connection.sock in self._connections:
            self._selector.modify(connection.sock, mask, connection.on_ready)

    def handle(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer one request, now or when what it waits for has happened."""

        def answer(value: Any) -> None:
            connection.send({"id": message["id"], "ok": value})

        try:
            operation = getattr(self, f"_op_{message['op']}")
            value = operation(connection, message, answer)
            if value is not _LATER:
                answer(value)
        except Refused as error:
            connection.send({"id": message["id"], "error": error.kind, "message": str(error)})
        except (OSError, KeyError, TypeError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            connection.send({"id": message["id"], "error": "Failed", "message": text})

    # --- operations --------------------------------------------------------------------------------------------------

    def _op_hello(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        return {
            "pid": os.getpid(),
            "cgroups": self._groups.kind if self._groups else "",
            "instances": [i.shown() for i in self._instances.values()],
        }

    def _op_start(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        key, machine = message["key"], message["machine"]
        if key not in self._instances:
            if self._stopping:
                raise Refused("StartFailed", "the host is shutting down")
            try:
                instance = Instance.start(
                    key=key,
                    machine=machine,
                    argv=message["argv"],
                    env=message["env"],
                    limits=Limits(**message["limits"]),
                    directory=self._path(machine, key),
                    mark=self._mark(machine, key),
                    groups=self._groups,
                )
            except CannotStart as error:
                raise Refused("StartFailed", str(error)) from error
            self._instances[key] = instance
            self._by_pid[instance.record.pid] = instance
            self._watch_output(instance)
        return self._instances[key].shown()

    def _op_list(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        return [i.shown() for i in self._instances.values()]

    def _op_inspect(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        return self._get(message).shown()

    def _op_wait(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        instance = self._get(message)
        if instance.exit is not None:
            return instance.exit
        self._waiting.setdefault(instance.record.key, []).append(answer)
        return _LATER

    def _op_stop(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        instance = self._get(message)
        if instance.exit is not None:
            return instance.exit
        self._waiting.setdefault(instance.record.key, []).append(answer)
        if instance.suspended or message["grace_s"] <= 0:
            self._kill(instance)
        else:
            instance.signal_main(message["signal"])
            self._later(message["grace_s"], lambda: self._kill(instance))
        return _LATER

    def _op_destroy(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        instance = self._instances.get(message["key"])
        if instance is None:
            return None
        if instance.exit is not None:
            del self._instances[instance.record.key]
            instance.destroy()
            return None
        if not message["force"]:
            raise Refused("InstanceRunning", f"{instance.record.key} still runs")

        def ended(exit_: dict[str, Any]) -> None:
            self._instances.pop(instance.record.key, None)
            instance.destroy()
            answer(None)

        self._waiting.setdefault(instance.record.key, []).append(ended)
        self._kill(instance)
        return _LATER

    def _op_purge(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        import shutil  # only here: keeps the start quick

        machine = message["machine"]
        if not any(i.record.machine == machine for i in self._instances.values()):
            shutil.rmtree(f"{self._machines}/{machine}", ignore_errors=True)
        return None

    def _op_signal(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        instance = self._running(message)
        if not instance.signal_main(message["signal"]):
            raise Refused("UnknownInstance", f"{instance.record.key} has ended")
        return None

    def _op_suspend(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        self._running(message).freeze(True)

    def _op_resume(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        self._running(message).freeze(False)

    def _op_stats(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        return self._running(message).stats()

    def _op_processes(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        return proc.describe(self._running(message).members())

    def _op_exec(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        instance = self._running(message)
        stdin = base64.b64decode(message["stdin"])
        try:
            command = Command(instance, message["argv"], message["env"], stdin, answer)
        except (CannotStart, OSError) as error:
            raise Refused("StartFailed", str(error)) from error
        self._commands[command.pid] = command
        for fd in command.fds:
            self._selector.register(fd, selectors.EVENT_READ, lambda mask, fd=fd: self._read_command(command, fd))
        self._later(message["timeout_s"], lambda: command.kill() if command.pid in self._commands else None)
        return _LATER

    def _op_follow(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        connection.following.add(message["machine"])

    def _op_unfollow(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        connection.following.discard(message["machine"])

    def _op_shutdown(self, connection: Connection, message: dict[str, Any], answer: Any) -> Any:
        """Stop everything, answer, and end."""
        self._stopping = True
        for instance in self._instances.values():
            if instance.exit is None:
                if instance.suspended:
                    self._kill(instance)
                else:
                    instance.signal_main(signal.SIGTERM)
                    self._later(message["grace_s"], partial(self._kill, instance))
        return None

    # --- ends --------------------------------------------------------------------------------------------------------

    def _reap(self, wake: int) -> None:
        """Collect every child that ended: programs, commands, and orphans that came to us as their subreaper."""
        with contextlib.suppress(BlockingIOError):
            while os.read(wake, 4096):
                pass
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
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(fd)
                command.finish(status)

    def _main_ended(self, instance: Instance) -> None:
        """The program's main process is gone. The rest of its tree goes with it."""
        instance.main_ended = True
        instance.note_oom()
        self._kill(instance)

    def _kill(self, instance: Instance, again_s: float = KILL_AGAIN_S) -> None:
        """Kill until nothing is left, then record the end and tell everyone."""
        if instance.exit is not None:
            return
        if not instance.kill_tree() or not instance.main_ended:
            longer = min(again_s * 2, KILL_AGAIN_MOST_S)
            if not instance.main_ended:
                instance.signal_main(signal.SIGKILL)
            self._later(again_s, lambda: self._kill(instance, longer))
            return
        for pipe in instance.pipes:
            self._selector.unregister(pipe.fd)
        if instance.adopted_fd >= 0:
            self._selector.unregister(instance.adopted_fd)
        ended = instance.finish()
        self._tell_log(instance.record.machine)
        for waiter in self._waiting.pop(instance.record.key, []):
            waiter(ended)
        for connection in list(self._connections.values()):
            connection.send({"event": "exit", "exit": ended})

    # --- output ------------------------------------------------------------------------------------------------------

    def _watch_output(self, instance: Instance) -> None:
        for pipe in instance.pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ, lambda mask: self._read_output(instance))

    def _read_output(self, instance: Instance) -> None:
        if instance.drain():
            self._tell_log(instance.record.machine)

    def _tell_log(self, machine: str) -> None:
        for connection in list(self._connections.values()):
            if machine in connection.following:
                connection.send({"event": "log", "machine": machine})

    def _read_command(self, command: Command, fd: int) -> None:
        if not command.read(fd):
            self._selector.unregister(fd)

    # --- taking over -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over what an earlier supervisor started, also a program it had no time to write down."""
        for machine in os.listdir(self._machines):
            for name in os.listdir(f"{self._machines}/{machine}"):
                directory = f"{self._machines}/{machine}/{name}"
                if name.startswith("run.") and (i := Instance.recover(directory, self._mark, self._groups)):
                    self._instances[i.record.key] = i
        self._adopt_strays()
        for instance in self._instances.values():
            if instance.exit is None:
                self._watch_adopted(instance)

    def _adopt_strays(self) -> None:
        """Programs of ours that run and are in no record: remove them, the flow that started them starts them again.

        Their start was not acknowledged, so nobody relies on them; the same key may then be started once more.
        """
        known = {i.mark for i in self._instances.values()}
        for pid in proc.everyone():
            mark = proc.marker(pid)
            if mark.startswith(f"{self._id}:") and mark not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _watch_adopted(self, instance: Instance) -> None:
        self._watch_output(instance)
        if instance.main_ended:
            self._later(0, lambda: self._main_ended(instance))
        else:
            fd = instance.adopted_fd
            self._selector.register(fd, selectors.EVENT_READ, lambda mask: self._adopted_ended(instance))

    def _adopted_ended(self, instance: Instance) -> None:
        self._selector.unregister(instance.adopted_fd)
        os.close(instance.adopted_fd)
        instance.adopted_fd = -1
        self._main_ended(instance)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _get(self, message: dict[str, Any]) -> Instance:
        instance = self._instances.get(message["key"])
        if instance is None:
            raise Refused("UnknownInstance", f"no instance {message['key']}")
        return instance

    def _running(self, message: dict[str, Any]) -> Instance:
        instance = self._get(message)
        if instance.exit is not None or instance.main_ended:
            raise Refused("UnknownInstance", f"{message['key']} has ended")
        return instance

    def _path(self, machine: str, key: str) -> str:
        return f"{self._machines}/{machine}/run.{key.replace('/', '.')}"

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
