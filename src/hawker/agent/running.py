"""An agent's life as a process: signals, restarts in place, the watchdog, the service manager.

SIGTERM and SIGINT end it in order. SIGHUP restarts it in place, in order; in a terminal SIGHUP is the terminal's end,
and so the agent's.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Collection, Coroutine
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from hawker.agent import restart, worker_parts
from hawker.agent.agent import Agent
from hawker.agent.service_manager import ServiceManager
from hawker.agent.settings import AgentSettings
from hawker.agent.watchdog import Report, Watchdog
from hawker.errors import HawkerError, Invalid
from hawker.host import live
from hawker.listening import ALL, Listening, tell_of_accepts_once
from hawker.telemetry import get_logger, set_up_logs

_T = TypeVar("_T")
Address = tuple[str, int]

_NO_SUCH = (
    errno.EAFNOSUPPORT,
    errno.EADDRNOTAVAIL,
)  # one of a name's addresses is none of this host's: the name has others

REPORT = "stalled"
"""A file of the agent's directory: the stacks of a program that ended because its loop stood still."""


async def run_agent(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps a role from starting."""
    past, sockets = restart.read(os.environ)
    await _Life(settings, past, sockets).run()


class _Life:
    def __init__(self, settings: AgentSettings, past: restart.Past, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._past = past
        self._manager = ServiceManager(os.environ)
        self._listening = Listening(sockets, self._manager.forget)
        self._agent = Agent(settings, live(self._listening))
        self._stopping = asyncio.Event()
        self._restarting = asyncio.Event()
        self._events: dict[int, asyncio.Event] = {}  # by signal
        self._ear, self._told = socket.socketpair()  # numbers of signals, as soon as they come
        self._kept: list[int] = []  # sockets for the next program, while this one closes its own

    async def run(self) -> None:
        set_up_logs(level=self._settings.log_level)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a proxy has two descriptors for each request
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        tell_of_accepts_once(asyncio.get_running_loop(), _tell_of_accepts)
        self._heed_signals()
        try:
            await self._live()
        finally:
            self._heed_none()

    async def _live(self) -> None:
        restart.reap_inherited()
        report = Report(self._settings.directory / REPORT)
        self._tell_of_stall(report)
        await self._agent.open()
        gc.freeze()  # what is there by now stays: looking through it again and again held all requests up for 0.1 s
        watchdog = Watchdog(self._settings.watchdog_s * self._past.longer(time.monotonic()), report, self._stalled)
        self._agent.metrics.loop_lag.set_function(watchdog.lag_s)
        try:
            watchdog.start()
            self._manager.ready(self._listening)
            if self._past.ended_at:
                seconds = round(time.monotonic() - self._past.ended_at, 3)
                _logger.info("restart.done", seconds=seconds, cause="the program before this one")
            while await self._called() is self._restarting:
                await self._begin_anew(watchdog)
        finally:
            self._manager.stopping()
            await self._agent.close()
            watchdog.stop()
            report.close()
        if self._agent.failed.is_set():
            raise HawkerError("the database cannot be written", hint="look at the disk, then start the agent again")

    def _heed_signals(self) -> None:
        """Handle signals without `loop.add_signal_handler`: those that come while the loop stands still must reach the
        next program."""
        self._events = {signal.SIGTERM: self._stopping, signal.SIGINT: self._stopping}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            self._events[signal.SIGHUP] = self._stopping if os.isatty(0) else self._restarting
        for sock in (self._ear, self._told):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        asyncio.get_running_loop().add_reader(self._ear, self._hear)
        for number in self._events:
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, restart.SIGNALS)

    def _heed_none(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ear)
        signal.set_wakeup_fd(-1)
        for sock in (self._ear, self._told):
            sock.close()

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            for number in self._ear.recv(4096):
                if number in self._events:
                    self._events[number].set()

    def _unheeded(self) -> set[int]:
        """Signals that came and have had no effect yet. Any thread may call it."""
        self._hear()
        return {number for number, event in self._events.items() if event.is_set()} - {signal.SIGINT}

    async def _called(self) -> asyncio.Event:
        """Wait until something is to be done, and return what."""
        loop = asyncio.get_running_loop()
        events = (self._stopping, self._agent.failed, self._restarting)
        waits = [loop.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return next(event for event in events if event.is_set())

    async def _begin_anew(self, watchdog: Watchdog) -> None:
        """Restart. Returns if the restart is refused, or if the agent was told to end meanwhile."""
        self._restarting.clear()
        self._manager.reloading()
        why = await self._unless_stopped(restart.refusal(self._addresses()))
        if self._stopping.is_set():
            return
        if why:
            _logger.error("restart.refused", why=why, cause="SIGHUP")
            self._manager.refused(why)
            return
        _logger.info("restart.begun", cause="SIGHUP")
        self._manager.hold()
        self._kept = [os.dup(number) for number in self._listening.numbers()]
        await self._unless_stopped(self._agent.retire())
        if self._stopping.is_set():
            kept, self._kept = self._kept, []
            for number in kept:
                os.close(number)
            return
        await self._agent.close(restarting=True)
        watchdog.stop()
        try:
            self._execute(self._past)
        except OSError as error:
            what = f"{sys.executable} cannot be executed: {error.strerror}"
            raise HawkerError(what, hint="start the agent again") from error

    async def _unless_stopped(self, doing: Coroutine[Any, Any, _T]) -> _T | None:
        """What the work returns; None when the agent was told to end before the work was done."""
        loop = asyncio.get_running_loop()
        task, stopping = loop.create_task(doing), loop.create_task(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not self._stopping.is_set():
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    def _addresses(self) -> list[Address]:
        """Where this agent listens, and HAProxy for it: these addresses are free for the next program."""
        socks = (socket.socket(fileno=os.dup(number)) for number in self._listening.numbers())
        found = list[Address]()
        for sock in socks:
            with sock:
                found.append(sock.getsockname()[:2])
        return found + list(self._settings.addresses().values())

    def _execute(self, past: restart.Past) -> NoReturn:
        """Any thread may call it. Raises `OSError`."""
        kept = self._kept or self._listening.numbers()
        restart.execute(past, kept, self._manager.environment, self._unheeded)

    def _stalled(self) -> NoReturn:
        """Restart from the watchdog's thread."""
        self._execute(self._past.stalled(time.monotonic()))

    def _tell_of_stall(self, report: Report) -> None:
        """Log what the program before this one left, if its loop stood still."""
        stacks = report.take()
        self._agent.metrics.loop_stalls.inc(self._past.stalls)
        if stacks:
            stalls = self._past.stalls
            _logger.error("loop.stalled", stalls=stalls, stacks=stacks.splitlines(), cause="watchdog of the event loop")


ROLES = {
    "catalog": (
        "hawker.catalog.read.api",
        "hawker.catalog.engines",
        "hawker.model.calls",
        "cryptography.hazmat.primitives.ciphers.aead",
    ),
    "worker": ("hawker.worker.daemon", "hawker.worker.drivers.driver_set", "hawker.worker.lock"),
    "broker": ("hawker.broker.api", "hawker.broker.directory"),
    "proxy": ("hawker.proxy.service",),
}
"""What an agent imports for each role when it starts, beside what those modules import themselves, and what seals its
messages once it has a neighbour."""


def load(settings: AgentSettings) -> None:
    """Import what an agent with this configuration imports when it starts. Raises `Invalid` for a driver that does not
    exist, and what keeps a module from being imported."""
    for role in ("catalog", *settings.roles):
        for module in ROLES[role]:
            import_module(module)
    from hawker.catalog import engines

    engines.load(settings.catalog.engine)
    if settings.worker:
        worker_parts.load(settings.worker)


def check(settings: AgentSettings, held: Collection[Address] | None = None) -> None:
    """Import what an agent with this configuration needs. With `held`, also look whether it could listen: whoever
    listens at those addresses ends before it starts. Raises what keeps it from starting, as far as that can be known
    without starting it."""
    load(settings)
    if settings.proxy:
        from hawker.proxy import service

        service.check(settings.proxy, settings.directory)
    if settings.worker or not (settings.broker and settings.broker.workers):
        settings.advertised()
    if held is not None:
        for field, (host, port) in settings.addresses().items():
            if port and (host, port) not in held:
                _try_to_listen(field, host, port, {host for host, at in held if at == port})


def _try_to_listen(field: str, host: str, port: int, held: Collection[str]) -> None:
    """Raises `Invalid`. Somebody listens at the addresses `held` who will not listen there then."""
    found = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, number, _, at in found:
            if at[0] in held or (held and at[0] in ALL) or not ALL.isdisjoint(held):
                continue
            with socket.socket(family, kind, number) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(at)
    except OSError as error:
        if error.errno not in _NO_SUCH or len(found) == 1:
            raise Invalid(field, f"{host}:{port}", f"it cannot be listened at: {error.strerror or error}") from error


def _tell_of_accepts(error: str, count: int) -> None:
    remedy = "raise LimitNOFILE= of the service, or look who keeps so many connections"
    _logger.error("accept.failed", error=error, times=count, remedy=remedy, cause="no descriptor is left")


_logger = get_logger()
