"""The toy engine alone: its shared file has each version once, also when its disk loses power at any write; and a
market runs over it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.catalog.engines.fleet import CHECKS, PORT, USER, Fleet, in_fleet, rows, seen_check
from tests.catalog.engines.toy.engine import SharedLog
from tests.kit.tiers import full
from tests.kit.waiting import until

from hawker.client.connection import Peer
from hawker.model.catalog import NOTHING, LogId, Position
from hawker.sim.platform.disk import CrashDisk
from hawker.sim.platform.processes import Process

COMMITS = 3


def check_whole(log: SharedLog) -> None:
    """Each entry goes on where the one before it of the same log ended: nothing is missing, nothing is there twice."""
    ends: dict[LogId, Position] = {}
    for _, entry in log.after(0, "ord"):
        at, origin = ends.get(entry.origin.log, NOTHING), entry.origin
        assert origin.position > at
        assert entry.snapshot or entry.after == at.head
        ends[origin.log] = origin.position


def cut_shared_disk(directory: Path, at: int | None) -> int:
    changes = []

    async def test(fleet: Fleet, disk: CrashDisk) -> None:
        owner, reader = await fleet.worker("a"), await fleet.worker("b")
        await asyncio.sleep(1)
        before = disk.calls
        if at is not None:
            disk.cut_at = before + at
        for n in range(1, COMMITS + 1):
            await fleet.check(owner, ("m1", n), ("m2", n))
            await asyncio.sleep(0.2)
        changes.append(disk.calls - before)
        if at is not None:
            assert disk.off, "the cut was never reached"
            disk.power_on()
        await fleet.until_seen(reader, CHECKS, [seen_check("m1", COMMITS), seen_check("m2", COMMITS)])
        check_whole(SharedLog("toy.db", disk.name))

    with CrashDisk(at or 0) as disk:
        in_fleet("toy", directory, lambda fleet: test(fleet, disk), {"path": "toy.db", "vfs": disk.name})
    return changes[0]


@pytest.mark.crash
@pytest.mark.parametrize("every", [4, *full(1)])
def test_wherever_the_shared_disk_loses_power_each_version_is_there_once(every: int, tmp_path: Path) -> None:
    changes = cut_shared_disk(tmp_path, None)
    assert changes > 3 * COMMITS, "an entry is written to the journal, to the file, and synced"
    for at in range(1, changes + 1, every):
        cut_shared_disk(tmp_path, at)


def test_a_broker_places_a_machine_on_a_worker_that_it_knows_by_the_toy_engine(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        worker, broker = await fleet.worker("a"), await fleet.broker("b")
        client = Process("client", fleet.net.station("client", "ord"))

        async def order() -> str:
            peer = Peer(broker.station.address, PORT, headers={"authorization": f"Bearer {USER}"})
            made = await peer.request("POST", "/v1/apps", body=b'{"app_name": "web"}', timeout_s=5)
            assert made.status == 201, made
            config = b'{"config": {"image": "host", "init": {"exec": ["serve"]}}, "region": "ord"}'
            ordered = await peer.request("POST", "/v1/apps/web/machines?wait=1", body=config, timeout_s=10)
            assert ordered.status == 200, ordered
            return str(json.loads(ordered.body)["id"])

        await until(lambda: bool(rows(broker, "select name from workers")))
        machine = await fleet.loop.run_in(client, order())
        await fleet.until_seen(broker, "select id, worker, state from machines", [(machine, worker.name, "started")])

    in_fleet("toy", tmp_path, test)
