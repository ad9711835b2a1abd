"""The second part of a run: no more faults, and after a while everything must be equal everywhere."""

from __future__ import annotations

from typing import Any

from tests.sim.replication.node import Node, lease, tally
from tests.sim.replication.report import Wrong
from tests.sim.replication.world import World

from hawker.catalog.publish.owner_log import TOMBSTONES_KEPT
from hawker.core import hlc
from hawker.core.ownerlog import HELD_MS
from hawker.model.catalog import TIERS, LogId, Tier
from hawker.model.rows import LeaseRow, TallyRow

ROUNDS_MOST = 12
"""What a digest tells reaches six nodes in 3 to 5 rounds; a raised epoch begins anew once or twice."""


async def calm(world: World) -> None:
    world.calm = True
    world.blocked.clear()
    await world.go_on()
    world.now_ms += 10_000  # past every stamp that was ahead
    for name in world.names:
        node = world.nodes[name]
        if node.up and node.old:
            node.kill()
        node.offset_ms = world.rng.randrange(200)
        if not node.up:
            node.old = False
            await world.start(node)
    await world.go_on()
    for name in world.names:
        await _flush_all(world, world.nodes[name])
    await world.go_on()
    world.report.rounds = await _converge(world)
    world.now_ms += HELD_MS
    for name in world.names:
        recheck(world, world.nodes[name])
    _check_read(world)
    _check_published(world)

    world.now_ms += 1_000
    for name in world.names:
        node = world.nodes[name]
        for tier in TIERS:
            await purge(node, tier, node.host.now_ms())
    await world.go_on()
    await _converge(world)
    _check_read(world)
    _check_empty(world)


async def _flush_all(world: World, node: Node) -> None:
    while node.outbox.waiting:
        world.now_ms += 1_000
        await node.write(node.outbox.flush)


async def _converge(world: World) -> int:
    """L1. Gives how many rounds it took."""
    for done in range(ROUNDS_MOST + 1):
        behind = _behind(world)
        if not behind:
            return done
        for name in world.names:
            world.pull(name, world.others(name, 1)[0])
            await world.go_on()
    raise Wrong(f"after {ROUNDS_MOST} rounds {behind} logs are not equal everywhere, {_behind(world)[0]}")


def _behind(world: World) -> list[str]:
    return [
        f"{name}: {owner}/{tier}"
        for name in world.names
        for owner in world.names
        for tier in TIERS
        if world.nodes[name].replica.position(LogId(owner, tier)) != world.nodes[owner].origin(tier).position
    ]


def _check_read(world: World) -> None:
    """What readers see is what the owners have, without poison and tombstones; of merged rows the newest."""
    logs = {log: world.truth.now(log) for log in sorted(world.truth.states)}
    good = sorted(
        (owner, key, values["color"], values["size"], int(values.get("old", False)))
        for (owner, _), state in logs.items()
        for (table, key), (_, values) in state.items()
        if table == "things" and values and values["color"] != 3
    )
    extras = sorted(
        (owner, key, values["note"])
        for (owner, _), state in logs.items()
        for (table, key), (_, values) in state.items()
        if table == "extras" and values
    )
    names: dict[str, list[tuple[int, str, dict[str, Any]]]] = {}
    for (owner, _), state in logs.items():
        for (table, key), (_, values) in state.items():
            if table == "names" and values:
                names.setdefault(key, []).append((values["stamp"], owner, values))
    newest = {key: hlc.newest(rows) for key, rows in sorted(names.items())}
    merged = [(key, values["to"]) for key, values in newest.items() if values and not values.get("deleted")]
    for name in world.names:
        read = world.nodes[name].replica.rows
        for what, wanted in (
            ("select worker, id, color, size, old from things order by worker, id", good),
            ("select worker, id, note from extras order by worker, id", extras),
            ('select id, "to" from names order by id', merged),
        ):
            if (found := read(what)) != wanted:
                raise Wrong(f"{name}: {what} gives {found}, not {wanted}")


def _check_published(world: World) -> None:
    """Everything that the workers have is published, and nothing else."""
    for name in world.names:
        node = world.nodes[name]
        read = node.store.read
        wanted = {
            (change.table, change.key): {n: v for n, v in change.values.items() if v is not None}
            for _, change, _ in (
                *(each for row in read.select(LeaseRow) for each in lease(read, row.key, row)),
                *(each for row in read.select(TallyRow) for each in tally(read, row.key, row)),
            )
            if change.values is not None
        }
        for tier in TIERS:
            log = LogId(name, tier)
            found = node.published(tier)
            if found != world.truth.now(log):
                raise Wrong(f"{log}: the database has {found}, and published {world.truth.now(log)}")
            shown = {key: values for key, (_, values) in found.items() if values is not None and key[0] != "names"}
            if any(wanted.get(key) != values for key, values in shown.items()):
                raise Wrong(f"{log}: publishes {shown}, and has {wanted}")
            for key in shown:
                del wanted[key]
        if wanted:
            raise Wrong(f"{name}: has {wanted}, and does not publish it")


def _check_empty(world: World) -> None:
    """L6 and L9."""
    for name in world.names:
        node = world.nodes[name]
        for owner in world.names:
            for tier in TIERS:
                gone = [row for row in node.replica.log_rows(LogId(owner, tier)) if row.values is None]
                if gone:
                    raise Wrong(f"{name}: keeps tombstones of {owner}: {gone}")
        if node.replica.waiting or node.outbox.waiting:
            raise Wrong(f"{name}: something waits though nothing happens")
        aside = node.replica.rows("select owner, tbl, key, why from _aside where kind <> 'poison'")
        if aside:
            raise Wrong(f"{name}: rows are put aside for no reason: {aside}")


def recheck(world: World, node: Node) -> None:
    if node.up:
        ahead = node.replica.rows("select count(*) from quarantine where why like '%future%'")[0][0]
        if node.replica.recheck() and ahead:
            world.paths["a stamp ahead was accepted later"] += 1


async def purge(node: Node, tier: Tier, before_ms: int, kept: int = TOMBSTONES_KEPT) -> None:
    await node.write(lambda tx: node.log.purge(tx, tier, before_ms, kept))
