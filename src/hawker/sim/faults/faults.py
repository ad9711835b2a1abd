"""How faults are done to a fleet, each at its time: `Faults`, and what each `Kind` has to say.

`Faults.fired` counts what took effect; a fault that found nothing to break (an agent that is down already) is not
counted. The kinds are listed in `kinds`, and drawn from a seed in `drawing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import Node
from hawker.sim.plan import Fault
from hawker.sim.platform.links import Link

SLACK_S = 20.0
"""How long a fault may be felt after it is over: retransmissions, and a fault that waits for its moment."""


class Faults:
    """Does a plan to a fleet, of these kinds by their names."""

    def __init__(self, fleet: Fleet, plan: Sequence[Fault], kinds: Mapping[str, Kind]) -> None:
        self.fleet = fleet
        self.plan = plan
        self._kinds = kinds
        self.fired: Counter[str] = Counter()
        self.over = False
        self.clocks_moved: set[str] = set()

    def shift(self, by_s: float) -> None:
        """Let the plan's times count from then on."""
        self.plan = [replace(fault, at_s=fault.at_s + by_s) for fault in self.plan]

    def schedule(self) -> None:
        for fault in self.plan:
            self.later(fault.at_s - self.fleet.loop.time(), self._do, fault)

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """Wait for the beginning or the end of a fault: nothing happens any more once the faults are over."""

        def unless_over() -> None:
            if not self.over:
                call(*args)

        self.fleet.net.later(delay_s, unless_over)

    def _do(self, fault: Fault) -> None:
        if self._kinds[fault.kind].do(self, self.fleet.nodes[fault.node], fault):
            self.happened(fault)

    def happened(self, fault: Fault) -> None:
        self.fired[fault.kind] += 1
        self.fleet.record.note("fault", fault.node, fault.line())

    def troubled(self, broker: str, client: str, since_s: float, until_s: float) -> bool:
        """Whether a fault may have kept a broker from hearing or answering a client in that time."""
        fleet = self.fleet
        regions = {fleet.net.stations[name].region for name in (broker, client)}
        for fault in self.plan:
            if fault.at_s <= until_s and since_s <= fault.at_s + fault.lasts_s + SLACK_S:
                if fault.kind == "mass restart":
                    return True
                split = fault.kind == "split region" and fleet.nodes[fault.node].settings.region in regions
                if broker in (fault.node, fault.other) or split:
                    return True
        return False

    def end(self) -> None:
        """Mend everything: power, disks, links, drivers. Agents run again. Clocks stay as far off as they are."""
        self.over = True
        for link in self.fleet.net.links():
            link.heal()
        self.fleet.net.on_stream = lambda source, to, data: False
        for node in self.fleet.nodes.values():
            node.disk.on_call = node.disk.on_sync = None
            node.disk.cut_at = node.disk.fail_at = node.disk.room = None
            node.disk.broken = False
            node.world.point = lambda when, effect: None
            node.world.delays.clear()
            node.world.faults.clear()
            node.world.late_faults.clear()
            node.world.on_hang(False)
            node.world.silent_images.clear()
            node.world.bad_images.clear()
            node.world.exits_late_s, node.world.exits_twice = 0.0, False
            node.clock.drift_from_now(0.0)
            node.resume()
            node.start()

    def back_later(self, node: Node, delay_s: float) -> None:
        self.later(delay_s, node.start)

    def links_of(self, node: Node) -> list[Link]:
        """Every link from and to a host."""
        net = self.fleet.net
        others = [other for other in net.stations.values() if other is not node.station]
        return [link for other in others for link in (net.link(node.station, other), net.link(other, node.station))]


Do = Callable[["Faults", "Node", "Fault"], bool]
"""Does a fault and returns whether it took effect at once. A fault that waits for its moment counts itself."""


class Kind(msgspec.Struct, frozen=True):
    """How often a kind comes in a minute, whom it may hit (workers, brokers, edges, any), how long and how much."""

    rate: float
    whom: str
    lasts_s: tuple[float, float]
    amount: tuple[float, float]
    do: Do
    pair: bool = False
