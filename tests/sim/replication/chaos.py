"""The first part of a run: nodes write and compare while everything goes wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from tests.sim.replication.calm import purge, recheck
from tests.sim.replication.node import Node
from tests.sim.replication.world import World

from hawker.catalog.publish.owner_log import TOMBSTONES_KEPT
from hawker.model.catalog import TIERS

CHAOS_MS = 20_000
WRITE_EVERY_MS = 90
PULL_EVERY_MS = 300
FAULT_EVERY_MS = 400
RECHECK_EVERY_MS = 1_000


async def chaos(world: World) -> None:
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

    def recheck_all() -> None:
        for name in world.names:
            recheck(world, world.nodes[name])

    repeat(WRITE_EVERY_MS, write)
    repeat(PULL_EVERY_MS, pull)
    repeat(RECHECK_EVERY_MS, recheck_all)
    repeat(FAULT_EVERY_MS, lambda: _fault(world, backups))
    await world.go_on(end_ms)


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
            kept = rng.choice((0, 2, TOMBSTONES_KEPT))
            await purge(node, tier, before_ms if kept == TOMBSTONES_KEPT else 0, kept)
            if node.origin(tier).floor > floor:
                world.faults[
                    "tombstones purged" if kept == TOMBSTONES_KEPT else "tombstones beyond a number purged"
                ] += 1


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
