"""A network as its machines see it, read from a replica of the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.catalog.owners import Owner, machine

from hawker.catalog.gossip.replica import Replica
from hawker.host import live
from hawker.network.zone import Zone


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica.open(tmp_path / "catalog.db", live())
    yield replica
    replica.close()


def app(number: int) -> dict[str, object]:
    return {"org": "acme", "network": "default", "number": number, "app_id": "x", "stamp": 1}


def test_a_network_has_the_apps_of_its_number_and_their_machines(replica: Replica) -> None:
    everywhere = Owner(replica, "ord-1", "global")
    everywhere.put("apps", web=app(7), db=app(7), other=app(8))
    everywhere.put("workers", **{"ord-1": {"region": "ord"}})
    ord_1 = Owner(replica, "ord-1")
    ord_1.put("machines", a=machine(private_ip="fdaa:0:7::a:2", process_group="worker", hidden=True))
    ord_1.put("machines", b=machine("stopped", app="db", private_ip="fdaa:0:7:0::b:2", cordoned=True))
    ord_1.put("machines", c=machine(app="other", private_ip="fdaa:0:8::c:2"), d=machine(private_ip=""))
    zone = Zone(replica, "ord")
    seven = zone.network(7)
    assert sorted(seven.machines) == ["db", "web"]
    (a,) = seven.machines["web"]  # d has no address
    assert (a.id, a.address, a.group, a.hidden, a.listed) == ("a", "fdaa:0:7::a:2", "worker", True, False)
    (b,) = seven.machines["db"]
    assert (b.state, b.group, b.cordoned) == ("stopped", "app", True)
    assert sorted(zone.network(8).machines) == ["other"]
    assert zone.network(9).machines == {}
    assert seven.regions == {"ord"}


def test_what_the_catalog_learns_shows_at_once_and_what_did_not_change_is_not_read_again(replica: Replica) -> None:
    Owner(replica, "ord-1", "global").put("apps", web=app(7))
    machines = Owner(replica, "ord-1")
    zone = Zone(replica, "ord")
    assert zone.network(7).machines == {"web": ()}
    assert zone.network(7) is zone.network(7)
    machines.put("machines", a=machine(private_ip="fdaa:0:7::a:2"))
    assert [each.id for each in zone.network(7).machines["web"]] == ["a"]
    machines.put("machines", a=None)
    assert zone.network(7).machines == {"web": ()}
    zone.close()
    assert replica.on_applied == []


def test_no_more_networks_are_kept_than_a_host_has(replica: Replica) -> None:
    zone = Zone(replica, "ord", kept=4)
    first = zone.network(1)
    for number in range(2, 6):
        zone.network(number)
    assert zone.network(1) is not first
