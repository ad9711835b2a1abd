"""Faults of disks: full, broken, slow."""

from __future__ import annotations

from hawker.sim.faults.faults import Faults
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault


def full(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.room = node.disk.used() + int(fault.amount)

    def clear() -> None:
        node.disk.room = None

    faults.later(fault.lasts_s, clear)
    return True


def io_error(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.fail_at = node.disk.calls + int(fault.amount)
    return True


def broken_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    node.disk.broken = True

    def mend() -> None:
        node.disk.broken = False

    faults.later(fault.lasts_s, mend)
    return True


def slow_disk(faults: Faults, node: Node, fault: Fault) -> bool:
    """Have every sync take a while, during which the agent stands still."""
    loop = faults.fleet.loop

    def on_sync() -> None:
        process = node.process
        if process and not process.paused:
            loop.pause(process)
            faults.fleet.net.later(fault.amount, loop.resume, process)

    def mend() -> None:
        node.disk.on_sync = None

    node.disk.on_sync = on_sync
    faults.later(fault.lasts_s, mend)
    return True
