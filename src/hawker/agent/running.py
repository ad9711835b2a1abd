"""An agent's life as a process: signals, restarts in place, the watchdog, the service manager.

SIGTERM, SIGINT   ends it in order
SIGHUP            begins it anew in place, in order; in a terminal it is the terminal's end, and so the agent's
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from hawker.agent import restart
from hawker.agent.agent import Agent
from hawker.agent.service_manager import ServiceManager
from hawker.agent.settings import AgentSettings
from hawker.agent.watchdog import Report, Watchdog
from hawker.errors import HawkerError
from hawker.host import live
from hawker.listening import Listening
from hawker.telemetry import get_logger, set_up_logs

REPORT = "stalled"
"""A file of the agent's directory: the stacks of a program that ended because its loop stood still."""


async def run_agent(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps a role from starting."""
    past, sockets = restart.read(os.environ)
    await _Life(settings, past, Listening(sockets)).run()


class _Life:
    def __init__(self, settings: AgentSettings, past: restart.Past, listening: Listening) -> None:
        self._settings = settings
        self._past = past
        self._listening = listening
        self._manager = ServiceManager(os.environ)
        self._agent = Agent(settings, live(listening))
        self._stopping = asyncio.Event()
        self._restarting = asyncio.Event()

    async def run(self) -> None:
        set_up_logs(level=self._settings.log_level)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a proxy has two descriptors for each request
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._heed_signals()
        restart.reap_inherited()
        report = Report(self._settings.directory / REPORT)
        self._tell_of_stall(report)
        await self._agent.open()
        gc.freeze()  # what is there by now stays: looking at it again and again held all requests up for 0.1 s
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
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, (self._stopping if os.isatty(0) else self._restarting).set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, restart.SIGNALS)

    async def _called(self) -> asyncio.Event:
        """What is to be done."""
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
        """Returns if that is refused, or the agent was told to end meanwhile."""
        self._restarting.clear()
        self._manager.reloading()
        if why := await restart.refusal():
            _logger.error("restart.refused", why=why, cause="SIGHUP")
            self._manager.refused(why)
            return
        if self._stopping.is_set():
            return
        _logger.info("restart.begun", cause="SIGHUP")
        self._manager.leave_off()
        kept = [os.dup(number) for number in self._listening.numbers()]
        leaving = asyncio.get_running_loop().create_task(self._agent.retire())
        stopping = asyncio.get_running_loop().create_task(self._stopping.wait())
        await asyncio.wait((leaving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set():
            leaving.cancel()
            for number in kept:
                os.close(number)
            return
        await leaving
        await self._agent.close(restarting=True)
        watchdog.stop()
        self._execute(self._past, kept)

    def _execute(self, past: restart.Past, kept: list[int]) -> NoReturn:
        signal.pthread_sigmask(signal.SIG_BLOCK, restart.SIGNALS)
        for event, number in ((self._stopping, signal.SIGTERM), (self._restarting, signal.SIGHUP)):
            if event.is_set():
                os.kill(os.getpid(), number)  # the next one's to heed
        try:
            restart.execute(past, kept, self._manager.environment)
        except OSError as error:
            what = f"{sys.executable} cannot be executed: {error.strerror}"
            raise HawkerError(what, hint="start the agent again") from error

    def _stalled(self) -> NoReturn:
        """In the watchdog's thread."""
        restart.execute(self._past.stalled(time.monotonic()), self._listening.numbers(), self._manager.environment)

    def _tell_of_stall(self, report: Report) -> None:
        """Of the program before this one."""
        stacks = report.take()
        self._agent.metrics.loop_stalls.inc(self._past.stalls)
        if stacks:
            stalls = self._past.stalls
            _logger.error("loop.stalled", stalls=stalls, stacks=stacks.splitlines(), cause="watchdog of the event loop")


def check(settings: AgentSettings) -> None:
    """Import what an agent with this configuration needs. Raises what keeps it from starting, as far as that is to be
    known without starting it."""
    if settings.worker:
        import hawker.worker.daemon
    if settings.broker:
        import hawker.broker.api
    if settings.proxy:
        import hawker.proxy.service  # noqa: F401


_logger = get_logger()
