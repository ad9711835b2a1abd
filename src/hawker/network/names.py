"""What the private names are answered with: decided from values alone.

A machine asks, and its own address says which network it is in. It sees the apps of that network and no others: for it
the rest of the world has no names under `internal`. What a name may be, and with which records:

    <app>, global.<app>, <region>.<app>            AAAA  started machines that take traffic
    top<N>.nearest.of.<app>                        AAAA  the N nearest of them
    <machine>.vm.<app>, <group>.process.<app>      AAAA  one of them; those of a process group
    vms.<app>, all.vms.<app>                       TXT   "id region,..."; with `all`, whatever their state
    regions.<app>, all.regions.<app>               TXT   "region,..."
    _apps, _instances, all._instances              TXT   of the network
    _api                                           AAAA  where the API answers

A name that is there and has no such record is told from one that is not (RFC 2308, 8020).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import msgspec

Kind = Literal["AAAA", "TXT"]
STARTED = "started"
NO_GROUP = "app"
"""The process group of a machine that says nothing of one."""
TEXT_MOST = 48_000
"""Bytes of a list: a message has 65,535 at most."""
ZONE = "internal"
PROXIED = "flycast"
"""The zone of addresses by the proxy. It has no names yet, and nobody else is asked for them."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the catalog shows it. `hidden`: no name that stands for several machines leads to it."""

    id: str
    app: str
    region: str
    address: str
    state: str = STARTED
    group: str = NO_GROUP
    cordoned: bool = False
    hidden: bool = False

    @property
    def listed(self) -> bool:
        return self.state == STARTED and not self.cordoned and not self.hidden


class Network(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One network as its machines see it. `machines` by app, for every app there is; `regions` are all there are;
    `distance` of a region from here in ms, for those it is known of; `api` where the API answers. What takes a look at
    all its machines is made with the first question for it, and kept."""

    here: str
    machines: Mapping[str, tuple[Machine, ...]]
    regions: frozenset[str] = frozenset()
    distance: Mapping[str, float] = {}
    api: tuple[str, ...] = ()

    @cached_property
    def started(self) -> Answer:
        return _text(map(_instance, filter(_is_started, self._all())), ";")

    @cached_property
    def instances(self) -> Answer:
        return _text(map(_instance, self._all()), ";")

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """Machines' names without the zone, by their addresses."""
        return {machine.address: f"{machine.id}.vm.{machine.app}" for machine in self._all()}

    def _all(self) -> Iterable[Machine]:
        return (machine for _, machines in sorted(self.machines.items()) for machine in machines)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`exists` False: there is no such name, nor any below it. `ordered`: the order of the addresses means something.
    A name that exists has one kind of records, or none yet."""

    exists: bool = True
    kind: Kind | None = None
    addresses: tuple[str, ...] = ()
    text: str = ""
    ordered: bool = False


NOTHING = Answer()
UNKNOWN = Answer(exists=False)


def answer(network: Network, labels: tuple[str, ...], asker: str = "") -> Answer:
    """Answer a question for a name under `internal`, whose labels come without that one and in lower case. `asker` is
    the address of the asking machine: each asker gets equal answers in an order of its own."""
    match labels:
        case ():
            return NOTHING
        case ("_api",):
            return _addresses(network.api)
        case ("_apps",):
            return _text(sorted(network.machines), ",")
        case ("_instances",):
            return network.started
        case ("all", "_instances"):
            return network.instances
        case (*rest, app) if app in network.machines:
            return _of_app(network, network.machines[app], tuple(rest), asker)
        case _:
            return UNKNOWN


def owner(network: Network, address: str) -> str:
    """The name of the machine at an address, without the zone, or ""."""
    return network.owners.get(address, "")


def _of_app(network: Network, machines: tuple[Machine, ...], labels: tuple[str, ...], asker: str) -> Answer:
    listed = [machine for machine in machines if machine.listed]
    match labels:
        case () | ("global",):
            return _machines(listed)
        case ("vms",):
            return _text((f"{machine.id} {machine.region}" for machine in machines if _is_started(machine)), ",")
        case ("all", "vms"):
            return _text((f"{machine.id} {machine.region}" for machine in machines), ",")
        case ("regions",):
            return _text(sorted({machine.region for machine in machines if _is_started(machine)}), ",")
        case ("all", "regions"):
            return _text(sorted({machine.region for machine in machines}), ",")
        case ("vm",) | ("process",) | ("of",) | ("nearest", "of"):
            return NOTHING  # there are names below
        case (machine_id, "vm"):
            one = [machine for machine in machines if machine.id == machine_id]
            return _machines(machine for machine in one if machine.state == STARTED) if one else UNKNOWN
        case (group, "process"):
            known = any(machine.group.lower() == group for machine in machines)
            return _machines(machine for machine in listed if machine.group.lower() == group) if known else UNKNOWN
        case (top, "nearest", "of"):
            return _nearest(network, listed, top, asker)
        case (region,) if region in network.regions or any(machine.region == region for machine in machines):
            return _machines(machine for machine in listed if machine.region == region)
        case _:
            return UNKNOWN


def _nearest(network: Network, listed: list[Machine], top: str, asker: str) -> Answer:
    count = top.removeprefix("top")
    if (
        not top.startswith("top")
        or not (count.isascii() and count.isdigit())
        or not 0 < len(count) <= 4
        or int(count) == 0
    ):
        return UNKNOWN

    def rank(machine: Machine) -> tuple[float, bytes]:
        away = 0.0 if machine.region == network.here else network.distance.get(machine.region, float("inf"))
        return away, blake2b(f"{asker}/{machine.id}".encode(), digest_size=8).digest()

    near = sorted(listed, key=rank)[: int(count)]
    return Answer(kind="AAAA", addresses=tuple(machine.address for machine in near), ordered=True)


def _is_started(machine: Machine) -> bool:
    return machine.state == STARTED


def _instance(machine: Machine) -> str:
    return f"instance={machine.id},app={machine.app},ip={machine.address},region={machine.region}"


def _machines(machines: Iterable[Machine]) -> Answer:
    return _addresses(tuple(machine.address for machine in machines))


def _addresses(addresses: tuple[str, ...]) -> Answer:
    return Answer(kind="AAAA", addresses=addresses)


def _text(items: Iterable[str], between: str) -> Answer:
    """Take as many whole items as fit."""
    found: list[str] = []
    size = 0
    for item in items:
        size += len(item.encode()) + 1
        if size > TEXT_MOST:
            break
        found.append(item)
    return Answer(kind="TXT", text=between.join(found))
