"""The plane as a whole: the embedded one, with HAProxy before the public ports that speak plain HTTP.

    engine = HaproxyEngine(router, lender, settings, haproxy, directory, host, certificates)
    await engine.listen("0.0.0.0", 80, public=80)

Ports that speak TLS or bytes, and the backhaul, are the embedded plane's alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from hawker.core.retrying import SAFE
from hawker.errors import HawkerError, Unreachable
from hawker.host import Host
from hawker.listening import LOT, let_wait
from hawker.proxy.base import Address, Refused, Route, Router, ServicePort
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.engine import BACKLOG, Engine
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.activator import Behind
from hawker.proxy.haproxy.carried import HOSTS_MOST, Carried, Key, Table, fits, forgetting, naming
from hawker.proxy.haproxy.config import PLAIN, Config, Frontend, Server, carries, map_of, text
from hawker.proxy.haproxy.counting import Counting
from hawker.proxy.haproxy.lines import SOCKET, Lines
from hawker.proxy.haproxy.process import Process, Reserved, connections_most
from hawker.proxy.haproxy.runtime import Usage, Workers, adding, closing, opening
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.sockets import bound
from hawker.proxy.lending import Lender
from hawker.telemetry import get_logger

EMPTY_S = 60.0
"""How long an app without machines keeps its backend: it is likely to be asked for again."""
WITHDRAW_S = 0.25
"""How long a machine is waited for to come to rest, when it is wished back."""
ALL_S = 5.0
"""How often all that is carried is looked at, whatever is said to have changed."""
AGAIN_S = 1.0
"""After HAProxy could not be started."""


class Wish:
    """Hosts of an app's public port that HAProxy may carry; `writing`: those that were sent what changes something."""

    __slots__ = ("hosts", "writing")

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.writing: set[str] = set()


class HaproxyEngine(Engine):
    """`lender` says which machines HAProxy may give requests to. `directory` is HAProxy's own."""

    def __init__(
        self,
        router: Router,
        lender: Lender,
        settings: Settings,
        haproxy: HaproxySettings,
        directory: Path,
        host: Host,
        certificates: Certificates | None = None,
    ) -> None:
        """Raises `Invalid` when there is no HAProxy."""
        super().__init__(router, settings, host, certificates)
        self.counters: Counting = Counting(self)
        self._lender = lender
        self._logs = bool(settings.access_log) and haproxy.log
        self._haproxy = haproxy
        self._process = Process(haproxy, directory, settings.name, self._haproxy_ended)
        self._runtime = self._process.runtime
        self._table = Table()
        self._sought = False
        self._frontends: dict[int, Frontend] = {}
        self._wished: dict[Key, Wish] = {}
        self._replaying: set[str] = set()  # apps
        self._dirty: set[str] = set()  # apps
        self._all_at = 0.0
        self._busy = False
        self._stirred = asyncio.Event()
        self._lock = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        if public not in self._haproxy.plain:
            return await super().listen(host, port, public=public)
        async with self._lock:
            if not self._sought:
                self._sought = True
                await self._find()
                await self._listen_to_lines()
            await self._listen_behind(public)
            address = await self._front(host, port, public)
        if self._runner is None:
            self._lender.changed = self._changed
            self._lender.withdraw = self._withdrawn
            self._runner = self.loop.create_task(self._run(), name="haproxy")
        return address

    @property
    def carried(self) -> frozenset[Key]:
        """Apps and public ports whose requests HAProxy passes on by itself."""
        return frozenset(each.key for each in self._table.carried.values() if each.hosts and each.open)

    @property
    def writing(self) -> frozenset[Key]:
        """Those of them whose requests it passes on whatever their method is."""
        return frozenset(each.key for each in self._table.carried.values() if each.writing and each.open)

    async def workers(self) -> Workers:
        """HAProxy's processes. Raises `Unreachable`."""
        return await self._runtime.refresh()

    async def close(self) -> None:
        """Raises nothing of HAProxy's."""
        self._ends.set()
        if self._runner is not None:
            self._lender.withdraw = None
            self._lender.changed = _nobody
            self._stirred.set()
            await self._runner  # a reload is not cut off: what is said to HAProxy in the middle of one is lost
            self._runner = None
            if self._haproxy.stays or self.retiring:
                self._process.leave()
            else:
                await self._process.end(self.settings.drain_s)
            for carried in self._table.carried.values():
                for name in carried.machines:
                    self._lender.filled(*carried.key, name, 0, 0, False)
        await super().close()

    async def _find(self) -> None:
        """Whether HAProxy serves already, since before this process."""
        self._process.prepare()
        config = await self._process.find(self._haproxy.plain)
        if config is None:
            return
        _logger.info("haproxy.found", directory=config.directory, cause="the proxy is opened")
        self._table.restore(config.kinds)
        self._frontends = {each.public: each for each in config.frontends if each.public in self._haproxy.plain}
        addresses = await self._runtime.addresses()
        usage = await self._runtime.usage(addresses)
        for frontend in config.frontends:
            by_backend: dict[str, set[str]] = {}
            for name, backend in (await self._runtime.map(map_of(config.directory, frontend.public))).items():
                by_backend.setdefault(backend, set()).add(name)
            writing = await self._runtime.map(map_of(config.directory, frontend.public, writing=True))
            for backend, hosts in by_backend.items():
                key = await self._whose(frontend.public, sorted(hosts)[0])
                carried = self._table.adopt(key, backend)
                carried.hosts, carried.writing = hosts, hosts & writing.keys()
                carried.adopt(addresses.get(backend, {}), usage.get(backend, {}))

    async def _whose(self, port: int, host: str) -> Key:
        """The app that a host belongs to. One that is gone has no name, and offers nothing."""
        try:
            route = self.router.find(port, host) or await self.router.load(port, host)
        except Refused:
            return f"?{host}", port
        return route.app, port

    async def _listen_behind(self, public: int) -> None:
        sock = self._process.sockets[public]
        server = await self.loop.create_unix_server(
            lambda: ClientConnection(self, lambda _: Behind(self, public, self._answered)), sock=sock, backlog=LOT
        )
        let_wait(server, BACKLOG)
        self._servers.append(server)

    async def _listen_to_lines(self) -> None:
        access = self.access
        if access is None or not self._logs:
            return
        path = self._process.directory / SOCKET
        sock = bound(path)
        self._process.admit(path, 0o660)
        self._servers.append(await self.loop.create_unix_server(lambda: Lines(access, self._app_of), sock=sock))

    def _app_of(self, backend: str) -> str:
        carried = self._table.by_backend.get(backend)
        return carried.key[0] if carried else "-"

    async def _front(self, host: str, port: int, public: int) -> Address:
        """Have HAProxy listen. Raises `OSError`, `NotStarted`."""
        before = self._process.config
        known = next((each for each in before.frontends if each.public == public), None) if before else None
        if known is not None and known.host == host and port in (0, known.port):
            self._frontends[public] = known
            config = self._config()
            assert before is not None
            wished = {each.public for each in before.frontends} <= self._frontends.keys()
            if wished and config.times == before.times and self._written() == text(before):
                return host, known.port
            await self._serve()
            return host, known.port
        self._host.listening.leave(host, port)  # there was no HAProxy, or at another address
        reserved = Reserved(host, port)
        try:
            self._frontends[public] = Frontend(public=public, host=host, port=reserved.address[1])
            if self._table.kind_of(public, PLAIN) is None:
                self._table.grow(public, PLAIN, self._haproxy.backends)
            await self._serve()
        except HawkerError:
            del self._frontends[public]
            raise
        finally:
            reserved.close()
        return reserved.address

    def _written(self) -> str:
        try:
            return (self._process.directory / "haproxy.cfg").read_text()
        except OSError:
            return ""

    def _config(self) -> Config:
        process = self._process
        return Config(
            directory=str(process.directory),
            root=process.root,
            user=self._haproxy.user,
            threads=self._haproxy.threads,
            connections=connections_most(),
            region=self.settings.region,
            prefix=process.config.prefix if process.config else self._prefix.decode(),
            frontends=tuple(self._frontends.values()),
            kinds=tuple(self._table.kinds),
            servers=self._table.servers(),
            times=self.settings,
            sockets=process.numbers,
            logged=self._logs,
            joined=process.joins,
        )

    async def _serve(self) -> None:
        await self._process.serve(self._config(), self._table.hosts())
        await self._runtime.refresh()

    # --- what is said to us ------------------------------------------------------------------------------------------

    def _answered(self, port: int, host: str, method: bytes, route: Route) -> None:
        """A machine has answered through the activator: the app's next requests may pass without it. Of those that
        change something the first is always the activator's: an app hands such on from the beginning, or never."""
        key = route.app, port
        writing = method not in SAFE
        known = self._table.carried.get(key)
        if known is not None and not known.leaving:
            if len(known.hosts) >= HOSTS_MOST and host not in known.hosts:
                return
            if host in (known.writing if writing else known.hosts):
                return
        if route.app in self._replaying or not fits(route.port, host):
            return
        wish = self._wished.setdefault(key, Wish())
        hosts = wish.writing if writing else wish.hosts
        if len(hosts) < HOSTS_MOST and host not in hosts:
            hosts.add(host)
            self._stirred.set()

    def handed_on(self, route: Route) -> None:
        """All requests of the app pass the activator from now on."""
        if route.app not in self._replaying:
            self._replaying.add(route.app)
            self._changed(route.app)

    def _changed(self, app: str) -> None:
        self._dirty.add(app)
        self._stirred.set()

    async def _withdrawn(self, machine: str) -> bool:
        """Whether HAProxy has no request at this machine, and gives it none any more."""
        async with self._lock:
            try:
                having = [each for each in self._table.carried.values() if machine in each.machines]
                await self._runtime.do([line for each in having for line in closing(each.backend, machine)])
                deadline = self.now() + WITHDRAW_S
                while True:
                    usage = await self._runtime.usage([each.backend for each in having])
                    for carried in having:
                        carried.machines[machine].open = False
                        self._told(carried, usage[carried.backend])
                    if not any(carried.machines[machine].now for carried in having):
                        return True
                    if self.now() >= deadline:
                        return False
                    await asyncio.sleep(self._haproxy.look_s / 5)
            except Unreachable:
                return False
            finally:
                self._stirred.set()

    def _haproxy_ended(self) -> None:
        self._stirred.set()

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        looked_s = 0.0
        while True:
            with suppress(TimeoutError):
                # A tenth of the time at most, however many apps there are.
                async with asyncio.timeout(max(self._haproxy.look_s * (1 if self._busy else 5), 9 * looked_s)):
                    await self._stirred.wait()
            if self._ends.is_set():
                return
            self._stirred.clear()
            try:
                async with self._lock:
                    if self._process.config is None:
                        await self._serve()
                    begun = self.now()
                    await self._look()
                    looked_s = min(self.now() - begun, 0.1)
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
        busy = await self._runtime.busy()
        wanted: list[Carried] = []
        for carried in self._table.carried.values():
            now, total, act = busy.get(carried.backend, (0, 0, 0))
            moved = total != carried.total
            carried.total = total
            in_flight = any(machine.now for machine in carried.machines.values())
            if now or moved or in_flight or carried.leaving or act < carried.open or self._runtime.old:
                wanted.append(carried)
                self._dirty.add(carried.key[0])
        self._busy = bool(wanted)
        if wanted:
            usage = await self._runtime.usage([carried.backend for carried in wanted])
            for carried in wanted:
                self._told(carried, usage[carried.backend])

    def _told(self, carried: Carried, usage: dict[str, Usage]) -> None:
        self.counters.carried(carried.answered(usage))
        told, down = carried.seen(usage)
        for name, moved in told:
            machine = carried.machines[name]
            self._lender.filled(*carried.key, name, machine.places if machine.open else 0, machine.now, moved)
        for name in down:
            self._lender.refused(*carried.key, name)

    async def _follow(self) -> None:
        """What has changed."""
        if self.now() >= self._all_at:
            self._all_at = self.now() + ALL_S
            self._dirty.update(app for app, _ in self._table.carried)
        dirty, self._dirty = self._dirty, set()
        wished, self._wished = self._wished, {}
        for carried in [each for each in self._table.carried.values() if each.key[0] in dirty]:
            await self._follow_one(carried)
        for key, wish in wished.items():
            await self._take(key, wish)

    async def _follow_one(self, carried: Carried) -> None:
        app, port = carried.key
        offer = self._lender.offer(app, port)
        kind = self._table.kinds[int(carried.backend[1:].partition("b")[0])]
        if offer is None or offer.service != kind.service or app in self._replaying:
            carried.leaving = True
        machines = {} if offer is None or carried.leaving else offer.machines
        if not machines and not carried.leaving:
            carried.empty_since = carried.empty_since or self.now()
            carried.leaving = self.now() - carried.empty_since > EMPTY_S
        elif machines:
            carried.empty_since = None
        if carried.leaving and carried.hosts:
            assert self._process.config is not None
            await self._runtime.do(forgetting(self._process.config, carried))
            carried.hosts, carried.writing = set(), set()
        wanted, unwanted = carried.steps(machines)
        for server in wanted:
            known = carried.machines[server.machine]
            known.open = True
            self._lender.filled(app, port, server.machine, server.places, known.now, False)
        for server in wanted:
            await self._open(carried, server)
        if unwanted:
            await self._runtime.do([line for name in unwanted for line in closing(carried.backend, name)])
            for name in unwanted:
                machine = carried.machines[name]
                machine.open = False
                self._lender.filled(app, port, name, 0, machine.now, False)
            if not unwanted.isdisjoint(machines):
                self._changed(app)  # look at those again at once: they have moved
        await self._drop(carried)

    async def _open(self, carried: Carried, server: Server) -> None:
        problems = await self._runtime.do(adding(carried.backend, server))
        if problems:
            problems = await self._runtime.do(opening(carried.backend, server))
        if problems:
            _logger.warning("haproxy.not_added", machine=server.machine, said=problems[0], cause="a machine has room")

    async def _drop(self, carried: Carried) -> None:
        """What is not needed any more, once nothing is in flight there."""
        idle = [name for name, machine in carried.machines.items() if not machine.open and not machine.now]
        if idle and (carried.leaving or len(idle) > 8):
            problems = await self._runtime.do([f"del server {carried.backend}/{name}" for name in idle])
            if not any("connection" in problem for problem in problems):
                for name in idle:
                    del carried.machines[name]
        if carried.leaving and not carried.machines:
            self._table.give_back(carried)

    async def _take(self, key: Key, wish: Wish) -> None:
        """Let HAProxy carry an app, or another host of one, or more of what is asked of it."""
        carried = self._table.carried.get(key)
        if carried is not None and carried.leaving:
            return
        if carried is None:
            offer = self._lender.offer(*key)
            if offer is None or not offer.machines or not carries(offer.service):
                return
            carried = self._table.take(key, offer.service)
            if carried is None:
                if not self._room(key[1], offer.service):
                    return
                await self._serve()
                carried = self._table.take(key, offer.service)
                assert carried is not None  # there is room now
            await self._follow_one(carried)
        config = self._process.config
        assert config is not None
        hosts, writing = (wish.hosts | wish.writing) - carried.hosts, wish.writing - carried.writing
        carried.hosts |= hosts
        carried.writing |= writing
        commands = naming(config, carried, hosts, writing=False) + naming(config, carried, writing, writing=True)
        if problems := await self._runtime.do(commands):
            _logger.warning("haproxy.not_mapped", app=key[0], said=problems[0], cause="an app is served")

    def _room(self, port: int, service: ServicePort) -> bool:
        """Make twice as many backends of a kind, or a kind."""
        kind = self._table.kind_of(port, service)
        more = kind.count if kind else 8
        if self._table.size + more > self._haproxy.backends_most:
            return False
        self._table.grow(port, service, more)
        return True


def _nobody(app: str) -> None:
    """Nobody is carried."""


_logger = get_logger()
