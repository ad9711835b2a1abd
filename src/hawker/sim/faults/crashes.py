"""Faults that end agents and hosts, or stop them for a while."""

from __future__ import annotations

from hawker.sim.faults import network
from hawker.sim.faults.faults import Faults
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault
from hawker.sim.platform.processes import Killed

CLOCK_BACK_SHARE, CLOCK_BACK_S = 0.4, 90.0
ALONE_SHARE, ALONE_S = 0.7, 8.0


def kill(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None:
        return False
    node.kill()
    faults.back_later(node, fault.lasts_s)
    return True


def _dies(faults: Faults, node: Node, fault: Fault, when: str) -> None:
    """Kill the node: the moment has come that the fault waited for."""
    node.kill(f"kill -9 {when}")
    faults.happened(fault)
    faults.back_later(node, fault.lasts_s)


def kill_at_write(faults: Faults, node: Node, fault: Fault) -> bool:
    """The agent dies in the middle of a commit: before the n-th change of its disk from now on."""
    left = int(fault.amount)

    def on_call(what: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            node.disk.on_call = None
            if node.process:
                _dies(faults, node, fault, f"before a {what}")

    node.disk.on_call = on_call
    return False


def kill_at_effect(faults: Faults, node: Node, fault: Fault) -> bool:
    """The agent dies right before or after its n-th outside effect from now on."""
    left = int(fault.amount)

    def point(when: str, effect: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            node.world.point = lambda when, effect: None
            if node.process:
                _dies(faults, node, fault, f"{when} {effect}")
                raise Killed

    node.world.point = point
    return False


def kill_before_reply(faults: Faults, node: Node, fault: Fault) -> bool:
    """The broker dies between a worker's acceptance of an order and the reply to its client."""
    return kill_at_answer(faults, node, fault, b'"machine":{')


def kill_at_answer(faults: Faults, node: Node, fault: Fault, sign: bytes) -> bool:
    """The node dies just before it hears an answer that has `sign` in it."""

    def on_stream(source: object, to: object, data: bytes) -> bool:
        if to is node.station and node.process and sign in data:
            faults.fleet.net.on_stream = lambda source, to, data: False
            _dies(faults, node, fault, f"before an answer with {sign.decode()}")
        return False

    faults.fleet.net.on_stream = on_stream
    return False


def kill_before_confirm(faults: Faults, node: Node, fault: Fault) -> bool:
    """The broker dies with a reservation in its hands: nobody will confirm it."""
    return kill_at_answer(faults, node, fault, b'"type":"reservation"')


def power(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None:
        return False
    node.cut_power()
    faults.back_later(node, fault.lasts_s)
    return True


def lost_catalog(faults: Faults, node: Node, fault: Fault) -> bool:
    """The power goes, and the catalog's file is lost, since nobody waits for it to be on the disk. Most such nodes
    reach no other host for a while after they come back, only their users."""
    if node.process is None:
        return False
    node.cut_power()
    node.disk.power_on()
    node.lose_disk({name: data for name, data in node.disk.backup().items() if not name.startswith("catalog")})
    if fault.amount < ALONE_SHARE:
        net, others = faults.fleet.net, [other.station for other in faults.fleet.nodes.values() if other is not node]
        links = [link for other in others for link in (net.link(node.station, other), net.link(other, node.station))]
        network.cut(faults, links, fault.lasts_s + ALONE_S)
    faults.back_later(node, fault.lasts_s)
    return True


def power_at_write(faults: Faults, node: Node, fault: Fault) -> bool:
    """The host's power goes in the n-th change of its disk from now on: writes are lost or torn."""
    node.disk.cut_at = node.disk.calls + int(fault.amount)

    def cut() -> None:
        node.cut_power("power cut in a write")
        faults.happened(fault)
        faults.back_later(node, fault.lasts_s)
        node.disk.on_cut = node.cut_power

    node.disk.on_cut = cut
    return False


def disk_power(faults: Faults, node: Node, fault: Fault) -> bool:
    """The disk loses what was not synced, and the agent dies; programs run on, as when storage is reset."""
    if node.process is None:
        return False
    node.kill("storage reset")
    node.disk.power_on()
    faults.back_later(node, fault.lasts_s)
    return True


def lost_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    node.kill("lost disk")
    node.lose_disk()
    node.recover = "discard"  # so decides an operator who knows of the loss
    faults.fleet.lost(node, since_s=0.0)
    faults.back_later(node, fault.lasts_s)
    return True


def restore(faults: Faults, node: Node, fault: Fault) -> bool:
    """A backup is taken now and brought back later, after the agent went on."""
    files, since_s = node.disk.backup(), faults.fleet.loop.time()
    if not files:
        return False

    def bring_back() -> None:
        node.kill("restore from a backup")
        if fault.amount < CLOCK_BACK_SHARE:  # the host that the backup is brought to has the wrong time, too
            node.clock.ahead_s -= CLOCK_BACK_S
            faults.clocks_moved.add(node.name)
        node.lose_disk(files)
        node.recover = "discard"
        faults.fleet.lost(node, since_s=since_s)
        faults.happened(fault)
        faults.back_later(node, 1.0)

    faults.later(fault.lasts_s, bring_back)
    return False


def shrink(faults: Faults, node: Node, fault: Fault) -> bool:
    """The host comes back with less room than it had."""
    role = node.settings.worker
    if node.process is None or role is None:
        return False
    node.kill("fewer memory modules")
    for name in ("cpus_shared", "memory_mib"):
        role.capacity[name] = int(role.capacity[name] * fault.amount)
    faults.back_later(node, fault.lasts_s)
    return True


def mass_restart(faults: Faults, node: Node, fault: Fault) -> bool:
    """Kill every agent at once, as after a bad upgrade; they come back one after the other."""
    for number, each in enumerate(faults.fleet.nodes.values()):
        each.kill("kill -9 of all")
        faults.back_later(each, fault.lasts_s * (1 + number) / len(faults.fleet.nodes))
    return True


def pause(faults: Faults, node: Node, fault: Fault) -> bool:
    if node.process is None or node.process.paused:
        return False
    process = node.process
    node.pause()
    faults.later(fault.lasts_s, faults.fleet.loop.resume, process)
    return True
