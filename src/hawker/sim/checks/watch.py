"""What must hold at any moment of a run, and what must hold of the catalog at rest.

`Watch` looks once a second: a replica's positions never go back in one life of its node, and never go beyond what their
owner has committed (S12); a worker's ledger is the sum of its rows (S20), and does not grow beyond its room (S1), which
a host may have lost since. `check` compares at rest: each replica with the owners' own rows (S11, L1), and each
member's neighbours with those that live (L5).
"""

from __future__ import annotations

from hawker.catalog.gossip.node import Node as Member
from hawker.core.swim.members import Status
from hawker.model.catalog import NOTHING, TIERS, LogId, Position, Tier
from hawker.model.guest import RESOURCES, Resources
from hawker.model.rows import LogHeadRow, PublishedRow
from hawker.sim.faults.faults import Faults
from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import Node
from hawker.sim.platform.processes import Process
from hawker.worker import ledger
from hawker.worker.invariants import audit
from hawker.worker.machine.kind import MACHINE

LOOK_S = 1.0


class Watch:
    """What was seen so far. It is kept by process, because a power cut may take back what a replica had."""

    def __init__(self, fleet: Fleet, faults: Faults) -> None:
        self._fleet = fleet
        self._faults = faults
        self._held: dict[Process, Resources] = {}
        self._seen: dict[tuple[Process, LogId], Position] = {}
        self.violations: list[str] = []

    def look(self) -> None:
        fleet = self._fleet
        for node in fleet.workers:
            self._look_at_ledger(node)
        for node in fleet.nodes.values():
            member = catalog(node)
            if member is None or node.process is None:
                continue
            for tier in TIERS:
                for owner in sorted(member.replica.origins(tier)):
                    log = LogId(owner, tier)
                    at, before = member.replica.position(log), self._seen.get((node.process, log), NOTHING)
                    if at < before:
                        self.violations.append(
                            f"S12: {fleet.loop.time():.3f}: {node.name} went back from {before} to {at} in {log}"
                        )
                    self._seen[node.process, log] = at
                    if (head := self._head(log)) and head.epoch == at.epoch and head.head < at.head:
                        self.violations.append(
                            f"S12: {fleet.loop.time():.3f}: {node.name} has {at} of {log}, whose owner is at {head}"
                        )

    def _look_at_ledger(self, node: Node) -> None:
        store, role = self._fleet.store(node), node.settings.worker
        if store is None or node.process is None or role is None:
            return
        now = f"{self._fleet.loop.time():.3f}: {node.name}"
        held, before = ledger.held(store.read), self._held.get(node.process)
        self._held[node.process] = held
        for name in RESOURCES if before else ():
            capacity, booked = role.capacity[name], getattr(held, name)
            if booked > max(capacity, getattr(before, name)):
                self.violations.append(f"S1: {now} books {booked} of {capacity} {name}")
        self.violations += [f"S20: {now}: {wrong}" for wrong in audit(store.read, [MACHINE])]

    def _head(self, log: LogId) -> Position | None:
        """Where an owner's log stands in its own database, if that is open."""
        node = self._fleet.nodes.get(log.owner)
        store = self._fleet.store(node) if node else None
        row = store.read.get(LogHeadRow, log.tier) if store else None
        return Position(row.epoch, row.head) if row else None

    def go_on(self) -> None:
        """Look now and once a second."""
        self.look()
        self._faults.later(LOOK_S, self.go_on)


def catalog(node: Node) -> Member | None:
    """A node's member of the catalog, once it serves."""
    return node.member if node.agent else None


def check(fleet: Fleet) -> list[str]:
    """What differs, for a system at rest. Nodes that are no members are left out."""
    wrong: list[str] = []
    members = {node.name: (node, member) for node in fleet.nodes.values() if (member := catalog(node))}
    for owner in fleet.workers:
        if owner.name not in members:
            continue
        for tier in TIERS:
            same = [name for name, (node, _) in members.items() if tier == "global" or _region(node) == _region(owner)]
            wrong += _differing(fleet, owner, tier, {name: members[name][1] for name in same})
    for name, (node, member) in members.items():
        for other, (its_node, _) in members.items():
            if other == name or _region(node) != _region(its_node):
                continue
            view = member.swim.members.get(other)
            if view is None or view.status is not Status.alive:
                wrong.append(f"L5: {name} takes {other} for {view.status.name if view else 'nobody'}")
    return wrong


def _region(node: Node) -> str:
    return node.settings.region


def _differing(fleet: Fleet, owner: Node, tier: Tier, members: dict[str, Member]) -> list[str]:
    store = fleet.store(owner)
    if store is None:
        return []
    log = LogId(owner.name, tier)
    head = store.read.get(LogHeadRow, tier)
    at = Position(head.epoch, head.head) if head else NOTHING
    rows = store.read.select(PublishedRow)
    published = {
        (row.of, row.id): (row.number, row.values) for row in rows if row.tier == tier and row.values is not None
    }
    wrong = []
    for name, member in members.items():
        there = member.replica.position(log)
        found = {(row.table, row.key): (row.number, row.values) for row in member.replica.log_rows(log) if row.values}
        if there != at:
            wrong.append(f"L1: {name} stands at {there} of {owner.name}'s {tier} log, which is at {at}")
        elif found != published:
            keys = sorted(key for key in found.keys() | published.keys() if found.get(key) != published.get(key))
            what = [f"{key}: {found.get(key)} in the place of {published.get(key)}" for key in keys[:3]]
            wrong.append(f"S11: {name} at {at} of {owner.name}'s {tier} log has other rows: {what}")
    return wrong
