"""The plane as a whole: the embedded one, with HAProxy before the public ports that speak plain HTTP.

    engine = HaproxyEngine(router, lender, settings, haproxy, directory, host, certificates)
    await engine.listen("0.0.0.0", 80, public=80)

Ports that speak TLS or bytes, and the backhaul, are the embedded plane's alone.
"""

from __future__ import annotations

from pathlib import Path

from hawker.errors import HawkerError
from hawker.host import Host
from hawker.listening import LOT, let_wait
from hawker.proxy.base import Address, Refused, Route, Router
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.client import ClientConnection
from hawker.proxy.embedded.engine import BACKLOG, Engine
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.activator import Behind
from hawker.proxy.haproxy.carried import Key, Table
from hawker.proxy.haproxy.config import PLAIN, Config, Frontend, map_of, text
from hawker.proxy.haproxy.counting import Counting
from hawker.proxy.haproxy.following import Following
from hawker.proxy.haproxy.lines import SOCKET, Lines
from hawker.proxy.haproxy.process import Process, Reserved, connections_most
from hawker.proxy.haproxy.runtime import Workers
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.sockets import bound
from hawker.proxy.lending import Lender
from hawker.telemetry import get_logger


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
        self._process = Process(haproxy, directory, settings.name, lambda: self._following.stir())
        self._runtime = self._process.runtime
        self._table = table = Table()
        self._following = Following(self._process, table, lender, self.counters, haproxy, self._serve)
        self._sought = False
        self._frontends: dict[int, Frontend] = {}

    # --- listeners ---------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        if public not in self._haproxy.plain:
            return await super().listen(host, port, public=public)
        async with self._following.lock:
            if not self._sought:
                self._sought = True
                await self._find()
                await self._listen_to_lines()
            await self._listen_behind(public)
            address = await self._front(host, port, public)
        self._following.begin()
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
        if await self._following.close():
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
        sock, answered = self._process.sockets[public], self._following.answered
        server = await self.loop.create_unix_server(
            lambda: ClientConnection(self, lambda _: Behind(self, public, answered)),
            sock=sock,
            backlog=LOT,
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

    def handed_on(self, route: Route) -> None:
        """All requests of the app pass the activator from now on."""
        self._following.handed_on(route)


_logger = get_logger()
