"""Brings HAProxy to where it should be: tells it of apps and machines, and looks at what is in flight there.

reconciler = Reconciler(process, table, delegator, carried_requests.add, settings, serve, names, connections)
reconciler.begin()
reconciler.answered(80, "web.example", b"GET", route)
...
await reconciler.close()
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
from hawker.proxy.haproxy.backends import HOSTS_MOST, NOTHING, Backend, BackendTable, Key, fits, forgetting, naming
from hawker.proxy.haproxy.config import Server, carries
from hawker.proxy.haproxy.pending import Pending, PendingHosts
from hawker.proxy.haproxy.process import NotStarted, Process
from hawker.proxy.haproxy.runtime import INTERIM, Usage, adding, closing, emptying, opening
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.tls_names import TlsNames
from hawker.telemetry import get_logger

EMPTY_S = 60.0
"""How long an app without machines keeps its backend: it is likely to be asked for again."""
WITHDRAW_S = 0.25
"""How long `withdraw` waits until no request is in flight at the machine."""
KEPT_S = 2.0
"""How much longer it waits if nothing is in flight, until HAProxy has closed the connections that it keeps."""
ALL_S = 5.0
"""How often all backends are compared, whatever is said to have changed."""
AGAIN_S = 1.0
"""The pause after HAProxy could not be started."""
EVERYWHERE = 5
"""One of so many looks is at all backends, which takes HAProxy as long as thirty requests; the others are at those
where something was in flight."""


class Reconciler:
    """`begin`, then `close`. `serve` has HAProxy started, or reloaded, with what `table` has. `count` is told of
    answers, of each of `CLASSES`, since the last time. `names` are those that it ends TLS for, None: it has no port
    with TLS. `connections` are the embedded plane's. Who says something to HAProxy holds `lock`."""

    def __init__(
        self,
        process: Process,
        table: BackendTable,
        delegator: Delegator,
        count: Callable[[Sequence[int]], None],
        settings: HaproxySettings,
        serve: Callable[[], Awaitable[None]],
        names: TlsNames | None,
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
        self._tls_names = names
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._pending = Pending()
        self._avoiding: set[str] = set()  # apps
        self._dirty: set[str] = set()  # apps
        self._failing: set[str] = set()  # apps
        self._all_at = 0.0
        self._busy: list[Backend] = []
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
        """Returns whether it had begun. A reload is not cut off: what HAProxy is told in the middle of one is lost."""
        self._ends.set()
        runner, self._runner = self._runner, None
        if runner is None:
            return False
        self._delegator.delegate_to(None)
        self._stirred.set()
        await runner
        return True

    def stir(self) -> None:
        """Something is different: look at once."""
        self._stirred.set()

    # --- what is said to us ------------------------------------------------------------------------------------------

    def answered(self, port: int, host: str, method: bytes, route: Route) -> None:
        """A machine has answered through the activator: HAProxy may get the app's next requests. The first one that
        changes something is always the activator's: an app hands such requests on from the beginning, or never."""
        key = route.app, port
        self.asked(port, host, route)
        writing = method not in SAFE
        known = self._table.backends.get(key)
        if known is not None and not known.leaving:
            if len(known.hosts) >= HOSTS_MOST and host not in known.hosts:
                return
            if host in (known.writing if writing else known.hosts) and host not in known.untold[writing]:
                return
        if route.app in self._avoiding or not fits(route.port, host, tls=self._tls(port)):
            return
        if self._pending.add(key, host, writing=writing):
            self._stirred.set()

    def asked(self, port: int, name: str, route: Route) -> None:
        """TLS was asked for with this name: HAProxy may end it the next time."""
        if self._tls_names is not None and self._tls_names.asked(port, name, route.app):
            self._stirred.set()

    def secured(self, connection: Connection, port: int, name: str, route: Route) -> None:
        """TLS was asked for with this name, on this connection to the embedded plane."""
        if self._tls_names is not None and fits(route.port, name, tls=True):
            self._tls_names.early(port, name, connection)
            self.asked(port, name, route)

    def _tls(self, port: int) -> bool:
        return self._tls_names is not None and port in self._tls_names.ports

    def avoid(self, app: str) -> None:
        """All requests of the app pass the activator from now on."""
        if app not in self._avoiding:
            self._avoiding.add(app)
            self.changed(app)

    def changed(self, app: str) -> None:
        """Does what `Delegate` says."""
        self._dirty.add(app)
        if self._tls_names is not None:
            self._tls_names.changed(app)
        self._stirred.set()

    async def withdraw(self, machine: str) -> bool:
        """Have HAProxy give this machine no more requests. Returns whether it has none there now."""
        async with self.lock:
            try:
                having = [each for each in self._table.backends.values() if machine in each.machines]
                await self._runtime.do([line for each in having for line in closing(each.id, machine)])
                for backend in having:
                    backend.machines[machine].open = False
                deadline = self._now() + WITHDRAW_S
                while True:
                    for backend in having:
                        await self._take_out(backend, [machine])
                    having = [each for each in having if machine in each.machines]
                    if not having:
                        return True
                    in_flight = any(each.machines[machine].now for each in having)
                    if self._now() >= deadline + (0.0 if in_flight else KEPT_S):
                        return False
                    await asyncio.sleep(self._settings.look_s / 5)
            except Unreachable:
                for backend in self._table.backends.values():
                    if known := backend.machines.get(machine):
                        known.leaving = True  # nobody knows what HAProxy has done
                return False
            finally:
                self._stirred.set()

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        looked_s = 0.0
        while True:
            with suppress(TimeoutError):
                # Look for a tenth of the time at most, however many apps there are.
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
            except Exception:  # the loop goes on: without it no machine that runs is ever stopped
                _logger.exception("haproxy.fault", cause="a fault of ours")
                await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self._ends.wait()

    async def _look(self) -> None:
        """Look at what is in flight."""
        if self._runtime.old:
            await self._runtime.refresh()
        if not self._busy or self._runtime.old or self._now() >= self._everywhere_at:
            self._everywhere_at = self._now() + EVERYWHERE * self._settings.look_s
            self._busy = await self._moving()
        looked_at = [each for each in self._busy if self._table.backends.get(each.key) is each]
        if looked_at:
            self._dirty.update(backend.key[0] for backend in looked_at)
            usage = await self._runtime.usage([backend.id for backend in looked_at])
            for backend in looked_at:
                self._told(backend, usage[backend.id])

    async def _moving(self) -> list[Backend]:
        """The backends where something is in flight, or has been since the last time, or that are not as they should
        be."""
        busy = await self._runtime.busy()
        found: list[Backend] = []
        for backend in self._table.backends.values():
            now, total, act = busy.get(backend.id, (0, 0, 0))
            moved = total != backend.total
            backend.total = total
            in_flight = any(machine.now for machine in backend.machines.values())
            if now or moved or in_flight or backend.leaving or act < backend.open or self._runtime.old:
                found.append(backend)
        return found

    def _told(self, backend: Backend, usage: dict[str, Usage]) -> None:
        answers = backend.answered(usage)
        self._count(answers)
        if answers[INTERIM]:
            self.avoid(backend.key[0])
        told, down = backend.seen(usage)
        for name, moved in told:
            machine = backend.machines[name]
            self._delegator.filled(*backend.key, name, machine.slots if machine.open else 0, machine.now, moved)
        for name in down:
            self._delegator.refused(*backend.key, name)

    async def _follow(self) -> None:
        """Tell HAProxy what has changed."""
        if self._now() >= self._all_at:
            self._all_at = self._now() + ALL_S
            self._process.trim()
            self._dirty.update(app for app, _ in self._table.backends)
        dirty, self._dirty = self._dirty, set()
        pending = self._pending.taken()
        try:
            for backend in [each for each in self._table.backends.values() if each.key[0] in dirty]:
                await self._apart(backend.key[0], self._follow_one(backend))
            for key, new_hosts in pending.items():
                await self._apart(key[0], self._take(key, new_hosts))
        except HawkerError as error:
            self._dirty |= dirty
            if isinstance(error, Unreachable):  # HAProxy may be busy
                for key, new_hosts in pending.items():
                    self._pending.again(key, new_hosts)
            raise
        if self._tls_names is not None:
            await self._tls_names.follow(self._table.backends, self._connections)

    async def _apart(self, app: str, reconciler: Awaitable[None]) -> None:
        """Let what goes wrong with one app concern that app alone. Raises what goes wrong with HAProxy."""
        try:
            await reconciler
        except HawkerError:
            raise
        except Exception:
            if app not in self._failing:
                _logger.exception("haproxy.fault", app=app, cause="a fault of ours")
            self._failing.add(app)
        else:
            self._failing.discard(app)

    async def _follow_one(self, backend: Backend) -> None:
        app, port = backend.key
        delegation = self._delegator.delegation(app, port)
        kind = self._table.kinds[int(backend.id[1:].partition("b")[0])]
        if delegation is None or delegation.service != kind.service or app in self._avoiding:
            backend.leaving = True
        machines = {} if delegation is None or backend.leaving else delegation.machines
        if not machines and not backend.leaving:
            backend.empty_since = backend.empty_since or self._now()
            backend.leaving = self._now() - backend.empty_since > EMPTY_S
        elif machines:
            backend.empty_since = None
        if backend.leaving and backend.hosts:
            assert self._process.config is not None
            await self._runtime.do(forgetting(self._process.config, backend))
            backend.hosts, backend.writing = set(), set()
        before = set(backend.machines)
        wanted, unwanted = backend.steps(machines)
        for server in wanted:
            known = backend.machines[server.machine]
            known.open = known.leaving = True  # until HAProxy has said that it has it
            self._delegator.filled(app, port, server.machine, server.slots, known.now, False)
        for server in wanted:
            await self._open(backend, server, known=server.machine in before)
        if unwanted:
            await self._runtime.do([line for name in unwanted for line in closing(backend.id, name)])
            for name in unwanted:
                machine = backend.machines[name]
                machine.open = False
                self._delegator.filled(app, port, name, 0, machine.now, False)
        tried = {server.machine for server in wanted}
        if left := [name for name in backend.left(machines) if name not in tried]:
            await self._take_out(backend, left)
            if any(name in machines and name not in backend.machines for name in left):
                self.changed(app)  # the machine has moved: look at it again at once
        if backend.leaving and not backend.machines:
            self._table.give_back(backend)

    async def _open(self, backend: Backend, server: Server, *, known: bool) -> None:
        """Open a machine. Workers from before a reload are not told: they may have it at the address where the machine
        was."""
        problems = ["it is new"]
        if known:
            problems = await self._runtime.do(opening(backend.id, server), old=False)
        if problems:  # or HAProxy was started anew without requests for it
            problems = await self._runtime.do(adding(backend.id, server), old=False)
        machine = backend.machines[server.machine]
        machine.leaving = bool(problems)
        if problems:
            machine.open = False
            self._delegator.filled(*backend.key, server.machine, 0, machine.now, False)
            _logger.warning("haproxy.not_added", machine=server.machine, said=problems[0], cause="a machine has room")

    async def _take_out(self, backend: Backend, names: list[str]) -> None:
        """Take out machines that are given no requests, once HAProxy has no connection to them. HAProxy would use a
        connection that it keeps for whatever has the machine's name next, wherever that is, and it keeps one afterwards
        on which something is under way: only when it removes a machine, there is neither."""
        backend_id = backend.id
        self._told(backend, (await self._runtime.usage([backend_id]))[backend_id])
        idle = [name for name in names if not backend.machines[name].now]
        gone = await self._runtime.remove(backend_id, idle)
        if kept := [name for name in idle if name not in gone]:
            for name in kept:
                backend.machines[name].leaving = True
            await self._runtime.do([line for name in kept for line in emptying(backend_id, name)])
            gone += await self._runtime.remove(backend_id, kept)
        for name in gone:
            del backend.machines[name]
        if len(gone) < len(names):
            self._dirty.add(backend.key[0])  # at the next look
            if backend not in self._busy:
                self._busy.append(backend)

    async def _take(self, key: Key, new_hosts: PendingHosts) -> None:
        """Let HAProxy carry an app, or another host of one, or more of that app's methods."""
        backend = self._table.backends.get(key)
        if backend is not None and backend.leaving:
            if key[0] not in self._avoiding:
                self._pending.again(key, new_hosts)  # it is about to be given back
            return
        if backend is None:
            delegation = self._delegator.delegation(*key)
            if delegation is None or not delegation.machines or not carries(delegation.service, tls=self._tls(key[1])):
                return
            backend = self._table.take(key, delegation.service)
            if backend is None:
                before = self._table.kinds_now()
                if not self._room(key[1], delegation.service):
                    return
                try:
                    await self._serve()
                except NotStarted:
                    self._table.restore_kinds(before)  # it may be the new kinds that HAProxy refuses
                    raise
                backend = self._table.take(key, delegation.service)
                assert backend is not None  # there is room now
            await self._follow_one(backend)
        config = self._process.config
        assert config is not None
        hosts = ((new_hosts.hosts | new_hosts.writing) - backend.hosts) | backend.untold[0]
        writing = (new_hosts.writing - backend.writing) | backend.untold[1]
        backend.hosts |= hosts  # when the backend leaves, HAProxy is to forget also hosts that it was perhaps told of
        backend.writing |= writing
        backend.untold = hosts, writing
        commands = naming(config, backend, hosts, writing=False) + naming(config, backend, writing, writing=True)
        if problems := await self._runtime.do(commands):
            _logger.warning("haproxy.not_mapped", app=key[0], said=problems[0], cause="an app is served")
        backend.untold = NOTHING, NOTHING

    def _room(self, port: int, service: ServicePort) -> bool:
        """Make twice as many backends of a kind, or a new kind. False: there are as many as there may be."""
        kind = self._table.kind_of(port, service)
        more = kind.count if kind else 8
        if self._table.size + more > self._settings.backends_most:
            return kind is None and self._table.renew(port, service)
        self._table.grow(port, service, more)
        return True


_logger = get_logger()
