"""Faults of the network: links that are cut, or lose, double, reorder and delay what they carry."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hawker.sim.faults.faults import Do, Faults
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault
from hawker.sim.platform.links import Link
from hawker.sim.platform.processes import Station


def isolate(faults: Faults, node: Node, fault: Fault) -> bool:
    cut(faults, faults.links_of(node), fault.lasts_s)
    return True


def cut_pair(faults: Faults, node: Node, fault: Fault) -> bool:
    net, other = faults.fleet.net, faults.fleet.nodes[fault.other]
    cut(faults, [net.link(node.station, other.station), net.link(other.station, node.station)], fault.lasts_s)
    return True


def cut_one_way(faults: Faults, node: Node, fault: Fault) -> bool:
    other = faults.fleet.nodes[fault.other]
    cut(faults, [faults.fleet.net.link(node.station, other.station)], fault.lasts_s)
    return True


def deaf(faults: Faults, node: Node, fault: Fault) -> bool:
    """The node can send but hears nothing, or hears but cannot send."""
    net = faults.fleet.net
    others = [other for other in net.stations.values() if other is not node.station]
    deaf = int(fault.amount * 1000) % 2 == 0
    links = [net.link(o, node.station) if deaf else net.link(node.station, o) for o in others]
    cut(faults, links, fault.lasts_s)
    return True


def split(faults: Faults, node: Node, fault: Fault) -> bool:
    """One region is cut off from the others."""
    net = faults.fleet.net
    inside = [s for s in net.stations.values() if s.region == node.station.region]
    outside = [s for s in net.stations.values() if s.region != node.station.region]
    cut(faults, [link for a in inside for b in outside for link in (net.link(a, b), net.link(b, a))], fault.lasts_s)
    return True


def flap(faults: Faults, node: Node, fault: Fault) -> bool:
    links = faults.links_of(node)
    times = 6
    for turn in range(times):
        faults.later(turn * fault.lasts_s / times, cut, faults, links, fault.lasts_s / times / 2)
    return True


def cut(faults: Faults, links: Sequence[Link], lasts_s: float) -> None:
    """Cut links for so long. Several faults may cut one link at once."""
    for link in links:
        link.cuts += 1

    def mend() -> None:
        for link in links:
            link.cuts -= 1

    faults.later(lasts_s, mend)


def cut_at_answer(faults: Faults, node: Node, fault: Fault) -> bool:
    """A broker loses the way to a worker at the very moment in which the worker says that it has filled an order."""
    net = faults.fleet.net

    def on_stream(source: Station, to: Station, data: bytes) -> bool:
        if not (to is node.station and node.process and b'"machine":{' in data):
            return False
        net.on_stream = lambda source, to, data: False
        cut(faults, [net.link(source, to), net.link(to, source)], fault.lasts_s)
        faults.happened(fault)
        return True

    net.on_stream = on_stream
    return False


def swizzle(faults: Faults, node: Node, fault: Fault) -> bool:
    """A host's links are cut one after the other and mended in another order."""
    links = faults.links_of(node)
    rng = random.Random(fault.line())
    for link in links:
        began_s, ends_s = sorted((rng.uniform(0, fault.lasts_s), rng.uniform(0, fault.lasts_s)))
        faults.later(began_s, cut, faults, [link], ends_s - began_s)
    return True


def quality(name: str) -> Do:
    """Packets of all links of a node are lost, doubled, reordered or late."""

    def do(faults: Faults, node: Node, fault: Fault) -> bool:
        for link in faults.links_of(node):
            setattr(link, name, fault.amount)
            faults.later(fault.lasts_s, setattr, link, name, 0.0)
        return True

    return do
