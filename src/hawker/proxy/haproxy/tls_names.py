"""Keeps the server names for which HAProxy ends TLS: those that were asked for, and whose apps want no more than it can
do.

A name is opened after the embedded plane has ended TLS for it once: by then its app is known, and its certificate is
there. It is closed when its app wants something else, its certificate goes, or nobody asks for it any more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Container, Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

from hawker.errors import Unreachable
from hawker.proxy.certificates import Certificate, Certificates
from hawker.proxy.delegation import Delegator
from hawker.proxy.embedded.context import Connection
from hawker.proxy.embedded.counters import Counters
from hawker.proxy.haproxy.backends import Key as Carried
from hawker.proxy.haproxy.config import carries
from hawker.proxy.haproxy.keyring import Key, Keyring, key_of
from hawker.proxy.haproxy.runtime import Runtime
from hawker.proxy.haproxy.tls_config import names_of

UNUSED_S = 600.0
"""How long a name stays open that nobody asks for."""
SWEEP_S = 5.0
NAMES_MOST = 100_000
"""How many names may be asked for at a time, and not open yet."""
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_CHOSEN = re.compile(r"(?:\*\.)?[a-z0-9_.-]+")


class Name:
    """A name that is open. `file` has its certificate."""

    __slots__ = ("app", "file", "used_at")

    def __init__(self, app: str, file: str, used_at: float) -> None:
        self.app = app
        self.file = file
        self.used_at = used_at


class TlsNames:
    """The names of the public ports `ports`. All that tells HAProxy something raises `Unreachable`."""

    def __init__(
        self,
        directory: Path,
        ports: Iterable[int],
        certificates: Certificates,
        runtime: Runtime,
        delegator: Delegator,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        self.ports = tuple(ports)
        self.keyring = Keyring(directory, runtime)
        self._directory = str(directory)
        self._certificates = certificates
        self._runtime = runtime
        self._delegator = delegator
        self._counters = counters
        self._counted = dict.fromkeys(self.ports, (0, 0, 0))
        self._now = now
        self._open: dict[int, dict[str, Name]] = {port: {} for port in self.ports}
        self._files: dict[str, Key] = {}
        self._keys: WeakKeyDictionary[Certificate, tuple[list[str], str, Key]] = WeakKeyDictionary()
        self._asked: dict[tuple[int, str], str] = {}
        self._early: dict[tuple[int, str], list[Connection]] = {}
        self._dirty: set[str] = set()  # apps
        self._version = -1
        self._sweep_at = 0.0

    def open(self, port: int) -> frozenset[str]:
        return frozenset(self._open[port])

    # --- what is said of them ----------------------------------------------------------------------------------------

    def asked(self, port: int, name: str, app: str) -> bool:
        """Somebody asked for this name whose request, or whose connection, came to the embedded plane. Returns whether
        that is news."""
        if port not in self._open:
            return False
        known = self._open[port].get(name)
        if known is not None:
            known.used_at = self._now()
            if known.app == app:
                return False
            self._dirty.add(known.app)  # the name has gone to another app
            return True
        if (port, name) in self._asked or len(self._asked) >= NAMES_MOST or _NAME.fullmatch(name) is None:
            return False
        self._asked[port, name] = app
        return True

    def early(self, port: int, name: str, connection: Connection) -> None:
        """The embedded plane has this connection: its user may as well have one of HAProxy's."""
        if port in self._open:
            self._early.setdefault((port, name), []).append(connection)

    def changed(self, app: str) -> None:
        self._dirty.add(app)

    # --- what follows ------------------------------------------------------------------------------------------------

    async def adopt(self, whose: Callable[[int, str], Awaitable[Carried]]) -> None:
        """Take over what an HAProxy has that serves already."""
        await self.keyring.adopt()
        now = self._now()
        for port in self.ports:
            shaken, failing = await self._runtime.handshakes(f"p{port}")
            self._counted[port] = shaken, failing, failing
            for name in await self._runtime.map(names_of(self._directory, port)):
                app, _ = await whose(port, name)
                self._open[port][name] = Name(app, "", now)

    async def follow(self, carried: Container[Carried], alive: Container[Connection]) -> None:
        """Tell HAProxy what has changed. `carried` are apps' ports whose requests HAProxy forwards, `alive` the
        connections that the embedded plane has."""
        version = self._certificates.version
        if self._asked or self._dirty or version != self._version or self._now() >= self._sweep_at:
            dirty, asked = set(self._dirty), dict(self._asked)
            try:
                await self._follow(carried)
            except Unreachable:
                self._dirty |= dirty
                self._asked = asked | self._asked
                raise
            self._version = version
        for key, connections in list(self._early.items()):
            left = self._early[key] = [each for each in connections if each in alive]
            if not left:
                del self._early[key]
            elif key[1] in self._open[key[0]]:
                for each in left:
                    each.drain(patiently=True)

    async def _follow(self, carried: Container[Carried]) -> None:
        asked, self._asked = self._asked, {}
        dirty, self._dirty = self._dirty, set()
        now = self._now()
        sweeps = now >= self._sweep_at
        others = self._certificates.version != self._version
        if sweeps:
            self._sweep_at = now + SWEEP_S
            await self._count()
        if sweeps or others or dirty:
            for port, names in self._open.items():
                for name, each in list(names.items()):
                    if sweeps and (each.app, port) in carried:
                        each.used_at = now
                    if (
                        now - each.used_at > UNUSED_S
                        or (each.app in dirty and not self._fits(port, each.app))
                        or (others and not self._file(name))
                    ):
                        await self._close(port, name)
        new = {at: app for at, app in asked.items() if self._file(at[1]) and self._fits(at[0], app)}
        if others:
            self._files = {}
            for names in self._open.values():
                for name, each in names.items():
                    each.file = self._file(name)
                    self._files.setdefault(each.file, self._key(name))
        elif sweeps:
            used = {each.file for names in self._open.values() for each in names.values()}
            self._files = {file: key for file, key in self._files.items() if file in used}
        for _, name in new:
            self._files.setdefault(self._file(name), self._key(name))
        await self.keyring.follow(self._files)
        for (port, name), app in new.items():
            file = self._file(name)
            if file in self.keyring.held:
                await self._runtime.do([f"add map {names_of(self._directory, port)} {name} {name}"])
                self._open[port][name] = Name(app, file, now)

    def _file(self, name: str) -> str:
        """The file in which HAProxy has the name's certificate, "": there is none for it."""
        certificate = self._certificates.named(name)
        return "" if certificate is None else self._made(certificate)[0]

    def _key(self, name: str) -> Key:
        certificate = self._certificates.named(name)
        assert certificate is not None
        return self._made(certificate)[1]

    def _made(self, certificate: Certificate) -> tuple[str, Key]:
        """The key of a certificate, read once as long as it is chosen for the same names; there are thousands."""
        chosen = self._certificates.chosen(certificate)
        known = self._keys.get(certificate)
        if known is None or known[0] is not chosen:
            names = tuple(sorted(filter(_CHOSEN.fullmatch, chosen)))
            known = self._keys[certificate] = chosen, file_of(certificate), key_of(certificate, names)
        return known[1], known[2]

    async def _count(self) -> None:
        """Count handshakes. One that is under way looks as if it had failed, so failures are counted as they were the
        last time."""
        for port in self.ports:
            shaken, failed, failing = self._counted[port]
            shaken_now, failing_now = await self._runtime.handshakes(f"p{port}")
            if shaken_now < shaken or failing_now < failed:  # another worker begins to count at zero
                shaken = failed = 0
            failed_now = max(failed, min(failing, failing_now))
            all_shaken, all_failed = self._counters.handshakes_before
            self._counters.handshakes_before = all_shaken + shaken_now - shaken, all_failed + failed_now - failed
            self._counted[port] = shaken_now, failed_now, failing_now

    def _fits(self, port: int, app: str) -> bool:
        delegation = self._delegator.delegation(app, port)
        return delegation is not None and carries(delegation.service, tls=True)

    async def _close(self, port: int, name: str) -> None:
        """Close a name: the embedded plane gets its next connections."""
        await self._runtime.do([f"del map {names_of(self._directory, port)} {name}"])
        del self._open[port][name]

    def write(self) -> None:
        """Write what an HAProxy starts with."""
        for port, names in self._open.items():
            held = self.keyring.held
            lines = [
                f"{name} {name}\n" for name, each in sorted(names.items()) if each.file in held and held[each.file].pem
            ]
            Path(names_of(self._directory, port)).write_text("".join(lines))
        self.keyring.write()


def file_of(certificate: Certificate) -> str:
    """A file's name for a certificate: where it is from, in letters that are allowed."""
    return f"{hashlib.sha256(certificate.name.encode()).hexdigest()[:32]}.pem"
