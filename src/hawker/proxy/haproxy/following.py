"""HAProxy follows what is lent and wished for: it is told of apps and machines, and what is in flight is looked at.

following = Following(process, table, delegator, carried_requests.add, settings, serve, names, connections)
following.begin()
following.answered(80, "web.example", b"GET", route)
...
await following.close()
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress

from hawker.core.retrying import SAFE
from hawker.errors import HawkerError, Unreachable
from hawker.proxy.base import Route, ServicePort
from hawker.proxy.delegation import Delegator
from hawker.proxy.embedded.context import Connection
from hawker.proxy.haproxy.carried import HOSTS_MOST, NOTHING, Carried, Key, Table, fits, forgetting, naming
from hawker.proxy.haproxy.config import Server, carries
from hawker.proxy.haproxy.names import Names
from hawker.proxy.haproxy.process import NotStarted, Process
from hawker.proxy.haproxy.runtime import INTERIM, Usage, adding, closing, emptying, opening
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.wished import Wish, Wished
from hawker.telemetry import get_logger

EMPTY_S = 60.0
"""How long an app without machines keeps its backend: it is likely to be asked for again."""
WITHDRAW_S = 0.25
"""How long a machine is waited for to come to rest, when it is wished back."""
KEPT_S = 2.0
"""And how much longer if nothing is in flight, until HAProxy has closed the connections that it keeps."""
ALL_S = 5.0
"""How often all that is carried is looked at, whatever is said to have changed."""
AGAIN_S = 1.0
"""After HAProxy could not be started."""
EVERYWHERE = 5
"""Every so many looks are at all backends, which takes HAProxy as long as thirty requests; the others, at those where
something was in flight."""


class Following:
    """`begin`, then `close`. `serve` has HAProxy started, or reloaded, with what `table` has. `count` is told of
    answers, of each of `CLASSES`, since the last time. `names` are those that it ends TLS for, None: it has no port
    with TLS. `connections` are the embedded plane's. Who says something to HAProxy holds `lock`."""

    def __init__(
        self,
        process: Process,
        table: Table,
        delegator: Delegator,
        count: Callable[[Sequence[int]], None],
        settings: HaproxySettings,
        serve: Callable[[], Awaitable[None]],
        names: Names | None,
        connections: Container[Connection],
    ) -> None:
        self.lock = asyncio.Lock()
        self._process = process
        self._runtime = process.runtime
        self._table = table
        self._delegator = delegator
        self._count = count
        self._settings = settings
        self._serve = serve
        self._names = names
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._wished = Wished()
        self._avoiding: set[str] = set()  # apps
        self._dirty: set[str] = set()  # apps
        self._failing: set[str] = set()  # apps
        self._all_at = 0.0
        self._busy: list[Carried] = []
        self._everywhere_at = 0.0
        self._stirred = asyncio.Event()
        self._ends = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """May be called again."""
        if self._runner is None:
            self._delegator.delegate_to(self)
            self._runner = self._loop.create_task(self._run(), name="haproxy")

    async def close(self) -> bool:
        """Whether it had begun. A reload is not cut off: what is said to HAProxy in the middle of one is lost."""
        self._ends.set()
        runner, self._runner = self._runner, None
        if runner is None:
            return False
        self._delegator.delegate_to(None)
        self._stirred.set()
        await runner
        return True

    def stir(self) -> None:
        """Something is otherwise: look at once."""
        self._stirred.set()

    # --- what is said to us ------------------------------------------------------------------------------------------

    def answered(self, port: int, host: str, method: bytes, route: Route) -> None:
        """A machine has answered through the activator: the app's next requests may pass without it. Of those that
        change something the first is always the activator's: an app hands such on from the beginning, or never."""
        key = route.app, port
        self.asked(port, host, route)
        writing = method not in SAFE
        known = self._table.carried.get(key)
        if known is not None and not known.leaving:
            if len(known.hosts) >= HOSTS_MOST and host not in known.hosts:
                return
            if host in (known.writing if writing else known.hosts) and host not in known.untold[writing]:
                return
        if route.app in self._avoiding or not fits(route.port, host, tls=self._tls(port)):
            return
        if self._wished.add(key, host, writing=writing):
            self._stirred.set()

    def asked(self, port: int, name: str, route: Route) -> None:
        """For this name: TLS may end before us the next time."""
        if self._names is not None and self._names.asked(port, name, route.app):
            self._stirred.set()

    def secured(self, connection: Connection, port: int, name: str, route: Route) -> None:
        """The same, and here is a connection that came to us before."""
        if self._names is not None and fits(route.port, name, tls=True):
            self._names.early(port, name, connection)
            self.asked(port, name, route)

    def _tls(self, port: int) -> bool:
        return self._names is not None and port in self._names.ports

    def avoid(self, app: str) -> None:
        """All requests of the app pass the activator from now on."""
        if app not in self._avoiding:
            self._avoiding.add(app)
            self.changed(app)

    def changed(self, app: str) -> None:
        """As of `Delegate`."""
        self._dirty.add(app)
        if self._names is not None:
            self._names.changed(app)
        self._stirred.set()

    async def withdraw(self, machine: str) -> bool:
        """Whether HAProxy has no request at this machine, and gives it none any more."""
        async with self.lock:
            try:
                having = [each for each in self._table.carried.values() if machine in each.machines]
                await self._runtime.do([line for each in having for line in closing(each.backend, machine)])
                for carried in having:
                    carried.machines[machine].open = False
                deadline = self._now() + WITHDRAW_S
                while True:
                    for carried in having:
                        await self._take_out(carried, [machine])
                    having = [each for each in having if machine in each.machines]
                    if not having:
                        return True
                    in_flight = any(each.machines[machine].now for each in having)
                    if self._now() >= deadline + (0.0 if in_flight else KEPT_S):
                        return False
                    await asyncio.sleep(self._settings.look_s / 5)
            except Unreachable:
                for carried in self._table.carried.values():
                    if known := carried.machines.get(machine):
                        known.leaving = True  # who knows
                return False
            finally:
                self._stirred.set()

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        looked_s = 0.0
        while True:
            with suppress(TimeoutError):
                # A tenth of the time at most, however many apps there are.
                pause_s = self._settings.look_s * (1 if self._busy else EVERYWHERE)
                async with asyncio.timeout(max(pause_s, 9 * looked_s)):
                    await self._stirred.wait()
            if self._ends.is_set():
                return
            self._stirred.clear()
            try:
                async with self.lock:
                    if self._process.config is None:
                        await self._serve()
                    begun = self._now()
                    await self._look()
                    looked_s = min(self._now() - begun, 0.1)
                    await self._follow()
            except HawkerError as error:
                _logger.warning("haproxy.not_followed", error=error.message, cause="HAProxy")
                await self._pause()
            except Exception:  # the loop goes on: without it machines that run are never stopped
                _logger.exception("haproxy.fault", cause="a fault of ours")
                await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self._ends.wait()

    async def _look(self) -> None:
        """At what is in flight."""
        if self._runtime.old:
            await self._runtime.refresh()
        if not self._busy or self._runtime.old or self._now() >= self._everywhere_at:
            self._everywhere_at = self._now() + EVERYWHERE * self._settings.look_s
            self._busy = await self._moving()
        looked_at = [each for each in self._busy if self._table.carried.get(each.key) is each]
        if looked_at:
            self._dirty.update(carried.key[0] for carried in looked_at)
            usage = await self._runtime.usage([carried.backend for carried in looked_at])
            for carried in looked_at:
                self._told(carried, usage[carried.backend])

    async def _moving(self) -> list[Carried]:
        """Where something is in flight, or has been since the last time, or is not as it should be."""
        busy = await self._runtime.busy()
        found: list[Carried] = []
        for carried in self._table.carried.values():
            now, total, act = busy.get(carried.backend, (0, 0, 0))
            moved = total != carried.total
            carried.total = total
            in_flight = any(machine.now for machine in carried.machines.values())
            if now or moved or in_flight or carried.leaving or act < carried.open or self._runtime.old:
                found.append(carried)
        return found

    def _told(self, carried: Carried, usage: dict[str, Usage]) -> None:
        answers = carried.answered(usage)
        self._count(answers)
        if answers[INTERIM]:
            self.avoid(carried.key[0])
        told, down = carried.seen(usage)
        for name, moved in told:
            machine = carried.machines[name]
            self._delegator.filled(*carried.key, name, machine.slots if machine.open else 0, machine.now, moved)
        for name in down:
            self._delegator.refused(*carried.key, name)

    async def _follow(self) -> None:
        """What has changed."""
        if self._now() >= self._all_at:
            self._all_at = self._now() + ALL_S
            self._process.trim()
            self._dirty.update(app for app, _ in self._table.carried)
        dirty, self._dirty = self._dirty, set()
        wished = self._wished.taken()
        try:
            for carried in [each for each in self._table.carried.values() if each.key[0] in dirty]:
                await self._apart(carried.key[0], self._follow_one(carried))
            for key, wish in wished.items():
                await self._apart(key[0], self._take(key, wish))
        except HawkerError as error:
            self._dirty |= dirty
            if isinstance(error, Unreachable):  # it may be busy
                for key, wish in wished.items():
                    self._wished.again(key, wish)
            raise
        if self._names is not None:
            await self._names.follow(self._table.carried, self._connections)

    async def _apart(self, app: str, following: Awaitable[None]) -> None:
        """What goes wrong with one app is its own. Raises what goes wrong with HAProxy."""
        try:
            await following
        except HawkerError:
            raise
        except Exception:
            if app not in self._failing:
                _logger.exception("haproxy.fault", app=app, cause="a fault of ours")
            self._failing.add(app)
        else:
            self._failing.discard(app)

    async def _follow_one(self, carried: Carried) -> None:
        app, port = carried.key
        delegation = self._delegator.delegation(app, port)
        kind = self._table.kinds[int(carried.backend[1:].partition("b")[0])]
        if delegation is None or delegation.service != kind.service or app in self._avoiding:
            carried.leaving = True
        machines = {} if delegation is None or carried.leaving else delegation.machines
        if not machines and not carried.leaving:
            carried.empty_since = carried.empty_since or self._now()
            carried.leaving = self._now() - carried.empty_since > EMPTY_S
        elif machines:
            carried.empty_since = None
        if carried.leaving and carried.hosts:
            assert self._process.config is not None
            await self._runtime.do(forgetting(self._process.config, carried))
            carried.hosts, carried.writing = set(), set()
        before = set(carried.machines)
        wanted, unwanted = carried.steps(machines)
        for server in wanted:
            known = carried.machines[server.machine]
            known.open = known.leaving = True  # until HAProxy has said that it has it
            self._delegator.filled(app, port, server.machine, server.slots, known.now, False)
        for server in wanted:
            await self._open(carried, server, known=server.machine in before)
        if unwanted:
            await self._runtime.do([line for name in unwanted for line in closing(carried.backend, name)])
            for name in unwanted:
                machine = carried.machines[name]
                machine.open = False
                self._delegator.filled(app, port, name, 0, machine.now, False)
        tried = {server.machine for server in wanted}
        if left := [name for name in carried.left(machines) if name not in tried]:
            await self._take_out(carried, left)
            if any(name in machines and name not in carried.machines for name in left):
                self.changed(app)  # it has moved: look at it again at once
        if carried.leaving and not carried.machines:
            self._table.give_back(carried)

    async def _open(self, carried: Carried, server: Server, *, known: bool) -> None:
        """Workers from before a reload need not be told: what they have may be where the machine was."""
        problems = ["it is new"]
        if known:
            problems = await self._runtime.do(opening(carried.backend, server), old=False)
        if problems:  # or it was not given requests when HAProxy was begun anew
            problems = await self._runtime.do(adding(carried.backend, server), old=False)
        machine = carried.machines[server.machine]
        machine.leaving = bool(problems)
        if problems:
            machine.open = False
            self._delegator.filled(*carried.key, server.machine, 0, machine.now, False)
            _logger.warning("haproxy.not_added", machine=server.machine, said=problems[0], cause="a machine has room")

    async def _take_out(self, carried: Carried, names: list[str]) -> None:
        """Machines that are given no requests, once HAProxy has no connection to them. One that it keeps would be used
        for whatever has the machine's name next, wherever that is, and one on which something is under way is kept
        afterwards: only when HAProxy lets go of a machine, there is none of either."""
        backend = carried.backend
        self._told(carried, (await self._runtime.usage([backend]))[backend])
        idle = [name for name in names if not carried.machines[name].now]
        gone = await self._runtime.remove(backend, idle)
        if kept := [name for name in idle if name not in gone]:
            for name in kept:
                carried.machines[name].leaving = True
            await self._runtime.do([line for name in kept for line in emptying(backend, name)])
            gone += await self._runtime.remove(backend, kept)
        for name in gone:
            del carried.machines[name]
        if len(gone) < len(names):
            self._dirty.add(carried.key[0])  # at the next look
            if carried not in self._busy:
                self._busy.append(carried)

    async def _take(self, key: Key, wish: Wish) -> None:
        """Let HAProxy carry an app, or another host of one, or more of what is asked of it."""
        carried = self._table.carried.get(key)
        if carried is not None and carried.leaving:
            if key[0] not in self._avoiding:
                self._wished.again(key, wish)  # it is about to be given back
            return
        if carried is None:
            delegation = self._delegator.delegation(*key)
            if delegation is None or not delegation.machines or not carries(delegation.service, tls=self._tls(key[1])):
                return
            carried = self._table.take(key, delegation.service)
            if carried is None:
                before = self._table.kinds_now()
                if not self._room(key[1], delegation.service):
                    return
                try:
                    await self._serve()
                except NotStarted:
                    self._table.restore_kinds(before)  # it may be these that HAProxy does not take
                    raise
                carried = self._table.take(key, delegation.service)
                assert carried is not None  # there is room now
            await self._follow_one(carried)
        config = self._process.config
        assert config is not None
        hosts = ((wish.hosts | wish.writing) - carried.hosts) | carried.untold[0]
        writing = (wish.writing - carried.writing) | carried.untold[1]
        carried.hosts |= hosts  # when it leaves, HAProxy is to forget also those that it was perhaps told of
        carried.writing |= writing
        carried.untold = hosts, writing
        commands = naming(config, carried, hosts, writing=False) + naming(config, carried, writing, writing=True)
        if problems := await self._runtime.do(commands):
            _logger.warning("haproxy.not_mapped", app=key[0], said=problems[0], cause="an app is served")
        carried.untold = NOTHING, NOTHING

    def _room(self, port: int, service: ServicePort) -> bool:
        """Make twice as many backends of a kind, or a kind."""
        kind = self._table.kind_of(port, service)
        more = kind.count if kind else 8
        if self._table.size + more > self._settings.backends_most:
            return kind is None and self._table.renew(port, service)
        self._table.grow(port, service, more)
        return True


_logger = get_logger()
