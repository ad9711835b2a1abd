"""Faults of disks: full, broken, slow."""

from __future__ import annotations

from hawker.sim.faults.faults import Faults
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault


def full(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.room = node.disk.used() + int(fault.amount)
    faults.later(fault.lasts_s, setattr, node.disk, "room", None)
    return True


def io_error(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.fail_at = node.disk.calls + int(fault.amount)
    return True


def broken_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.broken = True
    faults.later(fault.lasts_s, setattr, node.disk, "broken", False)
    return True


def slow_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    """Have every sync take a while, during which the agent stands still."""
    loop = faults.fleet.loop

    def on_sync() -> None:
        process = node.process
        if process and not process.paused:
            loop.pause(process)
            faults.fleet.net.later(fault.amount, loop.resume, process)

    node.disk.on_sync = on_sync
    faults.later(fault.lasts_s, setattr, node.disk, "on_sync", None)
    return True
