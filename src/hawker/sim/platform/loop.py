"""An asyncio event loop on virtual time, for many processes at once: time passes only when nobody has anything to do.

Everything of asyncio runs on it unchanged. Connections, servers and datagrams go to a simulated network (`net`); a
function given to an executor runs at once. What is ready runs first in, first out, as asyncio promises, and tasks and
futures hash by the order of their birth, so one seed gives one order of events in every process and Python.

A killed process never runs again. The loop keeps its tasks as they are, so that, as after kill -9, none of its
`finally` blocks runs; `SimLoop.discard` takes them apart when the simulation is over. What is due for a paused process
waits until the process goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import logging
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from hawker.errors import HawkerError
from hawker.sim.platform.processes import PROCESS, Handled, Process

T = TypeVar("T")

STEPS_AT_ONCE_MAX = 2_000_000
"""If more callbacks run at one instant, a program spins without waiting for anything."""


CLOSES_MAX = 50
"""A task that is taken apart may be in so many `finally` blocks that await something."""
RESOLUTION_S = 1e-9
"""Timers this near to each other are due together, as in asyncio: sums of floats differ in their last digits."""


class Stalled(HawkerError):
    """Every task waits and no timer is due: nothing can ever happen again."""


class Unhandled(NamedTuple):
    """An error that nobody caught, as asyncio reports it."""

    at_s: float
    process: str
    message: str
    error: BaseException | None


class SimTask(asyncio.Task[T]):
    _born = 0

    def __init__(self, coro: Any, *, born: int, process: Process | None, **options: Any) -> None:
        self._born = born  # before asyncio puts it into its set of all tasks
        self.process = process
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._born


class SimFuture(asyncio.Future[T]):
    _born = 0

    def __hash__(self) -> int:
        return self._born


class Network(Protocol):
    """Where connections, servers and datagrams go."""

    async def connect(
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]: ...

    def listen(self, factory: Callable[[], Any], port: int) -> asyncio.AbstractServer: ...

    def bind(
        self, factory: Callable[[], Any], local: tuple[str, int] | None, remote: tuple[str, int] | None
    ) -> tuple[asyncio.DatagramTransport, asyncio.DatagramProtocol]: ...


class SimLoop(asyncio.AbstractEventLoop):
    """`steps` counts the callbacks that ran, `wakes` how often all waited until something was due; `unhandled`
    holds the errors that nobody caught in living processes."""

    def __init__(self) -> None:
        self.net: Network | None = None
        self.steps = 0
        self.wakes = 0
        self.unhandled: list[Unhandled] = []
        self._now = 0.0
        self._ready: deque[Handled] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Process | None]] = []
        self._births = itertools.count(1)
        self._running: Process | None = None
        self._is_running = False
        self._stopping = False
        self._closed = False
        self._discarding = False
        self._dead: list[Process] = []
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # --- processes ---------------------------------------------------------------------------------------------------

    def run_in(self, process: Process, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Make a task of a process from outside of it."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        return context.run(self.create_task, coro, name=name or process.name)

    def kill(self, process: Process) -> None:
        """End a process: nothing of it runs again. The process itself may call this; it ends when control returns
        here."""
        if process.dead:
            return
        process.dead = process.stopped = True
        process.tasks = [task for task in asyncio.all_tasks(self) if getattr(task, "process", None) is process]
        self._dead.append(process)

    def pause(self, process: Process) -> None:
        process.paused = process.stopped = True

    def resume(self, process: Process) -> None:
        if process.paused and not process.dead:
            process.paused = process.stopped = False
            process.went_on_s = self._now
            self._ready.extend(process.held)
            process.held = []

    def discard(self) -> None:
        """The simulation is over: take apart what is left of every process, living ones, too. Their effects must have
        nowhere to go any more."""
        self._discarding = True
        disabled, logging.root.manager.disable = (
            logging.root.manager.disable,
            logging.CRITICAL,
        )  # what dies now may log it
        left = [task for task in asyncio.all_tasks(self) if task is not asyncio.current_task(self)]
        left += [task for process in self._dead for task in process.tasks]
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # nobody will finish it, as intended
            _take_apart(task.get_coro())
        for process in self._dead:
            process.held.clear()
            process.tasks.clear()
        self._timers.clear()
        self._ready.clear()
        logging.root.manager.disable = disabled

    # --- time --------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # the stubs write the arguments with TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((handle, process))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._births), handle, process))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave the heap when they are due."""

    def _step(self) -> None:
        if not self._ready:
            self._advance()
            if not self._ready:
                return
        handle, process = self._ready.popleft()
        if handle.cancelled():
            return
        if process is not None and process.stopped:
            process.held.append((handle, process))
            return
        self.steps += 1
        self._running = process
        handle._run()

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Stalled("every task waits and no timer is due")
        self._now = max(self._now, timers[0][0])
        self.wakes += 1
        until = self._now + RESOLUTION_S
        while timers and timers[0][0] <= until:
            _, _, handle, process = heapq.heappop(timers)
            if not handle.cancelled():
                self._ready.append((handle, process))

    # --- tasks and futures -------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        future: SimFuture[Any] = SimFuture(loop=self)
        future._born = next(self._births)
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        if context is not None and PROCESS not in context:
            context.run(PROCESS.set, PROCESS.get())  # a fresh context is still of this process
        process = PROCESS.get() if context is None else context.get(PROCESS)
        task: SimTask[T] = SimTask(
            coro, born=next(self._births), process=process, loop=self, name=name, context=context, **options
        )
        if self._discarding:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coro.close()
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run at once, since threads would bring an order of their own."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # --- the network -------------------------------------------------------------------------------------------------

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> Any:
        if sock is not None:  # an end of `Net.dial`
            protocol = protocol_factory()
            sock.begin(protocol)
            return sock, protocol
        return await self._network().connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self._network().listen(protocol_factory, port)

    async def create_datagram_endpoint(
        self, protocol_factory: Any, local_addr: Any = None, remote_addr: Any = None, **options: Any
    ) -> Any:
        return self._network().bind(protocol_factory, local_addr, remote_addr)

    def _network(self) -> Network:
        if self.net is None:
            raise OSError("this simulation has no network")
        return self.net

    # --- running -----------------------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        previous, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()  # it would finalise things at a moment that differs between Pythons
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=lambda agen: None, finalizer=self._finalize)
        self._is_running, self._stopping = True, False
        try:
            at_s, since = self._now, self.steps
            while not self._stopping:
                self._step()
                if self._now != at_s:
                    at_s, since = self._now, self.steps
                elif self.steps - since > STEPS_AT_ONCE_MAX:
                    raise Stalled(f"more than {STEPS_AT_ONCE_MAX} callbacks at {at_s} s: a program spins")
        finally:
            self._is_running = False
            events._set_running_loop(previous)
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._done)
        try:
            self.run_forever()
        finally:
            task.remove_done_callback(self._done)
        if not task.done():
            raise RuntimeError("the loop was stopped before its future was done")
        return task.result()

    def _done(self, future: asyncio.Future[Any]) -> None:
        self.stop()

    def _finalize(self, agen: AsyncGenerator[Any, Any]) -> None:
        if self._discarding:
            return
        self.create_task(agen.aclose())

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    async def shutdown_asyncgens(self) -> None: ...

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None: ...

    def set_task_factory(self, factory: Any) -> None:
        if factory is not None:
            raise NotImplementedError

    def get_task_factory(self) -> None:
        return None

    # --- errors ------------------------------------------------------------------------------------------------------

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        self._handler = handler

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._discarding:
            return
        if self._handler:
            self._handler(self, context)
            return
        self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        process = self._running
        if process is None or not process.dead:
            name = process.name if process else ""
            self.unhandled.append(Unhandled(self._now, name, context["message"], context.get("exception")))


def _take_apart(awaitable: Any) -> None:
    """Close a coroutine from the inside out: the outer one would end at once when the inner one awaits in a `finally`,
    which nobody can any more, and Python would complain of the inner one."""
    for _ in range(CLOSES_MAX if hasattr(awaitable, "close") else 0):
        inner = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
        if inner is not None:
            _take_apart(inner)
        with suppress(BaseException):
            awaitable.close()
            return


def run(main: Callable[[SimLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` on a loop of its own, and take apart whatever it leaves.

    As `asyncio.run`, but the main task's end is everybody's.
    """
    loop = SimLoop()  # type: ignore[abstract]  # what it leaves out raises NotImplementedError, as asyncio's own base does
    events.set_event_loop(loop)

    async def all_of_it() -> T:
        try:
            return await main(loop)
        finally:
            loop.discard()

    try:
        return loop.run_until_complete(all_of_it())  # type: ignore[no-any-return]
    finally:
        loop.discard()
        loop.close()
        events.set_event_loop(None)
