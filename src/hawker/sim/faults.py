"""What goes wrong in a simulation: a plan drawn from the seed before it begins, and how each fault is done.

Every kind of fault has a random number generator of its own, so taking one out of a plan leaves the others as they
are: that is how a failing run is shrunk. `Faults.fired` counts what took effect; a fault that found nothing to break
(an agent that is down already) is not counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from hawker.sim.kinds import KINDS

if TYPE_CHECKING:
    from hawker.sim.cluster import Cluster
    from hawker.sim.net import Link
    from hawker.sim.node import Node


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault: when, what, on which node (or between which two), for how long, how much."""

    at_s: float
    kind: str
    node: str
    other: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0

    def line(self) -> str:
        whom = f"{self.node}-{self.other}" if self.other else self.node
        return f"{self.at_s:.3f} {self.kind} {whom} for {self.lasts_s:.3f} s, {self.amount:.3f}"


SLACK_S = 20.0
"""How long a fault may be felt after it is over: retransmissions, and a fault that waits for its moment."""


def draw(
    seed: str,
    seconds: float,
    workers: Sequence[str],
    brokers: Sequence[str],
    *,
    only: Sequence[str] = (),
    times: float = 1.0,
) -> list[Fault]:
    """A plan for a simulation of that length, in order of time. `only` of these kinds, and so many `times` as often."""
    plan: list[Fault] = []
    names = {"worker": list(workers), "broker": list(brokers), "any": [*workers, *brokers]}
    for name, kind in KINDS.items():
        rng = random.Random(f"{seed}/fault/{name}")
        expected = kind.rate * times * seconds / 60 if not only or name in only else 0.0
        for _ in range(int(expected) + (rng.random() < expected % 1)):
            node = rng.choice(names[kind.whom])
            other = rng.choice([n for n in names["any"] if n != node]) if kind.pair else ""
            plan.append(
                Fault(
                    at_s=round(rng.uniform(2, seconds), 3),
                    kind=name,
                    node=node,
                    other=other,
                    lasts_s=round(rng.uniform(*kind.lasts_s), 3),
                    amount=round(rng.uniform(*kind.amount), 3),
                )
            )
    return sorted(plan, key=lambda fault: (fault.at_s, fault.kind, fault.node))


class Faults:
    """Does a plan to a cluster."""

    def __init__(self, cluster: Cluster, plan: Sequence[Fault]) -> None:
        self.cluster = cluster
        self.plan = plan
        self.fired: Counter[str] = Counter()
        self.over = False
        self.clocks_moved: set[str] = set()

    def shift(self, by_s: float) -> None:
        """The plan's times count from then on."""
        self.plan = [replace(fault, at_s=fault.at_s + by_s) for fault in self.plan]

    def schedule(self) -> None:
        for fault in self.plan:
            self.later(fault.at_s - self.cluster.loop.time(), self._do, fault)

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """For the beginning or the end of a fault: nothing happens any more once the faults are over."""

        def unless_over() -> None:
            if not self.over:
                call(*args)

        self.cluster.net.later(delay_s, unless_over)

    def _do(self, fault: Fault) -> None:
        if KINDS[fault.kind].do(self, self.cluster.nodes[fault.node], fault):
            self.happened(fault)

    def happened(self, fault: Fault) -> None:
        self.fired[fault.kind] += 1
        self.cluster.record.note("fault", fault.node, fault.line())

    def troubled(self, broker: str, client: str, since_s: float, until_s: float) -> bool:
        """Whether a fault may have kept a broker from hearing or answering a client in that time."""
        cluster = self.cluster
        regions = {cluster.net.stations[name].region for name in (broker, client)}
        for fault in self.plan:
            if fault.at_s <= until_s and since_s <= fault.at_s + fault.lasts_s + SLACK_S:
                if fault.kind == "mass restart":
                    return True
                split = fault.kind == "split region" and cluster.nodes[fault.node].settings.region in regions
                if broker in (fault.node, fault.other) or split:
                    return True
        return False

    def end(self) -> None:
        """Everything is mended: power, disks, links, drivers; agents run. Clocks stay as far off as they are."""
        self.over = True
        for link in self.cluster.net.links():
            link.heal()
        self.cluster.net.on_stream = lambda source, to, data: False
        for node in self.cluster.nodes.values():
            node.disk.on_call = node.disk.on_sync = None
            node.disk.cut_at = node.disk.fail_at = node.disk.room = None
            node.disk.broken = False
            node.world.point = lambda when, effect: None
            node.world.delays.clear()
            node.world.faults.clear()
            node.world.late_faults.clear()
            node.world.silent_images.clear()
            node.world.bad_images.clear()
            node.world.exits_late_s, node.world.exits_twice = 0.0, False
            node.clock.stop_drifting()
            node.resume()
            node.start()

    def back_later(self, node: Node, delay_s: float) -> None:
        self.later(delay_s, node.start)

    def links_of(self, node: Node) -> list[Link]:
        """Every link from and to a host."""
        net = self.cluster.net
        others = [other for other in net.stations.values() if other is not node.station]
        return [link for other in others for link in (net.link(node.station, other), net.link(other, node.station))]
