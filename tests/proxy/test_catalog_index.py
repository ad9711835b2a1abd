"""What a proxy keeps of the catalog: always what a fresh look would find, whatever changes and however bad a row is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.fleets import REGION, Fleet
from tests.kit.tiers import costly
from tests.kit.waiting import until

from hawker.proxy.catalog_view.index import CatalogIndex, Machine
from hawker.proxy.catalog_view.port_claims import PortClaims

WORKERS, APPS, MACHINES = ("ord-1", "ord-2"), ("web", "db"), ("m1", "m2", "m3")

machines = st.fixed_dictionaries(
    {
        "app": st.sampled_from(APPS),
        "region": st.just(REGION),
        "state": st.sampled_from(("started", "stopped", "destroyed")),
        "generation": st.integers(1, 2),
        "cordoned": st.booleans(),
    }
)
GOOD = '[{"first":80,"last":80,"handlers":["http"]}]'
services = st.fixed_dictionaries(
    {
        "machine": st.just(""),
        "app": st.sampled_from(APPS),
        "protocol": st.sampled_from(("tcp", "udp", "sctp")),
        "internal_port": st.sampled_from((8080, 0, 70000)),
        "host_port": st.sampled_from((8080, 70000)),
        "ports": st.sampled_from(
            (GOOD, "[]", "[7]", '[{"first":5000,"last":5002}]', '[{"first":0,"last":9}]', '[{"first":80}]')
        ),
        "concurrency": st.sampled_from(("{}", '{"soft_limit":"many"}', '{"soft_limit":2,"hard_limit":3}')),
    }
)
checks = st.fixed_dictionaries(
    {
        "machine": st.just(""),
        "app": st.sampled_from(APPS),
        "kind": st.sampled_from(("service", "readiness", "informational")),
        "service": st.sampled_from(("", "tcp/8080")),
        "status": st.sampled_from(("passing", "critical")),
    }
)
apps = st.fixed_dictionaries(
    {
        "org": st.sampled_from("ab"),
        "created_at_ms": st.integers(1, 3),
        "stamp": st.integers(1, 9),
        "deleted": st.booleans(),
    }
)
workers = st.fixed_dictionaries(
    {"region": st.just(REGION), "host": st.sampled_from(("h", "")), "port": st.sampled_from((1, 0, 70000))}
)


def _keyed(keys: Any, values: Any) -> Any:
    return st.tuples(keys, st.none() | values)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(WORKERS),
        st.one_of(
            st.tuples(st.just("machines"), _keyed(st.sampled_from(MACHINES), machines)),
            st.tuples(st.just("services"), _keyed(st.sampled_from([f"{m}/tcp/8080" for m in MACHINES]), services)),
            st.tuples(st.just("checks"), _keyed(st.sampled_from([f"{m}/up" for m in MACHINES]), checks)),
            st.tuples(st.just("apps"), _keyed(st.sampled_from(APPS), apps)),
            st.tuples(st.just("workers"), _keyed(st.sampled_from(WORKERS), workers)),
            st.tuples(
                st.just("app_regions"),
                _keyed(st.sampled_from(APPS), st.just({"region": "mad", "machines": 1})),
            ),
        ),
    ),
    max_size=8,
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "fleet")
    yield fleet
    fleet.close()


@given(changes=CHANGES, forgotten=st.none() | st.integers(0, 8))
@settings(max_examples=costly(10), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_kept_is_what_a_fresh_look_finds(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Any], forgotten: int | None
) -> None:
    async def check() -> None:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"))
        for worker in WORKERS:  # an owner's first version is a snapshot, after which everything is read again
            fleet.worker(worker)
            fleet.put(worker, "capacity", **{worker: {}})
        for app in APPS:
            fleet.app(app)
        for machine in MACHINES:
            fleet.machine(machine, "web")
            fleet.service(machine, "web", ports=((80, 80, ("http",)), (5000, 5001, ())))
            fleet.check(machine, "web", status="passing")
        kept, claims = CatalogIndex(fleet.replica, REGION), PortClaims(fleet.replica, (80,))
        told: dict[str, Machine] = {}

        def tell(app: Any, before: Machine | None, now: Machine | None) -> None:
            assert (before.id if before else None) in (None, now.id if now else before and before.id)
            machine = before or now
            assert machine is not None
            assert told.get(f"{app.name}/{machine.id}") == before
            told.pop(f"{app.name}/{machine.id}", None)
            if now is not None:
                told[f"{app.name}/{now.id}"] = now

        kept.on_machine.append(tell)
        for app in APPS:
            kept.load(app)
        assert len(told) == len(MACHINES)
        for number, (owner, (table, (key, values))) in enumerate(changes):
            if values is not None and "machine" in values:
                values = {**values, "machine": key.partition("/")[0]}
            fleet.put(owner, table, **{key: values})
            if number == forgotten:
                fleet.replica.forget("ord-2")
                break
            if number % 3 == 0:
                kept.settle()
        kept.settle()
        claims.settle()
        fresh, fresh_claims = CatalogIndex(fleet.replica, REGION), PortClaims(fleet.replica, (80,))
        for name in APPS:
            mine, theirs = kept.load(name), fresh.load(name)
            assert (mine is None) == (theirs is None)
            if mine and theirs:
                assert (mine.machines, mine.elsewhere, mine.org) == (theirs.machines, theirs.elsewhere, theirs.org)
                assert {m.id: m for m in told.values() if m.app == name} == theirs.machines
        assert kept.workers == fresh.workers
        assert claims.ports == fresh_claims.ports
        for each in (kept, claims, fresh, fresh_claims):
            each.close()
        assert fleet.replica.on_rows == []
        fleet.close()

    asyncio.run(check())


async def test_a_bad_row_is_counted_and_told_and_stops_nothing(fleet: Fleet) -> None:
    fleet.worker("ord-1")
    fleet.worker("ord-2", port=0)
    fleet.app("web")
    for machine in ("m1", "m2"):
        fleet.machine(machine, "web")
        fleet.service(machine, "web")
    fleet.service("m2", "web", ports=((0, 80, ()),))
    directory = CatalogIndex(fleet.replica, REGION)
    app = directory.load("web")
    assert app is not None
    assert [len(app.machines[machine].services) for machine in ("m1", "m2")] == [1, 0]
    assert list(directory.workers) == ["ord-1"]
    assert set(directory.bad) == {("services", "m2/tcp/8080"), ("workers", "ord-2")}
    assert directory.skipped == 2
    fleet.service("m2", "web")
    directory.settle()
    assert len(app.machines["m2"].services) == 1
    assert set(directory.bad) == {("workers", "ord-2")}
    directory.close()


async def test_changes_are_read_in_the_next_turn_of_the_loop(fleet: Fleet) -> None:
    fleet.app("web")
    fleet.machine("m1", "web", state="stopped")
    directory = CatalogIndex(fleet.replica, REGION)
    app = directory.load("web")
    assert app is not None
    fleet.machine("m1", "web", state="started")
    assert app.machines["m1"].state == "stopped"
    await until(lambda: app.machines["m1"].state == "started")
    directory.close()


async def test_machines_that_changed_together_are_told_in_one_order_whatever_the_hash_seed(fleet: Fleet) -> None:
    """Where a machine stands among others decides which of two equal ones takes a request. Found by the simulator."""
    fleet.app("web")
    for machine in MACHINES:
        fleet.machine(machine, "web", state="stopped")
    directory = CatalogIndex(fleet.replica, REGION)
    assert directory.load("web") is not None
    told: list[str] = []
    directory.on_machine.append(lambda app, before, now: told.append(now.id if now else ""))
    [changed], fleet.replica.on_rows = fleet.replica.on_rows, []
    for machine in MACHINES:
        fleet.machine(machine, "web", state="started")
    changed({"machines": dict.fromkeys(reversed(MACHINES)).keys()})
    directory.settle()
    assert told == list(MACHINES)
    directory.close()


async def test_of_several_apps_on_one_port_the_older_one_has_it(fleet: Fleet) -> None:
    fleet.app("late", created_at_ms=2)
    fleet.app("early", created_at_ms=1)
    for app in ("late", "early"):
        fleet.service(f"m-{app}", app, ports=((5432, 5433, ()), (80, 80, ("http",))))
    claims = PortClaims(fleet.replica, (80, 443))
    assert claims.ports == {5432: "early", 5433: "early"}
    told: list[dict[int, str]] = []
    claims.on_ports.append(lambda: told.append(claims.ports))
    fleet.put("ord-1", "services", **{"m-early/tcp/8080": None})
    await until(lambda: told == [{5432: "late", 5433: "late"}])
    claims.close()


async def test_an_app_of_which_is_not_known_when_it_was_made_takes_no_port_from_another(fleet: Fleet) -> None:
    """Once a row without that column made its app the oldest of all."""
    fleet.app("late", created_at_ms=2)
    fleet.put("ord-1", "apps", broken={"org": "personal", "stamp": 1})
    for app in ("late", "broken"):
        fleet.service(f"m-{app}", app, ports=((5432, 5432, ()), (5433 if app == "broken" else 5434, 5434, ())))
    claims = PortClaims(fleet.replica, ())
    assert claims.ports == {5432: "late", 5433: "broken", 5434: "late"}
    claims.close()


async def test_a_deleted_app_has_no_port_whatever_its_machines_say(fleet: Fleet) -> None:
    for created_at_ms, app in enumerate(("early", "late"), 1):
        fleet.app(app, created_at_ms=created_at_ms)
        fleet.service(f"m-{app}", app, ports=((5432, 5432, ()),))
    claims = PortClaims(fleet.replica, ())
    assert claims.ports == {5432: "early"}
    fleet.put("ord-1", "apps", early={"org": "personal", "created_at_ms": 1, "stamp": 2, "deleted": True})
    await until(lambda: claims.ports == {5432: "late"})
    fleet.put("ord-1", "apps", early={"org": "personal", "created_at_ms": 1, "stamp": 3})
    await until(lambda: claims.ports == {5432: "early"})
    claims.close()


async def test_a_machine_whose_checks_do_not_pass_gets_no_requests_of_that_service(fleet: Fleet) -> None:
    fleet.app("web")
    fleet.machine("m1", "web")
    fleet.service("m1", "web")
    fleet.check("m1", "web", status="critical")
    directory = CatalogIndex(fleet.replica, REGION)
    app = directory.load("web")
    assert app is not None
    assert not app.machines["m1"].passes(8080)
    assert app.machines["m1"].passes(9090)
    fleet.check("m1", "web", status="passing")
    await until(lambda: app.machines["m1"].passes(8080))
    assert app.machines["m1"].checked
    directory.close()
