"""The process that the agents of `hawker dev` are forked from. It has imported what they need, and they share that.

An agent that is executed by itself imports for half a second and has 35 MiB of its own; a forked one has neither. The
name is the one that Android and Chrome have for such a process. It is forked from `hawker dev` before that has an event
loop, does nothing else, and ends with it; agents that are left then live on.

Over a socket it gets a message for each agent: the path of its configuration, and the file for its output. It answers
with the agent's process, and tells with which status it ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hawker.errors import HawkerError

MESSAGE_BYTES = 1 << 16


class Forked:
    """An agent. As much of `asyncio.subprocess.Process` as is needed of it; `returncode` is -1 when nobody can tell."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.pidfd = pidfd
        self._ended = asyncio.Event()

    def ended(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
            self._ended.set()
            os.close(self.pidfd)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None  # set before the event
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # by its descriptor: the number may be another process's by now
                signal.pidfd_send_signal(self.pidfd, number)


class Zygote:
    """Made where there is neither a loop nor a thread; used on one loop."""

    def __init__(self, configs: Iterable[Path]) -> None:
        """Imports what agents with these configurations need. Raises what keeps that from being imported."""
        _import(configs)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._asked = deque[asyncio.Future[Forked]]()
        self._agents: dict[int, Forked] = {}
        self._listens = False
        gc.collect()
        gc.freeze()  # a collection would write into every object, and so make every page the process's own
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            _serve(theirs)
        theirs.close()

    async def spawn(self, config: Path, log: int) -> Forked:
        """An agent in a session of its own, whose output goes to the descriptor `log`. Raises `HawkerError`."""
        loop = asyncio.get_running_loop()
        if not self._listens:
            self._listens = True
            loop.add_reader(self._sock, self._hear)
        answer = loop.create_future()
        self._asked.append(answer)
        try:
            socket.send_fds(self._sock, [os.fsencode(config)], [log])
        except OSError as error:
            raise _gone() from error
        forked: Forked = await answer
        return forked

    def _hear(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            message, fds = b"", []
        if not message:
            self._has_ended()
        elif fds:
            agent = Forked(int(message), fds[0])
            self._agents[agent.pid] = agent
            self._asked.popleft().set_result(agent)
        else:
            pid, status = json.loads(message)
            self._agents.pop(pid).ended(status)

    def _has_ended(self) -> None:
        """Somebody killed it: its agents live on, and how they end nobody will know."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        for answer in self._asked:
            answer.set_exception(_gone())
        for agent in self._agents.values():
            loop.add_reader(agent.pidfd, self._lost, loop, agent)

    def _lost(self, loop: asyncio.AbstractEventLoop, agent: Forked) -> None:
        loop.remove_reader(agent.pidfd)
        agent.ended(-1)


def _gone() -> HawkerError:
    return HawkerError("the process that agents are forked from was killed", hint="start hawker dev again")


def _import(configs: Iterable[Path]) -> None:
    from hawker.agent import running
    from hawker.agent.settings import read_settings
    from hawker.cli import agents as agents

    for config in configs:
        running.load(read_settings(config))


# --- in the process itself -------------------------------------------------------------------------------------------


def _serve(sock: socket.socket) -> NoReturn:
    """Fork agents until whoever is at the other end of the socket has ended."""
    try:
        os.setsid()  # a terminal's signals are for `hawker dev`
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != sock.fileno():
                with suppress(OSError):  # it was of this very look
                    os.close(number)
        with suppress(ConnectionError):
            _fork_agents(sock)
    finally:
        os._exit(0)


def _fork_agents(sock: socket.socket) -> None:
    agents: dict[int, int] = {}  # by their descriptors
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        for number, _ in poll.poll():
            if number in agents:
                pid = agents.pop(number)
                poll.unregister(number)
                os.close(number)
                _, status = os.waitpid(pid, 0)
                sock.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            message, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                _be_agent(os.fsdecode(message), fds[0], [sock.fileno(), *agents])
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            agents[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(sock, [str(pid).encode()], [pidfd])


def _be_agent(config: str, log: int, inherited: Sequence[int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for number, is_now in ((null, 0), (log, 1), (log, 2)):
            os.dup2(number, is_now)
        for number in (null, log, *inherited):
            os.close(number)
        Path("/proc/self/comm").write_text(
            Path(config).stem[:15]
        )  # for ps and top, which show one command line for all
        words = ["agent", "--config", config]
        sys.orig_argv[1:] = ["-m", "hawker", *words]  # what an agent executes that begins anew in place
        from hawker.cli.main import run

        status = run(words)
        sys.stderr.flush()
    finally:
        os._exit(status)
