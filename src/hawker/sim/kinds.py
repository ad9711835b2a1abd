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
from hawker.model.guest import Resources
from hawker.sim.clients import IMAGES
from hawker.sim.loop import Killed

if TYPE_CHECKING:
    from hawker.sim.faults import Fault, Faults
    from hawker.sim.net import Link, Station
    from hawker.sim.node import Node

CLOCK_BACK_SHARE, CLOCK_BACK_S = 0.4, 90.0

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


# --- agents and hosts ------------------------------------------------------------------------------------------------


def _kill(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None:
        return False
    node.kill()
    faults.back_later(node, fault.lasts_s)
    return True


def _kill_at_write(faults: Faults, node: Node, fault: Fault) -> bool:
    """The agent dies in the middle of a commit: before the n-th change of its disk from now on."""
    left = int(fault.amount)

    def on_call(what: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            node.disk.on_call = None
            if node.process:
                node.kill(f"kill -9 before a {what}")
                faults.happened(fault)
                faults.back_later(node, fault.lasts_s)

    node.disk.on_call = on_call
    return False


def _kill_at_effect(faults: Faults, node: Node, fault: Fault) -> bool:
    """The agent dies right before or after its n-th outside effect from now on."""
    left = int(fault.amount)

    def point(when: str, effect: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            node.world.point = lambda when, effect: None
            if node.process:
                node.kill(f"kill -9 {when} {effect}")
                faults.happened(fault)
                faults.back_later(node, fault.lasts_s)
                raise Killed

    node.world.point = point
    return False


def _kill_before_reply(faults: Faults, node: Node, fault: Fault) -> bool:
    """The broker dies between a worker's acceptance of an order and the reply to its client."""
    return _kill_at_answer(faults, node, fault, b'"machine":{')


def _kill_at_answer(faults: Faults, node: Node, fault: Fault, sign: bytes) -> bool:
    """The node dies just before it hears an answer that has `sign` in it."""

    def on_stream(source: object, to: object, data: bytes) -> bool:
        if to is node.station and node.process and sign in data:
            faults.cluster.net.on_stream = lambda source, to, data: False
            node.kill(f"kill -9 before an answer with {sign.decode()}")
            faults.happened(fault)
            faults.back_later(node, fault.lasts_s)
        return False

    faults.cluster.net.on_stream = on_stream
    return False


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


def _kill_before_confirm(faults: Faults, node: Node, fault: Fault) -> bool:
    """The broker dies with a reservation in its hands: nobody will confirm it."""
    return _kill_at_answer(faults, node, fault, b'"type":"reservation"')


def _power(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None:
        return False
    node.cut_power()
    faults.back_later(node, fault.lasts_s)
    return True


def _power_at_write(faults: Faults, node: Node, fault: Fault) -> bool:
    """The host's power goes in the n-th change of its disk from now on: writes are lost or torn."""
    node.disk.cut_at = node.disk.calls + int(fault.amount)

    def cut() -> None:
        node.cut_power("power cut in a write")
        faults.happened(fault)
        faults.back_later(node, fault.lasts_s)
        node.disk.on_cut = node.cut_power

    node.disk.on_cut = cut
    return False


def _disk_power(faults: Faults, node: Node, fault: Fault) -> bool:
    """The disk loses what was not synced, and the agent dies; programs run on, as when storage is reset."""
    if node.process is None:
        return False
    node.kill("storage reset")
    node.disk.power_on()
    faults.back_later(node, fault.lasts_s)
    return True


def _lost_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    node.kill("lost disk")
    node.lose_disk()
    faults.cluster.lost(node, since_s=0.0)
    faults.back_later(node, fault.lasts_s)
    return True


def _restore(faults: Faults, node: Node, fault: Fault) -> bool:
    """A backup is taken now and brought back later, after the agent went on."""
    files, since_s = node.disk.backup(), faults.cluster.loop.time()
    if not files:
        return False

    def bring_back() -> None:
        node.kill("restore from a backup")
        if fault.amount < CLOCK_BACK_SHARE:  # the host that the backup is brought to has the wrong time, too
            node.clock.ahead_s -= CLOCK_BACK_S
            faults.clocks_moved.add(node.name)
        node.lose_disk(files)
        faults.cluster.lost(node, since_s=since_s)
        faults.happened(fault)
        faults.back_later(node, 1.0)

    faults.later(fault.lasts_s, bring_back)
    return False


def _shrink(faults: Faults, node: Node, fault: Fault) -> bool:
    """The host comes back with less room than it had."""
    role = node.settings.worker
    if node.process is None or role is None or role.capacity is None:
        return False
    node.kill("fewer memory modules")
    old = role.capacity
    share = fault.amount
    smaller = Resources(
        cpus_shared=int(old.cpus_shared * share),
        cpus_dedicated=old.cpus_dedicated,
        memory_mib=int(old.memory_mib * share),
        disk_mib=old.disk_mib,
        machines=old.machines,
    )
    role.capacity = smaller
    faults.back_later(node, fault.lasts_s)
    return True


def _mass_restart(faults: Faults, node: Node, fault: Fault) -> bool:
    """Every agent dies at once, as after a bad upgrade; they come back one after the other."""
    for number, each in enumerate(faults.cluster.nodes.values()):
        each.kill("kill -9 of all")
        faults.back_later(each, fault.lasts_s * (1 + number) / len(faults.cluster.nodes))
    return True


def _pause(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None or node.process.paused:
        return False
    process = node.process
    node.pause()
    faults.later(fault.lasts_s, faults.cluster.loop.resume, process)
    return True


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
    "kill": Kind(3, "any", (0.1, 4), (0, 0), _kill),
    "kill at a write": Kind(2, "worker", (0.1, 3), (1, 30), _kill_at_write),
    "kill at an effect": Kind(2, "worker", (0.1, 3), (1, 9), _kill_at_effect),
    "kill before the reply": Kind(1.5, "broker", (0.1, 3), (0, 0), _kill_before_reply),
    "cut at the answer": Kind(1.5, "broker", (5, 9), (0, 0), _cut_at_answer),
    "kill before the confirm": Kind(1.5, "broker", (0.1, 3), (0, 0), _kill_before_confirm),
    "power cut": Kind(1, "any", (0.5, 6), (0, 0), _power),
    "long power cut": Kind(0.5, "worker", (10, 25), (0, 0), _power),
    "power cut in a write": Kind(2, "worker", (0.5, 5), (1, 40), _power_at_write),
    "storage reset": Kind(0.7, "worker", (0.2, 3), (0, 0), _disk_power),
    "lost disk": Kind(0.4, "worker", (0.5, 4), (0, 0), _lost_disk),
    "restore": Kind(0.4, "worker", (3, 15), (0, 1), _restore),
    "shrink": Kind(0.4, "worker", (0.5, 3), (0.4, 0.9), _shrink),
    "mass restart": Kind(0.3, "any", (0.5, 6), (0, 0), _mass_restart),
    "pause": Kind(2, "any", (0.2, 12), (0, 0), _pause),
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
