"""The door to one machine: whether the machine runs and listens, as this proxy knows it, and the one start that all
requests wait for.

A worker's machines are behind the doors of its own proxy, and behind nobody else's. A door knows more than the rows of
the catalog: they tell late of a start that the door asked for, and never of a program that does not listen.

Stopping goes through the door, too: requests that come while the machine is being stopped wait for the end of the stop,
and have the machine started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from hawker.core.routing import Candidate
from hawker.errors import HawkerError, Unreachable
from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.backoff import Backoff
from hawker.proxy.base import NOBODY, Failure, Refused, Waiting
from hawker.proxy.catalog_view.index import Machine
from hawker.proxy.machines.calls import Calls, Declined
from hawker.proxy.machines.listen_probe import ListenProbe
from hawker.proxy.machines.states import leads_back, on_the_way, runs_on
from hawker.proxy.settings import RouterSettings
from hawker.telemetry import get_logger

RUNNING = State.started.value
ASLEEP = frozenset((State.stopped.value, State.suspended.value, State.failed.value))
AT_REST = frozenset(("stopping", "stopped", "suspending", "suspended"))
BELIEVED_S = 5.0
"""For this long a worker's answer counts more than its rows: they come within milliseconds, or within seconds when the
catalog is in trouble."""
SETTLED_S = 0.02
"""A request that has a lease has begun to connect after this long."""
AGAIN_S = 0.25
"""The pause after a worker did not answer."""
ASK_AGAIN_S = 1.0
"""How often a worker is asked whether a program still runs that does not listen."""
STARTS_MOST = 3
"""How often one batch of requests has a program started that ends before it listens."""
START_AGAIN_MOST_S = 60.0


class NotOpened(Refused):
    """The machine does not take requests. `again`: it may, a little later."""

    def __init__(self, code: str, message: str, retry_after_s: int, *, again: bool = False) -> None:
        super().__init__(503, code, message, retry_after_s=retry_after_s)
        self.again = again


class Door:
    """One machine of a worker. `calls` reach that worker; `endpoints` are the machine's in the groups of its app, which
    the app table sets."""

    def __init__(
        self,
        machine: Machine,
        calls: Calls,
        settings: RouterSettings,
        listen_probe: ListenProbe,
        changed: Callable[[Door], None],
        withdraw: Callable[[str], Awaitable[bool]],
        hang_up: Callable[[Endpoint, bool], None],
    ) -> None:
        """`changed` is called when a start has succeeded or failed: requests that wait for room may look again.
        `withdraw` takes the machine from whoever carries requests past this proxy; False: some are still under way.
        `hang_up` ends connections to it that carry nothing; when it rests, also those that have no answer yet."""
        self.machine = machine
        self.calls = calls
        self.endpoints: dict[int, Endpoint] = {}  # by internal port
        self.instance = ""
        self._now = asyncio.get_running_loop().time
        self.used_at = self._now()  # when the last request ended
        self.phases: dict[str, float] = {}
        self._settings = settings
        self._listen_probe = listen_probe
        self._changed = changed
        self._withdraw = withdraw
        self._hang_up = hang_up
        self._opening: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[words.Awake] | None = None  # the last run whose program was released
        self._resting: asyncio.Future[Any] | None = None
        self._believed: tuple[str, float] | None = None  # a state that the worker told, and until when it counts
        self._seen = asyncio.Event()  # set when a row comes
        self._shown = False  # whether a row has told of a start since one was asked for last
        self._left = False  # whether one has told since then that the machine does not run on, or may have
        self._waits_for = ""
        self._failed_starts = 0
        self._backoff = Backoff(settings.trouble_s)
        self.row(machine)

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """The requests at the machine, and those that wait for its start."""
        return sum(endpoint.entry.in_flight for endpoint in self.endpoints.values())

    @property
    def state(self) -> str:
        if self._believed is not None and asyncio.get_running_loop().time() < self._believed[1]:
            return self._believed[0]
        return self.machine.state

    @property
    def opening(self) -> bool:
        return self._opening is not None

    @property
    def at_rest(self) -> bool:
        """Whether the machine sleeps in order, or is on its way there, and nobody has it started."""
        return self._opening is None and self.state in AT_REST

    @property
    def _held(self) -> bool:
        """Whether a start has released its program and its worker is not done with the start. Until then nobody else
        can have changed the machine, and its row tells of the time before."""
        return self._starting is not None and not self._starting.done()

    @property
    def closing(self) -> bool:
        return self._resting is not None

    def row(self, machine: Machine) -> None:
        """Take the catalog's row, new or changed."""
        before, self.machine = self.machine, machine
        if self._believed is not None and machine.state != before.state:
            believed = self._believed[0]
            if machine.state == believed or not on_the_way(before.state, machine.state, believed):
                self._believed = None
        if machine.state == RUNNING and before.state != RUNNING:
            self.used_at = asyncio.get_running_loop().time()
            self._shown |= not self._held
        if machine.state not in (RUNNING, before.state) and not self._held:
            self._left |= leads_back(before.state, machine.state)
            asleep = machine.state in ASLEEP
            self._no_connections(asleep=asleep)
            if asleep:  # and those that requests with a lease had yet to open
                asyncio.get_running_loop().call_later(SETTLED_S, self._still_asleep)
        self._seen.set()

    def candidate(self, row: Candidate) -> Candidate:
        """The row, corrected by what the door knows better."""
        return row if row.state == self.state else replace(row, state=self.state)

    def _no_connections(self, *, asleep: bool = False) -> None:
        for endpoint in self.endpoints.values():
            self._hang_up(endpoint, asleep)

    def _still_asleep(self) -> None:
        if self._opening is None and self.state in ASLEEP:
            self._no_connections(asleep=True)

    def _trust_rows(self) -> None:
        if self._believed is not None:
            self._believed = None
            self._put()

    def _believe(self, state: str) -> None:
        loop = asyncio.get_running_loop()
        self._believed = state, loop.time() + BELIEVED_S
        loop.call_later(BELIEVED_S + 0.01, self._put)
        self._put()

    def _put(self) -> None:
        for endpoint in self.endpoints.values():
            if endpoint.entry.home is not None:
                endpoint.pool.put(self.candidate(endpoint.entry.row))

    def _show_waking(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.pool.waking(endpoint.entry, self._opening is not None)

    # --- what requests meet ------------------------------------------------------------------------------------------

    def failed(self, endpoint: Endpoint, how: Failure) -> None:
        """Look at a machine that refuses connections, or breaks them before an answer, until it takes some. Leave one
        alone for a while that runs and is silent."""
        loop = asyncio.get_running_loop()
        self.used_at = loop.time()
        if self._opening is not None:
            return
        if self.state == RUNNING:
            if how in ("refused", "reset") or self.machine.state != RUNNING:  # the row says that it sleeps: it may
                self.open()
                return
        elif self.at_rest:  # it was put to sleep while it was asked, which is no failure
            return
        endpoint.pool.rest(endpoint.entry, self._backoff.failed(loop.time()), spare=True)

    def answered(self, endpoint: Endpoint) -> None:
        self._backoff.over()
        self.used_at = self._now()  # to ask for the running loop costs a system call

    def heard(self, endpoint: Endpoint, load: bytes) -> None:
        """The pool counts what is in flight here by itself: a door needs no answer's word for that."""

    # --- starting ----------------------------------------------------------------------------------------------------

    def open(self, request: Waiting = NOBODY, why: str = words.AUTOSTART) -> asyncio.Task[None]:
        """Begin to have the machine take requests, unless that is under way."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(
                self._open(request, why), name=f"open {self.machine.id}"
            )
            self._opening.add_done_callback(_look_at_error)
            self._show_waking()
        return self._opening

    async def opened(self, deadline: float, request: Waiting = NOBODY) -> None:
        """Wait until the machine takes requests. Raises `NotOpened`, and `TimeoutError` at the deadline."""
        opening = self.open(request)
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(opening)

    async def close(self) -> None:
        """Stop looking at the machine; whoever waits is cancelled."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    async def _open(self, request: Waiting, why: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            if self._resting is not None:
                await asyncio.wait((self._resting,))
            async with asyncio.timeout(self._settings.ready_s):
                for _ in range(STARTS_MOST):
                    started, awake = await self._start_until_it_listens(request, why)
                    if not awake.checked or await self._until_it_passes():
                        break
                else:
                    text = f"machine {self.machine.id} has ended {STARTS_MOST} times before its checks passed"
                    raise NotOpened("PR03", text, self._settings.retry_after_s)
        except TimeoutError:
            text = f"machine {self.machine.id}: {self._waits_for}, for {self._settings.ready_s:g} s"
            raise self._not_opened(NotOpened("PR03", text, self._settings.retry_after_s)) from None
        except NotOpened as error:
            raise self._not_opened(error) from error.__cause__
        else:
            self.used_at = loop.time()
            self.phases = {"start": started - began, "ready": self.used_at - started}
            self._failed_starts = 0
            self._backoff.over()
            if self.machine.state == RUNNING and (self._shown or awake.before == RUNNING):
                self._trust_rows()  # they have caught up, and tell at once of a stop that is not this proxy's
            else:
                self._believe(RUNNING)
        finally:
            self._opening = None
            self._show_waking()
            self._changed(self)

    async def _until_it_passes(self) -> bool:
        """Whether the machine's program still runs. The results of its checks begin with the program, and are gone when
        it has ended. False: it has ended or is about to, since somebody stops the machine, or an update does that found
        it running."""
        self._waits_for = "its checks do not pass"
        while not (self.machine.state == RUNNING and self.machine.checked and not self.machine.failing):
            if self._left:
                return False
            self._seen.clear()
            await self._seen.wait()
        return True

    async def _start_until_it_listens(self, request: Waiting, why: str) -> tuple[float, words.Awake]:
        """Have the machine started. Returns when it was started last, and what the worker said."""
        loop = asyncio.get_running_loop()
        starts = 0
        listened: tuple[float, words.Awake] | None = None
        while True:
            released: asyncio.Future[words.Awake] = loop.create_future()
            starting = loop.create_task(self._start(request, why, released), name=f"start {self.machine.id}")
            starting.add_done_callback(partial(_pass_on, released))
            try:
                awake = await released
                if listened is not None and runs_on(awake, listened[1]) and not self._left:
                    return listened
                started = loop.time()
                self._starting = starting  # its worker may still be about to say that it runs
                self.instance = awake.instance
                self._waits_for = "it runs and takes no connection"
                if awake.before != RUNNING:
                    starts += 1
                if starts > STARTS_MOST:
                    raise NotOpened(
                        "PR03",
                        f"machine {self.machine.id} has ended {STARTS_MOST} times before it took a connection",
                        self._settings.retry_after_s,
                    )
                listened = (started, awake) if await self._listens(starting) else None
                if listened is not None and (self._held or not self._left):
                    return listened
                await starting  # what listens may be on its way out, or its row is late: its worker is asked again
            except BaseException:
                starting.cancel()
                raise

    async def _listens(self, starting: asyncio.Future[words.Awake]) -> bool:
        """Whether the machine takes connections within a while. Raises what `starting` raises."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_AGAIN_S):
                for endpoint in list(self.endpoints.values()):
                    endpoint.address = await self._listen_probe.until_listening(endpoint.addresses, starting)
                return True
        return False

    async def _start(self, request: Waiting, why: str, released: asyncio.Future[words.Awake]) -> words.Awake:
        """Ask the worker to start the machine. `released` gets what the worker will say as soon as the program may be
        looked for."""

        def told(awake: words.Awake) -> None:
            if not released.done():
                released.set_result(awake)

        app, machine = self.machine.app, self.machine.id
        wish = words.Wake(app=app, machine=machine, request=request.id, trace=request.trace, why=why)
        self._waits_for = "its worker does not start it"
        self._shown = self._left = False  # what is told of a start from here on is told of this one, or a later one
        while True:
            try:
                return await self.calls.wake(wish, told)
            except Unreachable as error:
                self._waits_for = f"its worker does not answer ({error.message})"
                _logger.info("door.worker_silent", machine=wish.machine, error=error.message, cause=why)
                await asyncio.sleep(AGAIN_S)
            except HawkerError as error:
                raise _declined(error, self._settings.retry_after_s) from error

    def _not_opened(self, error: NotOpened) -> NotOpened:
        """The start has failed: leave the machine alone for a while."""
        loop = asyncio.get_running_loop()
        seconds = min(self._settings.start_again_s * 2**self._failed_starts, START_AGAIN_MOST_S)
        self._failed_starts = min(self._failed_starts + 1, 10)
        _logger.warning("door.not_opened", machine=self.machine.id, code=error.code, error=error.message)
        for endpoint in self.endpoints.values():
            endpoint.pool.rest(endpoint.entry, loop.time() + seconds)
        return error

    # --- stopping ----------------------------------------------------------------------------------------------------

    def rests(self, state: str) -> None:
        """The worker stops or suspends the machine, or has done so, and this proxy did not ask for it. Rows tell of
        that, too, some of them late."""
        if self.state == RUNNING and self._opening is None and self._resting is None:
            self._believe("suspending" if state in ("suspending", "suspended") else "stopping")
            self._no_connections()

    def keep_closed(self, closed: bool) -> None:
        """Give the machine no request that another machine can take."""
        for endpoint in self.endpoints.values():
            endpoint.pool.closing(endpoint.entry, closed)

    async def rest(self, how: Literal["stop", "suspend"]) -> bool:
        """Stop or suspend the machine if nothing is in flight. False: it runs on. Requests that come meanwhile wait
        and have it started again."""
        if self.in_flight or self._opening is not None or self._resting is not None or self.state != RUNNING:
            return False
        self._resting = asyncio.get_running_loop().create_future()
        kept_closed = any(endpoint.entry.closing for endpoint in self.endpoints.values())
        self.keep_closed(True)
        wish = words.Rest(app=self.machine.app, machine=self.machine.id, how=how, instance=self.instance)
        try:
            if not await self._withdraw(self.machine.id) or self.in_flight:
                return False
            self._no_connections()
            resting = await self.calls.rest(wish)
        except HawkerError as error:
            _logger.info("door.not_rested", machine=wish.machine, error=error.message, cause=words.AUTOSTOP)
            self.instance = ""  # it may be another one by now: the program was started again after it failed
            return False
        else:
            # A start waits for the end of such a state: the row with the truth is on its way.
            self._believe("suspending" if resting.state == "suspended" else "stopping")
            return True
        finally:
            self.keep_closed(kept_closed and self.state == RUNNING)
            self._resting.set_result(None)
            self._resting = None
            self._changed(self)


def _declined(error: HawkerError, retry_after_s: int) -> NotOpened:
    """A worker's refusal in the words of a proxy."""
    details = error.details if isinstance(error.details, dict) else {}
    if "expires_at_ms" in details:
        return NotOpened("PM01", error.message, retry_after_s)
    if error.code in ("in_backoff", "busy", "parked", "insufficient_capacity"):
        return NotOpened("PM11", error.message, retry_after_s, again=error.code in ("in_backoff", "busy"))
    if isinstance(error, Declined) and error.status in (404, 421):
        return NotOpened("PR02", error.message, retry_after_s)
    return NotOpened("PR03", error.message, retry_after_s)


def _look_at_error(task: asyncio.Task[None]) -> None:
    """Look at an error that nobody may be waiting for: asyncio complains of those that nobody has looked at."""
    if not task.cancelled():
        task.exception()


def _pass_on(released: asyncio.Future[words.Awake], starting: asyncio.Task[words.Awake]) -> None:
    """Tell whoever waits for the program to be released what came of the start. If a start fails after its program has
    taken a connection, the machine's row tells of that."""
    error = None if starting.cancelled() else starting.exception()
    if released.done():
        return
    if starting.cancelled():
        released.cancel()
    elif error is not None:
        released.set_exception(error)
    else:
        released.set_result(starting.result())


_logger = get_logger()
