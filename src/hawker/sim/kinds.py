"""Every kind of fault: how often it comes, whom it hits, and what it does to a cluster (`sim.faults` draws and counts).

One that takes effect at once returns True and is counted by its caller; one that waits for its moment, such as the n-th
write, counts itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hawker.errors import Broken
from hawker.sim import crashes
from hawker.sim.clients import IMAGES

if TYPE_CHECKING:
    from hawker.sim.faults import Fault, Faults
    from hawker.sim.net import Link, Station
    from hawker.sim.node import Node

Do = Callable[["Faults", "Node", "Fault"], bool]
"""Does a fault; True when it took effect at once. One that waits for its moment counts itself."""


class Kind(msgspec.Struct, frozen=True):
    """How often a kind comes in a minute, whom it may hit (workers, brokers, any), how long and how much."""

    rate: float
    whom: str
    lasts_s: tuple[float, float]
    amount: tuple[float, float]
    do: Do
    pair: bool = False


# --- disks -----------------------------------------------------------------------------------------------------------


def _full(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.room = node.disk.used() + int(fault.amount)

    def clear() -> None:
        node.disk.room = None

    faults.later(fault.lasts_s, clear)
    return True


def _io_error(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.fail_at = node.disk.calls + int(fault.amount)
    return True


def _broken_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.broken = True

    def mend() -> None:
        node.disk.broken = False

    faults.later(fault.lasts_s, mend)
    return True


def _slow_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    """Every sync takes a while, and the agent stands still meanwhile."""
    loop = faults.cluster.loop

    def on_sync() -> None:
        process = node.process
        if process and not process.paused:
            loop.pause(process)
            faults.cluster.net.later(fault.amount, loop.resume, process)

    def mend() -> None:
        node.disk.on_sync = None

    node.disk.on_sync = on_sync
    faults.later(fault.lasts_s, mend)
    return True


# --- the network -----------------------------------------------------------------------------------------------------


def _isolate(faults: Faults, node: Node, fault: Fault) -> bool:
    _cut(faults, faults.links_of(node), fault.lasts_s)
    return True


def _cut_pair(faults: Faults, node: Node, fault: Fault) -> bool:
    net, other = faults.cluster.net, faults.cluster.nodes[fault.other]
    _cut(faults, [net.link(node.station, other.station), net.link(other.station, node.station)], fault.lasts_s)
    return True


def _cut_one_way(faults: Faults, node: Node, fault: Fault) -> bool:
    other = faults.cluster.nodes[fault.other]
    _cut(faults, [faults.cluster.net.link(node.station, other.station)], fault.lasts_s)
    return True


def _deaf(faults: Faults, node: Node, fault: Fault) -> bool:
    """It sends and hears nothing, or the other way round."""
    net = faults.cluster.net
    others = [other for other in net.stations.values() if other is not node.station]
    deaf = int(fault.amount * 1000) % 2 == 0
    links = [net.link(o, node.station) if deaf else net.link(node.station, o) for o in others]
    _cut(faults, links, fault.lasts_s)
    return True


def _split(faults: Faults, node: Node, fault: Fault) -> bool:
    """One region is cut off from the others."""
    net = faults.cluster.net
    inside = [s for s in net.stations.values() if s.region == node.station.region]
    outside = [s for s in net.stations.values() if s.region != node.station.region]
    _cut(faults, [link for a in inside for b in outside for link in (net.link(a, b), net.link(b, a))], fault.lasts_s)
    return True


def _flap(faults: Faults, node: Node, fault: Fault) -> bool:
    links = faults.links_of(node)
    times = 6
    for turn in range(times):
        faults.later(turn * fault.lasts_s / times, _cut, faults, links, fault.lasts_s / times / 2)
    return True


def _cut(faults: Faults, links: Sequence[Link], lasts_s: float) -> None:
    for link in links:
        link.cuts += 1

    def mend() -> None:
        for link in links:
            link.cuts -= 1

    faults.later(lasts_s, mend)


def _cut_at_answer(faults: Faults, node: Node, fault: Fault) -> bool:
    """A broker loses the way to a worker at the very moment that one says it has filled an order."""
    net = faults.cluster.net

    def on_stream(source: Station, to: Station, data: bytes) -> bool:
        if not (to is node.station and node.process and b'"machine":{' in data):
            return False
        net.on_stream = lambda source, to, data: False
        _cut(faults, [net.link(source, to), net.link(to, source)], fault.lasts_s)
        faults.happened(fault)
        return True

    net.on_stream = on_stream
    return False


def _swizzle(faults: Faults, node: Node, fault: Fault) -> bool:
    """A host's links are cut one after the other and mended in another order."""
    links = faults.links_of(node)
    rng = random.Random(fault.line())
    for link in links:
        began_s, ends_s = sorted((rng.uniform(0, fault.lasts_s), rng.uniform(0, fault.lasts_s)))
        faults.later(began_s, _cut, faults, [link], ends_s - began_s)
    return True


def _quality(name: str) -> Do:
    """Packets of all links of a node are lost, doubled, reordered or late."""

    def do(faults: Faults, node: Node, fault: Fault) -> bool:
        links = faults.links_of(node)
        for link in links:
            setattr(link, name, fault.amount)

        def mend() -> None:
            for link in links:
                setattr(link, name, 0.0)

        faults.later(fault.lasts_s, mend)
        return True

    return do


# --- clocks and drivers ----------------------------------------------------------------------------------------------


def _jump(faults: Faults, node: Node, fault: Fault) -> bool:
    node.clock.ahead_s += fault.amount
    faults.clocks_moved.add(node.name)
    return True


def _drift(faults: Faults, node: Node, fault: Fault) -> bool:
    node.clock.drift_from_now(fault.amount)
    faults.clocks_moved.add(node.name)
    return True


def _slow_driver(faults: Faults, node: Node, fault: Fault) -> bool:
    operations = ("prepare", "start", "stop", "destroy", "purge", "resize", "recover")
    node.world.delays.update(dict.fromkeys(operations, fault.amount))
    faults.later(fault.lasts_s, node.world.delays.clear)
    return True


def _failing_driver(faults: Faults, node: Node, fault: Fault) -> bool:
    """Every second one fails after its effect; the last of an operation's failures parks its run at once."""
    kind = node.world.faults if int(fault.amount) % 2 else node.world.late_faults
    for operation in ("prepare", "start", "stop", "destroy", "purge", "resize"):
        failures = [RuntimeError("injected") for _ in range(int(fault.amount))]
        kind.setdefault(operation, []).extend([*failures, Broken("injected")])
    faults.later(fault.lasts_s, kind.clear)
    return True


def _no_images(faults: Faults, node: Node, fault: Fault) -> bool:
    """No registry answers, and what was here is gone; with an odd amount one image has become useless."""
    world = node.world
    world.images.clear()
    world.silent_images.update(IMAGES)
    if int(fault.amount) % 2:
        world.bad_images[IMAGES[0]] = "a layer is corrupt"

    def mend() -> None:
        world.silent_images.clear()
        world.bad_images.clear()

    faults.later(fault.lasts_s, mend)
    return True


def _late_exits(faults: Faults, node: Node, fault: Fault) -> bool:
    world = node.world
    world.exits_late_s, world.exits_twice = fault.amount, True

    def mend() -> None:
        world.exits_late_s, world.exits_twice = 0.0, False

    faults.later(fault.lasts_s, mend)
    return True


KINDS: dict[str, Kind] = {
    "kill": Kind(3, "any", (0.1, 4), (0, 0), crashes.kill),
    "kill at a write": Kind(2, "worker", (0.1, 3), (1, 30), crashes.kill_at_write),
    "kill at an effect": Kind(2, "worker", (0.1, 3), (1, 9), crashes.kill_at_effect),
    "kill before the reply": Kind(1.5, "broker", (0.1, 3), (0, 0), crashes.kill_before_reply),
    "cut at the answer": Kind(1.5, "broker", (5, 9), (0, 0), _cut_at_answer),
    "kill before the confirm": Kind(1.5, "broker", (0.1, 3), (0, 0), crashes.kill_before_confirm),
    "power cut": Kind(1, "any", (0.5, 6), (0, 0), crashes.power),
    "long power cut": Kind(0.5, "worker", (10, 25), (0, 0), crashes.power),
    "power cut in a write": Kind(2, "worker", (0.5, 5), (1, 40), crashes.power_at_write),
    "storage reset": Kind(0.7, "worker", (0.2, 3), (0, 0), crashes.disk_power),
    "lost disk": Kind(0.4, "worker", (0.5, 4), (0, 0), crashes.lost_disk),
    "restore": Kind(0.4, "worker", (3, 15), (0, 1), crashes.restore),
    "shrink": Kind(0.4, "worker", (0.5, 3), (0.4, 0.9), crashes.shrink),
    "mass restart": Kind(0.3, "any", (0.5, 6), (0, 0), crashes.mass_restart),
    "pause": Kind(2, "any", (0.2, 12), (0, 0), crashes.pause),
    "full disk": Kind(1.5, "worker", (1, 8), (0, 60_000), _full),
    "i/o error": Kind(1.5, "worker", (0, 0), (1, 30), _io_error),
    "broken disk": Kind(0.5, "worker", (1, 5), (0, 0), _broken_disk),
    "slow disk": Kind(1, "worker", (2, 8), (0.005, 0.3), _slow_disk),
    "isolated": Kind(0.7, "any", (1, 10), (0, 0), _isolate),
    "cut pair": Kind(1.5, "any", (1, 15), (0, 0), _cut_pair, pair=True),
    "cut one way": Kind(1.5, "any", (1, 15), (0, 0), _cut_one_way, pair=True),
    "deaf or mute": Kind(0.7, "any", (1, 8), (0, 1), _deaf),
    "split region": Kind(0.4, "any", (2, 12), (0, 0), _split),
    "flap": Kind(0.7, "any", (3, 10), (0, 0), _flap),
    "swizzle": Kind(0.5, "any", (4, 15), (0, 0), _swizzle),
    "loss": Kind(1.5, "any", (3, 20), (0.02, 0.4), _quality("loss")),
    "duplicates": Kind(1, "any", (3, 20), (0.05, 0.5), _quality("duplicates")),
    "reordering": Kind(1, "any", (3, 20), (0.05, 0.5), _quality("reordered")),
    "slow link": Kind(1, "any", (2, 10), (0.05, 0.6), _quality("slow_s")),
    "clock jump": Kind(1, "any", (0, 0), (-20, 20), _jump),
    "clock drift": Kind(0.7, "any", (0, 0), (-0.05, 0.05), _drift),
    "slow driver": Kind(1, "worker", (2, 10), (0.1, 2), _slow_driver),
    "failing driver": Kind(1.5, "worker", (1, 6), (1, 12), _failing_driver),
    "no images": Kind(0.7, "worker", (1, 10), (0, 3), _no_images),
    "late exits": Kind(0.7, "worker", (3, 10), (0.05, 3), _late_exits),
}
"""Every kind of fault, with how often it comes in a minute of the whole system."""
