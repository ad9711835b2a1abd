"""Which machines stand by for others, as the catalog tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.fleets import REGION, Fleet

from hawker.core.outage import Outage
from hawker.core.ownerlog import EPOCH_BITS
from hawker.model import door as words
from hawker.model.catalog import Numbered, Origin, Range
from hawker.model.machine import State
from hawker.proxy.calls import Workers
from hawker.proxy.directory import Directory
from hawker.proxy.settings import RouterSettings
from hawker.proxy.sites import Sites
from hawker.proxy.standby import Named, Standby, Standbys


class Calls:
    """A worker that starts what it is asked to start."""

    def __init__(self) -> None:
        self.woken: list[str] = []

    async def wake(self, wish: words.Wake, released: Callable[[words.Awake], None] = lambda awake: None) -> words.Awake:
        self.woken.append(wish.machine)
        return words.Awake(before=State.stopped)

    async def rest(self, wish: words.Rest) -> words.Resting:
        raise AssertionError("nothing is stopped")


STOOD_AT_MS = 5_000


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("began_ms", "desired", "stood_for", "heard", "started"),
    [
        (STOOD_AT_MS - 1, "stopped", "ord-2", False, False),
        (STOOD_AT_MS + 1, "stopped", "ord-2", False, True),
        (STOOD_AT_MS - 1, "stopped", "ord-3", False, True),
        (STOOD_AT_MS - 1, "started", "ord-2", False, True),
        (STOOD_AT_MS - 1, "stopped", "ord-2", True, True),
    ],
    ids=["stopped in this outage", "its worker was back", "another worker's outage", "it failed", "heard of since"],
)
async def test_a_proxy_that_begins_in_an_outage_leaves_a_standby_that_was_started_for_it_and_stopped(
    tmp_path: Path, began_ms: int, desired: str, stood_for: str, heard: bool, started: bool
) -> None:
    """Once it took the outage for a new one, and started what its user had stopped."""
    fleet = Fleet(tmp_path)
    epoch = began_ms << EPOCH_BITS
    row = {"region": REGION, "host": "127.0.0.1", "port": 1, "state": "active"}  # nobody listens there
    for name in ("ord-1", "ord-2"):
        range_ = Range(Origin(name, "global", epoch, 1), 0, (Numbered(1, "workers", name, row),), True)
        fleet.replica.merge([range_])
    primary = {"app": "web", "region": REGION, "state": "started", "desired": "started", "generation": 1}
    standby = {**primary, "state": "stopped", "desired": desired, "standbys": '["m0"]'}
    fleet.put("ord-2", "machines", m0=primary)
    fleet.put("ord-1", "machines", m1={**standby, "stood_for": stood_for, "stood_at_ms": STOOD_AT_MS})
    calls, directory = Calls(), Directory(fleet.replica, REGION)
    workers = Workers("token", "ord-1", calls)
    random = fleet.host.rng.random
    sites = Sites(directory, workers, RouterSettings(), worker="ord-1", region=REGION, token="token", random=random)
    standbys = Standbys(sites, fleet.replica, random)
    if heard:
        standbys.outages["ord-2"] = Outage(asyncio.get_running_loop().time())
        standbys.outages["ord-2"].heard(asyncio.get_running_loop().time())
    for _ in range(20):
        await standbys.look()
        await asyncio.sleep(1)
    assert standbys.outages["ord-2"].told
    assert calls.woken == (["m1"] if started else [])
    await standbys.close()
    await workers.close()
    directory.close()
    fleet.close()


def test_only_what_changes_is_read_again_and_nothing_is_missed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)

    def machine(name: str, standbys: str, state: str = "stopped", worker: str = "ord-1") -> None:
        row = {"app": "web", "region": REGION, "state": state, "standbys": standbys, "generation": 1}
        fleet.put(worker, "machines", **{name: row})

    machine("m0", "[]")
    machine("m1", '["m0"]')
    named = Named(fleet.replica)
    first = Standby("m1", "web", "ord-1", ("m0",))
    assert named.standing() == [first]
    machine("m2", '["m0","m1"]')
    machine("m3", '["m0"]', state="started")
    machine("m4", "[7]")
    second = Standby("m2", "web", "ord-1", ("m0", "m1"))
    assert named.standing() == [first, second]
    machine("m1", "[]")
    machine("m3", '["m0"]')
    assert named.standing() == [second, Standby("m3", "web", "ord-1", ("m0",))]
    fleet.put("ord-1", "machines", m2=None)
    assert [each.machine for each in named.standing()] == ["m3"]
    fleet.replica.forget("ord-1")
    assert named.standing() == []
    named.close()
    assert fleet.replica.on_rows == []
    fleet.close()
