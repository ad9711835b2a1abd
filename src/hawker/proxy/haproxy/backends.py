"""Knows which app has which backend, and what to tell HAProxy so that its backends are as they should be. Pure.

A backend is given to an app's public port when the app is served for the first time, and taken back when the app has
had no machine for a while, or hands requests on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from ipaddress import ip_address

from hawker.proxy.base import Address, ServicePort
from hawker.proxy.delegation import DelegatedMachine
from hawker.proxy.haproxy.config import Config, Kind, Server, backend_ids, carries, map_of
from hawker.proxy.haproxy.runtime import CLASSES, Usage

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
HOSTS_MOST = 64
"""How many names of one app HAProxy knows. A port that is an app's alone takes any name; requests for the others pass
the activator."""

Key = tuple[str, int]
"""App and public port."""


class Machine:
    """A machine in a backend. `open`: it is given requests. `leaving`: it gets none until it was taken out and put in
    again."""

    __slots__ = ("address", "answers", "leaving", "now", "open", "slots", "total")

    def __init__(self, address: Address, slots: int, *, open: bool) -> None:
        self.address = address
        self.slots = slots
        self.open = open
        self.leaving = False
        self.now = 0
        self.total = 0
        self.answers = (0,) * len(CLASSES)


NOTHING: AbstractSet[str] = frozenset()


class Backend:
    """The backend of an app's public port. `hosts`: those whose requests come here, `writing` the ones of them with all
    methods, else with those that change nothing. `empty_since`: when its last machine went, of the loop's clock; None:
    it has some. `leaving`: it gets no requests any more, and is given back when those under way have ended. `untold`:
    those of `hosts` and `writing` that HAProxy is just being told of."""

    def __init__(self, key: Key, backend_id: str) -> None:
        self.key = key
        self.id = backend_id
        self.hosts: set[str] = set()
        self.writing: set[str] = set()
        self.untold: tuple[AbstractSet[str], AbstractSet[str]] = (NOTHING, NOTHING)
        self.machines: dict[str, Machine] = {}
        self.total = -1
        self.empty_since: float | None = None
        self.leaving = False

    @property
    def open(self) -> int:
        return sum(machine.open for machine in self.machines.values())

    def steps(self, delegated: Mapping[str, DelegatedMachine]) -> tuple[list[Server], set[str]]:
        """Which machines are to be given requests, or with other slots, and which are to be given none.

        A machine that has moved is given none until it was taken out: HAProxy would keep a connection to the old
        address on which something was under way, and use it as long as it is open.
        """
        wanted: list[Server] = []
        for name, one in delegated.items():
            known = self.machines.get(name)
            if known is None:
                if not (_WORD.fullmatch(name) and _is_ip(one.address[0])):
                    continue  # the row makes no sense: HAProxy would read it as another command
                known = self.machines[name] = Machine(one.address, one.slots, open=False)
            if known.leaving or known.address != one.address:
                continue
            if not known.open or known.slots != one.slots:
                known.slots = one.slots
                wanted.append(Server(machine=name, host=one.address[0], port=one.address[1], slots=one.slots))
        return wanted, {
            name
            for name, known in self.machines.items()
            if known.open and (known.leaving or not self._stays(name, delegated))
        }

    def left(self, delegated: Mapping[str, DelegatedMachine]) -> list[str]:
        """The machines that are to be taken out, and have nothing in flight as far as is known."""
        return [
            name
            for name, known in self.machines.items()
            if not (known.open or known.now) and (known.leaving or not self._stays(name, delegated))
        ]

    def _stays(self, name: str, delegated: Mapping[str, DelegatedMachine]) -> bool:
        one = delegated.get(name)
        return one is not None and one.address == self.machines[name].address

    def adopt(self, addresses: Mapping[str, Address], usage: Mapping[str, Usage]) -> None:
        """Take over what HAProxy has already."""
        for name, address in addresses.items():
            one = usage.get(name) or Usage(now=0, total=0, taken=False)
            machine = self.machines[name] = Machine(address, one.slots, open=one.taken)
            machine.now, machine.total, machine.answers = one.now, one.total, one.answers

    def answered(self, usage: Mapping[str, Usage]) -> list[int]:
        """Counts the answers since the last time, of each of `CLASSES`. A worker process that ends takes its count
        along."""
        since = [0] * len(CLASSES)
        for name, one in usage.items():
            machine = self.machines.get(name)
            if machine is not None:
                for at, (before, now) in enumerate(zip(machine.answers, one.answers, strict=True)):
                    since[at] += max(0, now - before)
                machine.answers = one.answers
        return since

    def seen(self, usage: Mapping[str, Usage]) -> tuple[list[tuple[str, bool]], list[str]]:
        """Note what HAProxy says is in flight. Returns machines with whether they had requests, and those that refuse
        connections. A machine that HAProxy lacks, or gives nothing, is put in again if it is to be given requests."""
        told: list[tuple[str, bool]] = []
        down: list[str] = []
        for name, machine in self.machines.items():
            one = usage.get(name)
            if one is None:
                machine.now = 0
                machine.leaving |= machine.open
                told.append((name, False))
                continue
            moved = one.total != machine.total or one.now != machine.now
            machine.now, machine.total = one.now, one.total
            told.append((name, moved))
            if not one.up and machine.open:
                machine.open = False
                down.append(name)
            machine.leaving |= machine.open and not one.taken
        return told, down


class BackendTable:
    """All backends, and which app has each."""

    def __init__(self) -> None:
        self.backends: dict[Key, Backend] = {}
        self.by_id: dict[str, Backend] = {}
        self.kinds: list[Kind] = []
        self._free: dict[int, list[str]] = {}

    @property
    def size(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def kind_of(self, port: int, service: ServicePort) -> Kind | None:
        return next((kind for kind in self.kinds if (kind.public, kind.service) == (port, service)), None)

    def take(self, key: Key, service: ServicePort) -> Backend | None:
        """Take a backend for an app; None: there is none left of its kind."""
        kind = self.kind_of(key[1], service)
        free = self._free.get(kind.number) if kind else None
        if not free:
            return None
        return self._given(key, free.pop())

    def adopt(self, key: Key, backend_id: str) -> Backend:
        """Note that an app has this backend already."""
        for free in self._free.values():
            if backend_id in free:
                free.remove(backend_id)
        return self._given(key, backend_id)

    def _given(self, key: Key, backend_id: str) -> Backend:
        backend = self.backends[key] = self.by_id[backend_id] = Backend(key, backend_id)
        return backend

    def give_back(self, backend: Backend) -> None:
        """Take the backend back: its machines are out of it."""
        del self.backends[backend.key]
        del self.by_id[backend.id]
        number = int(backend.id[1:].partition("b")[0])
        self._free[number].append(backend.id)

    def grow(self, port: int, service: ServicePort, count: int) -> None:
        """Add a kind, or more backends of one."""
        known = self.kind_of(port, service)
        if known is None:
            known = Kind(number=len(self.kinds), public=port, service=service, count=0)
            self.kinds.append(known)
        more = Kind(number=known.number, public=port, service=service, count=known.count + count)
        self.kinds[known.number] = more
        self._free.setdefault(more.number, [])
        self._free[more.number] += reversed(backend_ids(more)[known.count :])

    def renew(self, port: int, service: ServicePort) -> bool:
        """Make a kind that no app uses any more one of this service. False: there is no such kind."""
        for kind in self.kinds:
            if len(self._free[kind.number]) == kind.count:
                self.kinds[kind.number] = Kind(number=kind.number, public=port, service=service, count=kind.count)
                return True
        return False

    def kinds_now(self) -> tuple[list[Kind], dict[int, list[str]]]:
        """The kinds as they are now, for `restore_kinds`."""
        return list(self.kinds), {number: list(free) for number, free in self._free.items()}

    def restore_kinds(self, before: tuple[list[Kind], dict[int, list[str]]]) -> None:
        self.kinds, self._free = before

    def restore(self, kinds: tuple[Kind, ...]) -> None:
        """Take the kinds of a configuration; all backends are free."""
        self.kinds = list(kinds)
        self._free = {kind.number: list(reversed(backend_ids(kind))) for kind in kinds}

    def servers(self) -> dict[str, tuple[Server, ...]]:
        """The machines of each backend that are given requests."""
        return {
            backend.id: tuple(
                Server(machine=name, host=machine.address[0], port=machine.address[1], slots=machine.slots)
                for name, machine in backend.machines.items()
                if machine.open
            )
            for backend in self.backends.values()
        }

    def hosts(self) -> dict[tuple[int, bool], dict[str, str]]:
        """The backends by public port, whether for all methods, and host."""
        found: dict[tuple[int, bool], dict[str, str]] = {}
        for (_, port), backend in self.backends.items():
            for writing, hosts in ((False, backend.hosts), (True, backend.writing)):
                for host in sorted(hosts):
                    found.setdefault((port, writing), {})[host] = backend.id
        return found


def naming(config: Config, backend: Backend, hosts: Iterable[str], *, writing: bool) -> list[str]:
    """The commands that send hosts' requests to a backend."""
    path = map_of(config.directory, backend.key[1], writing=writing)
    return [f"add map {path} {host} {backend.id}" for host in sorted(hosts)]


def forgetting(config: Config, backend: Backend) -> list[str]:
    """The commands that end that."""
    port = backend.key[1]
    return [
        f"del map {map_of(config.directory, port, writing=writing)} {host}"
        for writing, hosts in ((False, backend.hosts), (True, backend.writing))
        for host in sorted(hosts)
    ]


def _is_ip(text: str) -> bool:
    try:
        return "%" not in text and bool(ip_address(text))
    except ValueError:
        return False


def fits(service: ServicePort, host: str, *, tls: bool = False) -> bool:
    """Whether HAProxy may be told of this host. The host was read strictly; it has nothing that a map cannot hold."""
    return carries(service, tls=tls) and bool(host) and not host.startswith("[") and len(host) <= 255
