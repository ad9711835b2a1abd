"""Faults of clocks, of drivers, of what they fetch images from, and of programs."""

from __future__ import annotations

from hawker.errors import Broken
from hawker.sim.clients.orderers import IMAGES
from hawker.sim.faults.faults import Faults
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault


def jump(faults: Faults, node: Node, fault: Fault) -> bool:
    node.clock.ahead_s += fault.amount
    faults.clocks_moved.add(node.name)
    return True


def drift(faults: Faults, node: Node, fault: Fault) -> bool:
    node.clock.drift_from_now(fault.amount)
    faults.clocks_moved.add(node.name)
    return True


def slow_driver(faults: Faults, node: Node, fault: Fault) -> bool:
    operations = ("prepare", "start", "stop", "destroy", "purge", "resize", "recover")
    node.world.delays.update(dict.fromkeys(operations, fault.amount))
    faults.later(fault.lasts_s, node.world.delays.clear)
    return True


def failing_driver(faults: Faults, node: Node, fault: Fault) -> bool:
    """Have every second operation fail after its effect; the last failure of an operation parks its run at once."""
    kind = node.world.faults if int(fault.amount) % 2 else node.world.late_faults
    for operation in ("prepare", "start", "stop", "destroy", "purge", "resize"):
        failures = [RuntimeError("injected") for _ in range(int(fault.amount))]
        kind.setdefault(operation, []).extend([*failures, Broken("injected")])
    faults.later(fault.lasts_s, kind.clear)
    return True


def no_images(faults: Faults, node: Node, fault: Fault) -> bool:
    """No registry answers, and the images that were here are gone. With an odd amount one image has become useless."""
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


def late_exits(faults: Faults, node: Node, fault: Fault) -> bool:
    world = node.world
    world.exits_late_s, world.exits_twice = fault.amount, True

    def mend() -> None:
        world.exits_late_s, world.exits_twice = 0.0, False

    faults.later(fault.lasts_s, mend)
    return True


def hung_programs(faults: Faults, node: Node, fault: Fault) -> bool:
    """Have the programs that run there now take connections and requests and do nothing, until they go on where they
    were."""
    if not node.world.instances:
        return False
    node.world.on_hang(True)
    faults.later(fault.lasts_s, node.world.on_hang, False)
    return True
