"""What must hold of the whole system once it is at rest, measured by what clients were told and by the world.

Each violation names its invariant in the design's list. Not checked here, because the parts do not exist yet: volumes
(S15), migrations (L7). The proxy's (S18, L8) are in `sim.traffic`. Poison rows (S13), tombstones (L6) and incarnations
(S14) are checked where they are drawn, in `tests/sim`: `hostile`, `replication`, `membership`.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping

from hawker.broker.claims import claim_key
from hawker.core import rendezvous
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.checks import acknowledged, invariants
from hawker.sim.checks.operations import Operations
from hawker.sim.clients.oracle import DOUBT, FILLED, REFUSED, Order
from hawker.sim.clients.orderers import PATIENCE_S
from hawker.sim.faults.faults import Faults
from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import Node

OWNER = "alice"
TASKS_AT_REST_MAX = 10
"""The tasks of an agent at rest: its loops, and the exchanges of its catalog that are always on their way."""
PROXY_TASKS_MAX = 5
"""An agent's proxy has so many loops more."""
CONNECTIONS_AT_REST_MAX = 100
"""For a minute, pools keep the connections that a rush opened: clients to brokers, brokers to workers, members to
members."""


def check(fleet: Fleet, faults: Faults) -> list[str]:
    """Everything that is wrong at rest."""
    logs: dict[str, Operations] = {}
    return [
        *_unhandled(fleet),
        *_workers(fleet, logs),
        *acknowledged.check(fleet, logs),
        *_orders(fleet, logs),
        *_everywhere(fleet),
        *_late(fleet, faults),
        *_leaks(fleet, faults),
        *_left_over(fleet),
    ]


def _unhandled(fleet: Fleet) -> Iterator[str]:
    """Errors that nobody caught. Python reports some only when it collects the object that they belong to."""
    gc.collect()
    told: Counter[str] = Counter(
        f"{e.process}: {e.message.split('(')[0]}: {type(e.error).__name__}: {e.error}" for e in fleet.loop.unhandled
    )
    yield from (
        f"nobody caught, {count} times: {what}" if count > 1 else f"nobody caught: {what}"
        for what, count in told.items()
    )


def _workers(fleet: Fleet, logs: dict[str, Operations]) -> Iterator[str]:
    """What is wrong with each worker by itself. Puts what its log says of operations into `logs`."""
    for node in fleet.workers:
        store = fleet.store(node)
        if store is None:
            yield f"L3: {node.name} does not serve"
            continue
        capacity, since = fleet.capacities[node.name], fleet.since[node.name]
        history = invariants.read_history(store.read, capacity)
        logs[node.name] = history.operations
        for wrong in invariants.check(store.read, node.world, capacity, since=since, history=history):
            yield f"{node.name}: {wrong}"


def _orders(fleet: Fleet, logs: Mapping[str, Operations]) -> Iterator[str]:
    """S2, S3, S4: what every order has come to."""
    forgetful = {name for name, log in logs.items() if not log.whole}
    rows: defaultdict[str, list[tuple[Node, MachineRow]]] = defaultdict(list)
    known: dict[str, MachineRow] = {}
    for node in fleet.workers:
        store = fleet.store(node)
        for row in store.read.select(MachineRow, "true order by id") if store else ():
            if row.id not in known or known[row.id].generation < row.generation:
                known[row.id] = row
            if row.state is not State.destroyed:
                rows[row.name].append((node, row))
    for order in fleet.oracle.orders.values():
        there = rows.pop(order.label, [])
        shown = [f"{row.id} on {node.name} ({row.state})" for node, row in there]
        if len(there) > 1 and not _claim_lost(fleet, order):
            yield f"S4: order {order.label} (key {order.key!r}) has {len(there)} machines: {shown}"
        if order.outcome == REFUSED and not order.doubtful and there:
            yield f"S3: order {order.label} was refused and has {shown}"
        if order.outcome == FILLED:
            yield from _filled(fleet, order, known.get(order.machine), forgetful)
        if order.outcome == DOUBT and order.key:
            yield f"L2: order {order.label} with key {order.key} never came to a definite answer"
        broker, since_s = order.undoing or ("", 0.0)
        left = [node for node, _ in there if not fleet.forgot(node.name, since_s, fleet.loop.time())]
        if order.undoing and not order.key and left and not _may_be_left(fleet, broker, since_s):
            yield f"S3: {order.undoing[0]} said that it undoes order {order.label}, which has {shown}"
    for label, found in rows.items():
        yield f"S8: machines that nobody ordered: {label} {[row.id for _, row in found]}"


def _filled(fleet: Fleet, order: Order, row: MachineRow | None, forgetful: Collection[str]) -> Iterator[str]:
    """`forgetful` workers have cut their logs: of a machine that was to be destroyed they need not know any more."""
    if fleet.forgot(order.worker, order.asked_s, order.filled_s):
        return
    if row is None and order.worker in forgetful and (order.destroy_asked or order.auto_destroy):
        return
    if row is None:
        yield f"S2: machine {order.machine} of order {order.label} was acknowledged; {order.worker} does not know it"
        return
    if row.region not in order.regions:
        yield f"S7: machine {row.id} of order {order.label} for {order.regions} is in {row.region}"
    gone = row.state is State.destroyed
    if gone and not (order.destroy_asked or order.auto_destroy):
        yield f"S2: machine {row.id} of order {order.label} was destroyed, which nobody asked for: {row.cause}"
    # Another client may have ordered the machine anew at the same time and come after it.
    last = order.destroyed and order.destroyed[0] >= fleet.oracle.replaced.get(order.machine, 0.0)
    if order.destroyed and last and not gone and not fleet.forgot(order.worker, *order.destroyed):
        told = f"was said to be destroyed at {order.destroyed[1]:.3f}"
        yield f"S2: machine {row.id} of order {order.label} {told} and is {row.state}"


def _may_be_left(fleet: Fleet, broker: str, since_s: float) -> bool:
    """Whether a broker that was undoing an order may have died before it could."""
    return any(since_s <= at_s for at_s in fleet.ends[broker])


def _claim_lost(fleet: Fleet, order: Order) -> bool:
    """Whether a worker that may have decided on this order's key has lost rows."""
    if not order.key:
        return False
    names = [node.name for node in fleet.workers]
    deciding = rendezvous.ranked(claim_key(OWNER, order.app, order.key), names)[: rendezvous.LOOKED_AT]
    return any(fleet.losses[name] for name in deciding)


def _late(fleet: Fleet, faults: Faults) -> Iterator[str]:
    """S6: a broker that lives and can be reached answers an order in time, whatever its workers do."""
    for order in fleet.oracle.orders.values():
        for began, broker in order.late:
            if not faults.troubled(broker, order.owner, began - PATIENCE_S, began + PATIENCE_S):
                yield f"S6: {broker} did not answer order {order.label}, asked at {began:.3f}, in {PATIENCE_S:g} s"


def _everywhere(fleet: Fleet) -> Iterator[str]:
    """S5: at rest a machine runs on one host at most, whatever its generations did before."""
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for node in fleet.workers:
        for placed in node.world.instances.values():
            if placed.exit is None:
                hosts[placed.spec.machine].append(node.name)
    yield from (f"S5: machine {machine} runs on {names}" for machine, names in hosts.items() if len(names) > 1)


def _left_over(fleet: Fleet) -> Iterator[str]:
    """L9: at rest an agent has the tasks of one at rest, and nobody waits for a connection."""
    tasks: Counter[str] = Counter()
    for task in asyncio.all_tasks(fleet.loop):
        process = getattr(task, "process", None)
        if process is not None and not process.dead:
            tasks[process.name] += 1
    for node in fleet.nodes.values():
        if tasks[node.name] > TASKS_AT_REST_MAX + (PROXY_TASKS_MAX if node.settings.proxy else 0):
            yield f"L9: {node.name} has {tasks[node.name]} tasks at rest"
        if len(node.station.ends) > CONNECTIONS_AT_REST_MAX:
            yield f"L9: {node.name} has {len(node.station.ends)} connections at rest"


def _leaks(fleet: Fleet, faults: Faults) -> Iterator[str]:
    """S17: while a lease is held, a change without its nonce is refused."""
    for at_s, order in fleet.oracle.leaks:
        if order.worker not in faults.clocks_moved and not fleet.forgot(order.worker, at_s, at_s + PATIENCE_S):
            yield f"S17: machine {order.machine} was changed at {at_s:.3f} without the nonce of a lease that was held"
