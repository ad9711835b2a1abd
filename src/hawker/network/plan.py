"""What a host's network should be for its worker's machines, and the operations that lead there from what it is.

Everything is values: a `State` is read from the kernel or made from machines, `difference` compares two, and an
operation is applied to the kernel, or by `after` to a state. Operations that take away come first, so that a port or an
address is free before it is given anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from hawker.network import addresses
from hawker.network.base import Attachment, Wanted


class Element(msgspec.Struct, frozen=True, order=True):
    """An element of one of the table's sets, or of a map if it has a `value`. `family` is "inet" or "arp"."""

    family: str
    set: str
    key: tuple[str | int, ...]
    value: tuple[str | int, ...] = ()

    @property
    def is_port(self) -> bool:
        return self.set in ("published4", "published6")


class Address(msgspec.Struct, frozen=True, order=True):
    """An address of the host on one of its devices, alone in its network (length 128 or 32)."""

    device: str
    address: str


class Neighbour(msgspec.Struct, frozen=True, order=True):
    """A fixed neighbour: the kernel sends no question for this address on the device, and believes no answer."""

    device: str
    address: str
    mac: str


class Route(msgspec.Struct, frozen=True, order=True):
    """The way to one machine's address. `source` is what the host calls itself there, or ""."""

    device: str
    address: str
    source: str = ""


class Link(msgspec.Struct, frozen=True, order=True):
    """A host end that is there. `ready`: it is up, has the gateway's hardware address, and makes no addresses itself.
    `loopback`: packets from 127.0.0.0/8 may go out there, for ports that the host itself calls."""

    name: str
    ready: bool = True
    loopback: bool = False


class State(msgspec.Struct, frozen=True):
    """`rules` is the mark of the tables that are there, "" where there are none or not as they were made."""

    rules: str = ""
    elements: frozenset[Element] = frozenset()
    links: frozenset[Link] = frozenset()
    addresses: frozenset[Address] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    routes: frozenset[Route] = frozenset()


class Rules(msgspec.Struct, frozen=True):
    """Replace both tables by empty ones. An empty mark removes them."""

    mark: str


class Elements(msgspec.Struct, frozen=True):
    """Take elements away and put others in, all or none."""

    gone: frozenset[Element]
    new: frozenset[Element]


class RemoveLink(msgspec.Struct, frozen=True):
    """Remove a link; its addresses, neighbours and routes go with it."""

    name: str


class Configure(msgspec.Struct, frozen=True):
    """Make a link that is there what `link` says."""

    link: Link


class Remove(msgspec.Struct, frozen=True):
    it: Address | Neighbour | Route


class Add(msgspec.Struct, frozen=True):
    it: Address | Neighbour | Route


_Item = TypeVar("_Item", Address, Neighbour, Route)
Operation = Rules | Elements | RemoveLink | Configure | Remove | Add


def attachment(worker: str, wanted: Wanted, address4: str, mtu: int) -> Attachment:
    """What a machine's interface has."""
    return Attachment(
        interface=addresses.device(worker, wanted.machine),
        mac=addresses.mac(worker, wanted.machine),
        address6=str(IPv6Address(wanted.address)),
        gateway6=addresses.GATEWAY6,
        address4=address4,
        gateway4=addresses.GATEWAY4,
        gateway_mac=addresses.GATEWAY_MAC,
        resolver=addresses.RESOLVER,
        mtu=mtu,
    )


def of_worker(worker: str, mark: str) -> State:
    """What a worker has without any machine."""
    return State(rules=mark, addresses=frozenset({Address("lo", addresses.worker_address(worker))}))


def of_machine(worker: str, wanted: Wanted, attached: Attachment) -> State:
    """What one machine adds to that."""
    device, six, four = attached.interface, attached.address6, attached.address4
    network = addresses.network(six)
    known = {addresses.link_local(attached.mac), six}
    elements = {
        Element("inet", "sources", (device, six)),
        Element("inet", "sources4", (device, four)),
        Element("inet", "networks", (device, network)),
        Element("inet", "marks", (device,), (addresses.mark(device),)),
        Element("inet", "machines", (six,)),
        Element("inet", "machines4", (four,)),
        Element("arp", "sources4", (device, four)),
        *(Element("inet", "solicitors", (device, address)) for address in known),
    }
    for protocol, inside, outside in wanted.publish:
        elements.add(Element("inet", "published4", (protocol, outside), (four, inside)))
        elements.add(Element("inet", "published6", (protocol, outside), (six, inside)))
    return State(
        elements=frozenset(elements),
        links=frozenset({Link(device, True, bool(wanted.publish))}),
        addresses=frozenset({Address(device, attached.gateway6), Address(device, attached.gateway4)}),
        neighbours=frozenset(Neighbour(device, address, attached.mac) for address in (six, four)),
        routes=frozenset({Route(device, six, addresses.worker_address(worker)), Route(device, four)}),
    )


def union(states: Iterable[State]) -> State:
    """All of them together. At most one may have rules."""
    every = tuple(states)
    return State(
        rules=next((state.rules for state in every if state.rules), ""),
        elements=frozenset[Element]().union(*(state.elements for state in every)),
        links=frozenset[Link]().union(*(state.links for state in every)),
        addresses=frozenset[Address]().union(*(state.addresses for state in every)),
        neighbours=frozenset[Neighbour]().union(*(state.neighbours for state in every)),
        routes=frozenset[Route]().union(*(state.routes for state in every)),
    )


def parts(state: State) -> dict[str, State]:
    """What each host end has of a state, by its name; under "" the rules and what belongs to none."""
    names = {it.key[1]: str(it.key[0]) for it in state.elements if it.set in ("sources", "sources4")}
    elements: dict[str, set[Element]] = defaultdict(set)
    for it in state.elements:
        if it.set in ("machines", "machines4"):
            elements[names.get(it.key[0], "")].add(it)
        else:
            elements[names.get(it.value[0], "") if it.is_port else str(it.key[0])].add(it)
    addresses_ = _by_device(state.addresses)
    neighbours, routes = _by_device(state.neighbours), _by_device(state.routes)
    links = {link.name: link for link in state.links}
    return {
        name: State(
            rules="" if name else state.rules,
            elements=frozenset(elements.get(name, ())),
            links=frozenset({links[name]} if name in links else ()),
            addresses=frozenset(addresses_.get(name, ())),
            neighbours=frozenset(neighbours.get(name, ())),
            routes=frozenset(routes.get(name, ())),
        )
        for name in {"", *elements, *addresses_, *neighbours, *routes, *links}
    }


def desired(worker: str, mark: str, machines: Iterable[tuple[Wanted, Attachment]], there: Iterable[str]) -> State:
    """What a worker's part of the network should be. A machine whose link is not `there` gets nothing: only who has the
    machine can make its link."""
    devices = set(there)
    attached = [of_machine(worker, wanted, its) for wanted, its in machines if its.interface in devices]
    return union([of_worker(worker, mark), *attached])


def difference(actual: State, wanted: State) -> list[Operation]:
    """What to do, in order. `wanted` has no links that are not there."""
    done: list[Operation] = []

    def do(operation: Operation) -> None:
        nonlocal actual
        done.append(operation)
        actual = after(actual, operation)

    if actual.rules != wanted.rules:
        do(Rules(wanted.rules))
    if gone := actual.elements - wanted.elements:
        do(Elements(gone, frozenset()))
    names = {link.name for link in wanted.links}
    for name in sorted({link.name for link in actual.links} - names):
        do(RemoveLink(name))
    for field in ("routes", "neighbours", "addresses"):
        for it in sorted(getattr(actual, field) - getattr(wanted, field)):
            do(Remove(it))
    for link in sorted(wanted.links - actual.links):
        do(Configure(link))
    for field in ("addresses", "neighbours", "routes"):
        for it in sorted(getattr(wanted, field) - getattr(actual, field)):
            do(Add(it))
    if new := wanted.elements - actual.elements:
        do(Elements(frozenset(), new))
    return done


def after(state: State, operation: Operation) -> State:
    """The state once an operation was applied."""
    match operation:
        case Rules(mark):
            return replace(state, rules=mark, elements=frozenset())
        case Elements(gone, new):
            return replace(state, elements=state.elements - gone | new)
        case RemoveLink(name):
            return State(
                rules=state.rules,
                elements=state.elements,
                links=frozenset(link for link in state.links if link.name != name),
                addresses=frozenset(it for it in state.addresses if it.device != name),
                neighbours=frozenset(it for it in state.neighbours if it.device != name),
                routes=frozenset(it for it in state.routes if it.device != name),
            )
        case Configure(link):
            kept = {each.name for each in state.links if each.ready}  # a new hardware address has no neighbours
            return replace(
                state,
                links=frozenset(each for each in state.links if each.name != link.name) | {link},
                neighbours=frozenset(it for it in state.neighbours if it.device != link.name or it.device in kept),
            )
        case Remove(Address() as it):
            return replace(state, addresses=state.addresses - {it})
        case Remove(Neighbour() as it):
            return replace(state, neighbours=state.neighbours - {it})
        case Remove(Route() as it):
            return replace(state, routes=state.routes - {it})
        case Add(Address() as it):
            return replace(state, addresses=state.addresses | {it})
        case Add(Neighbour() as it):
            return replace(state, neighbours=state.neighbours | {it})
        case Add(Route() as it):
            return replace(state, routes=state.routes | {it})
        case _:
            raise AssertionError(operation)


def _by_device(items: Iterable[_Item]) -> dict[str, set[_Item]]:
    """What is on the host's own loopback belongs to no host end."""
    found: dict[str, set[_Item]] = defaultdict(set)
    for it in items:
        found["" if it.device == "lo" else it.device].add(it)
    return found
