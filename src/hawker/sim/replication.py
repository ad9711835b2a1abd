"""Replication alone, simulated: six nodes with real databases, and a network and an operator that do their worst.

Nodes write, tell each other versions, ask for what they miss, and compare digests. Messages are lost, doubled,
reordered, delayed and blocked one way; nodes are killed, lose power and disks, come back with old backups and wrong
clocks, run the version before, publish rows that make no sense, and drop old tombstones.

*Always*, after every delivery: what a replica shows of an owner is exactly what that owner had at the position that the
replica tells (S11), positions never go back (S12), and no row stops the rows after it (S13). *Eventually*, once the
faults are over: all replicas equal all owners within `ROUNDS_MOST` rounds of comparing with one random other (L1),
tombstones are gone (L6), nothing waits (L9), and merged rows read the same everywhere. *Sometimes*: every path of
`PATHS` is taken by some seed of a campaign.

`run` gives one seed's report, `campaign` adds up many. The world is in `sim.replication_world`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from hawker.core import hlc
from hawker.core.ownerlog import HELD_MS
from hawker.model.catalog import TIERS, LogId, Tier
from hawker.model.rows import DueRow, LeaseRow, TallyRow
from hawker.sim.replication_node import Kinds, Node, lease, tally
from hawker.sim.replication_world import FAULTS, PATHS, Report, World, Wrong

CHAOS_MS = 20_000
WRITE_EVERY_MS = 90
PULL_EVERY_MS = 300
FAULT_EVERY_MS = 400
RECHECK_EVERY_MS = 1_000
ROUNDS_MOST = 12
"""What a digest tells reaches six nodes in 3 to 5 rounds; a raised epoch begins anew once or twice."""


class Table(msgspec.Struct, kw_only=True):
    """What the seeds of a campaign did together."""

    seeds: int = 0
    wrong: list[str] = []
    faults: dict[str, int] = {}
    paths: dict[str, int] = {}
    never: list[str] = []  # faults that never fired and paths that were never taken
    writes: int = 0
    deliveries: int = 0
    checks: int = 0
    rounds_most: int = 0

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.never


def run(seed: int, kinds: Kinds | None = None) -> Report:
    """One seed. The report is the same for the same seed, on any Python."""
    world = World(seed, kinds or Kinds())

    async def both() -> None:
        await _chaos(world)
        await _calm(world)

    def failed(_: object, context: Mapping[str, Any]) -> None:
        """A store answers its callers whatever is raised after a commit: here that ends the run."""
        world.failure = world.failure or context.get("exception")

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(failed)
        try:
            runner.run(both())
        except Exception as error:  # also one that is ours: a replica must not raise, whatever it is told
            world.report.wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
        return world.finish()


def campaign(seeds: Iterable[int], kinds: Kinds | None = None) -> Table:
    """Many seeds, added up."""
    table, faults, paths = Table(), Counter[str](), Counter[str]()
    for seed in seeds:
        report = run(seed, kinds)
        table.seeds += 1
        table.wrong += report.wrong
        faults.update(report.faults)
        paths.update(report.paths)
        table.writes += report.writes
        table.deliveries += report.deliveries
        table.checks += report.checks
        table.rounds_most = max(table.rounds_most, report.rounds)
    table.faults, table.paths = {n: faults[n] for n in FAULTS}, {n: paths[n] for n in PATHS}
    table.never = [name for name, count in (table.faults | table.paths).items() if not count]
    return table


# --- chaos ---


async def _chaos(world: World) -> None:
    for name in world.names:
        await world.start(world.nodes[name])
    end_ms = world.now_ms + CHAOS_MS
    backups: dict[str, list[Mapping[str, bytes]]] = {name: [] for name in world.names}

    def repeat(every_ms: int, act: Callable[[], Awaitable[None] | None]) -> None:
        async def once() -> None:
            found = act()
            if found is not None:
                await found
            if world.now_ms < end_ms:
                world.at(world.rng.randrange(1, 2 * every_ms), once)

        world.at(world.rng.randrange(every_ms), once)

    def write() -> Awaitable[None] | None:
        node = world.nodes[world.rng.choice(world.names)]
        return world.write(node) if node.up else None

    def pull() -> None:
        one, other = world.rng.sample(world.names, 2)
        world.pull(one, other)

    def recheck() -> None:
        for name in world.names:
            _recheck(world, world.nodes[name])

    repeat(WRITE_EVERY_MS, write)
    repeat(PULL_EVERY_MS, pull)
    repeat(RECHECK_EVERY_MS, recheck)
    repeat(FAULT_EVERY_MS, lambda: _fault(world, backups))
    await world.go_on(end_ms)


def _recheck(world: World, node: Node) -> None:
    if node.up:
        ahead = node.replica.rows("select count(*) from quarantine where why like '%future%'")[0][0]
        if node.replica.recheck() and ahead:
            world.paths["a stamp ahead was accepted later"] += 1


async def _fault(world: World, backups: dict[str, list[Mapping[str, bytes]]]) -> None:
    rng = world.rng
    node = world.nodes[rng.choice(world.names)]
    if not node.up:
        return
    saved = backups[node.name]
    [what] = rng.choices(
        ("block", "cut off", "kill", "power", "lose", "back up", "restore", "clock", "damage", "purge"),
        (3, 2, 3, 3, 1, 3, 3, 2, 0.7, 5),
    )
    match what:
        case "block":
            _block(world, [tuple(rng.sample(world.names, 2)) for _ in range(4)])
        case "cut off":
            others = [name for name in world.names if name != node.name]
            _block(world, [pair for o in others for pair in ((node.name, o), (o, node.name))])
        case "kill":
            world.faults["killed"] += 1
            _down(world, node)
        case "power":
            world.faults["power lost"] += 1
            _down(world, node)
            before = bytes(node.catalog_disk.files["catalog.db-wal"].seen)
            node.worker_disk.power_on()
            node.catalog_disk.power_on()
            if bytes(node.catalog_disk.files["catalog.db-wal"].seen) != before:
                world.faults["suffix lost"] += 1
            _forget(world, node)
        case "lose":
            world.faults["disk lost"] += 1
            _down(world, node)
            node.worker_disk.restore({})
            if rng.random() < 0.5:
                node.catalog_disk.restore({})
                _forget(world, node)
        case "back up":
            saved.append(node.worker_disk.backup())
        case "restore" if saved:
            world.faults["backup restored"] += 1
            _down(world, node)
            node.worker_disk.restore(rng.choice(saved))
            if rng.random() < 0.6:
                world.faults["clock set back"] += 1
                node.offset_ms -= 60_000
            if rng.random() < 0.7:
                node.catalog_disk.restore({})
                _forget(world, node)
        case "clock":
            node.offset_ms = rng.choice((0, 0, 200, -200, 3_000, -3_000))
            if node.offset_ms == 3_000:
                world.faults["clock set ahead"] += 1
        case "damage":
            world.faults["replica damaged"] += 1
            _down(world, node)
            garbage = {name: rng.randbytes(len(data)) for name, data in node.catalog_disk.backup().items()}
            node.catalog_disk.restore(garbage)
            _forget(world, node)
        case "purge":
            before_ms = node.host.now_ms() - rng.choice((0, 500, 3_000))
            tier = rng.choice(TIERS)
            floor = node.origin(tier).floor
            await _purge(node, tier, before_ms)
            if node.origin(tier).floor > floor:
                world.faults["tombstones purged"] += 1


async def _purge(node: Node, tier: Tier, before_ms: int) -> None:
    await node.write(lambda tx: node.outbox.purge(tx, tier, before_ms))


def _block(world: World, pairs: list[tuple[str, ...]]) -> None:
    blocked = [(one, other) for one, other in pairs if (one, other) not in world.blocked]
    world.blocked.update(blocked)
    world.at(world.rng.randrange(300, 6_000), lambda: world.blocked.difference_update(blocked))


def _down(world: World, node: Node) -> None:
    """Kill a node, and start it again later, perhaps as another version."""
    node.kill()

    def again() -> Awaitable[None] | None:
        if node.up:
            return None
        if world.rng.random() < 0.4:
            node.old = not node.old
            if node.old:
                world.faults["run by the version before"] += 1
            else:
                world.paths["an upgrade put rows of an unknown table in place"] += bool(node.unknown_rows)
        return world.start(node)

    world.at(world.rng.randrange(50, 3_000), again)


def _forget(world: World, node: Node) -> None:
    """A replica that lost something may stand where it stood before."""
    for name, log in list(world.seen):
        if name == node.name:
            del world.seen[name, log]


# --- and calm ---


async def _calm(world: World) -> None:
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
        _recheck(world, world.nodes[name])
    _check_read(world)
    _check_published(world)

    world.now_ms += 1_000
    for name in world.names:
        node = world.nodes[name]
        for tier in TIERS:
            await _purge(node, tier, node.host.now_ms())
    await world.go_on()
    await _converge(world)
    _check_read(world)
    _check_empty(world)


async def _flush_all(world: World, node: Node) -> None:
    while node.store.read.select(DueRow):
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
        if node.replica.waiting or node.store.read.select(DueRow):
            raise Wrong(f"{name}: something waits though nothing happens")
        aside = node.replica.rows("select owner, tbl, key, why from _aside where kind <> 'poison'")
        if aside:
            raise Wrong(f"{name}: rows are put aside for no reason: {aside}")
