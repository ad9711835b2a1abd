"""What the region sees of a worker's machines and images: rows of the catalog that follow the worker's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.catalog.gossip.local_log import LocalLog
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.publisher import Publisher
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import Before, CheckRow, MachineRow, Row, SketchRow, WorkerRow
from hawker.model.services import Port
from hawker.model.values import Ulid
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.worker.machine.projections import projections
from hawker.worker.publishing import Publishing

WEB, DNS = Port(protocol="tcp", internal_port=80, host_port=30001), Port(protocol="udp", internal_port=53, host_port=9)


def a_machine(**fields: Any) -> MachineRow:
    fixed: dict[str, Any] = {
        "id": "0123456789abcd",
        "app": "web",
        "name": "one",
        "region": "ord",
        "state": State.started,
        "desired": "started",
        "version": "v",
        "config": {"image": "shop:1", "metadata": {"fly_process_group": "front"}},
        "resources": Resources(),
        "created_at_ms": 1,
        "updated_at_ms": 1,
        "cause": "a test",
        "private_ip": "fdaa::2",
    }
    return MachineRow(**{**fixed, **fields})


class Told:
    """A worker's database and the replica beside it."""

    def __init__(self, store: Store, replica: Replica) -> None:
        self._store = store
        self._replica = replica

    async def put(self, row: Row, *, wait: bool = True) -> None:
        """Until it is told, whatever may wait; without `wait` only until what is told at once is."""

        def change(tx: Tx) -> None:
            tx.record("row.put", row.key, cause="a test")
            tx.put(row)

        await self._store.submit(change)
        await asyncio.sleep(2 if wait else 0)

    async def delete(self, row: Row) -> None:
        def change(tx: Tx) -> None:
            tx.record("row.deleted", row.key, cause="a test")
            tx.delete(type(row), row.key)

        await self._store.submit(change)
        await asyncio.sleep(2)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._replica.rows(sql)


@asynccontextmanager
async def told(directory: Path, machines: int = 0) -> AsyncIterator[Told]:
    host = virtual_host()
    store = Store.open(directory / "worker.db", host)
    replica = Replica.open(directory / "catalog.db", host)
    publishing = Publishing(
        "ord-1", "ord", "127.0.0.1", 1, Resources(machines=machines), "fake", of_kinds=projections(store.read)
    )
    publisher = Publisher(store, publishing.outbox(host))
    local = LocalLog(publisher, replica, lambda version: None)
    await local.open()
    try:
        yield Told(store, replica)
    finally:
        await local.close()
        await store.close()
        replica.close()


STATES = "select state, version from machines"
SERVED = "select machine, app, process_group, protocol, internal_port, host_port from services order by id"


@virtual_time
async def test_ports_that_a_machine_publishes_are_services_until_it_does_no_more(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        await there.put(a_machine(ports=(WEB, DNS)))
        front = ("0123456789abcd", "web", "front")
        assert there.rows(SERVED) == [(*front, "tcp", 80, 30001), (*front, "udp", 53, 9)]
        await there.put(a_machine(ports=(DNS,)))
        assert there.rows(SERVED) == [(*front, "udp", 53, 9)]
        await there.put(a_machine(state=State.destroyed, ports=(DNS,)))
        assert there.rows(SERVED) == []


@virtual_time
async def test_a_service_that_was_published_before_a_restart_ends_after_it(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        await there.put(a_machine(ports=(WEB, DNS)))
    async with told(tmp_path) as there:
        await there.put(a_machine(ports=(DNS,)))
        assert there.rows(SERVED) == [("0123456789abcd", "web", "front", "udp", 53, 9)]


@virtual_time
async def test_another_capacity_is_published_at_the_next_start(tmp_path: Path) -> None:
    async with told(tmp_path, machines=1) as there:
        await there.put(WorkerRow(name="ord-1", region="ord", epoch=Ulid(""), created_at_ms=1))
    async with told(tmp_path, machines=7) as there:
        await asyncio.sleep(2)
        assert "'machines': 7" in str(json.loads(there.rows("select capacity from workers")[0][0]))


@virtual_time
async def test_proxies_are_told_how_a_port_is_loaded_started_and_stopped(tmp_path: Path) -> None:
    service = {
        "internal_port": 80,
        "ports": [{"port": 443, "handlers": ["tls", "http"]}],
        "concurrency": {"type": "requests", "soft_limit": 5, "hard_limit": 8},
        "autostop": "suspend",
        "min_machines_running": 2,
    }
    columns = "ports ->> '$[0].first', concurrency ->> '$.hard_limit', autostart, autostop, min_machines_running"
    async with told(tmp_path) as there:
        await there.put(a_machine(config={"image": "shop:1", "services": [service]}, ports=(WEB, DNS)))
        assert there.rows(f"select {columns} from services where protocol = 'tcp'") == [(443, 8, 1, "suspend", 2)]
        env = {"PRIMARY_REGION": "ams"}
        await there.put(a_machine(config={"image": "shop:1", "services": [service], "env": env}, ports=(WEB,)))
        assert there.rows("select min_machines_running from services") == [(0,)], "it counts in the primary region"


@virtual_time
async def test_services_that_an_older_hawker_took_keep_their_ports(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        odd = {"internal_port": 80, "concurrency": {"soft_limit": 9, "hard_limit": 8}}
        await there.put(a_machine(config={"image": "shop:1", "services": [odd]}, ports=(WEB,)))
        assert there.rows("select internal_port, host_port, ports, autostart from services") == [(80, 30001, "[]", 0)]


@virtual_time
async def test_after_a_start_services_that_ended_meanwhile_are_gone(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        await there.put(a_machine(ports=(WEB, DNS)))
    async with told(tmp_path) as there:
        assert len(there.rows(SERVED)) == 2
        await there.put(a_machine())
        assert there.rows(SERVED) == []


@virtual_time
async def test_a_machine_tells_its_process_group_and_whether_it_wants_to_be_found(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        await there.put(a_machine())
        assert there.rows("select process_group, hidden from machines") == [("front", 0)]
        await there.put(a_machine(config={"image": "shop:1", "dns": {"skip_registration": True}}))
        assert there.rows("select process_group, hidden from machines") == [("app", 1)]


@virtual_time
async def test_the_sketch_of_the_images_is_one_row_that_goes_with_the_last_image(tmp_path: Path) -> None:
    async with told(tmp_path) as there:
        await there.put(SketchRow(names=("0a0b0c0d",), layers=("01020304", "05060708")))
        assert there.rows("select id, names, layers from images") == [
            ("ord-1", '["0a0b0c0d"]', '["01020304","05060708"]')
        ]
        await there.put(SketchRow(names=(), layers=()))
        assert there.rows("select id from images") == []


@virtual_time
async def test_health_checks_are_told_by_their_machine_and_name_and_what_decides_about_traffic_at_once(
    tmp_path: Path,
) -> None:
    def row(**fields: Any) -> CheckRow:
        fixed: dict[str, Any] = {
            "machine": "0123456789abcd",
            "app": "web",
            "name": "servicecheck-00-tcp-80",
            "kind": "service",
            "service": "tcp/80",
            "instance": "run/launch",
            "status": "warning",
            "output": "kept here",
            "updated_at_ms": 5,
        }
        return CheckRow(**{**fixed, **fields})

    async with told(tmp_path) as its:
        await its.put(row())
        await its.put(row(name="up", kind="informational", service="", status="critical"))
        shown = "select worker, id, machine, app, name, kind, service, status, updated_at_ms from checks order by id"
        machine = "0123456789abcd"
        service = (f"{machine}/servicecheck-00-tcp-80", machine, "web", "servicecheck-00-tcp-80", "service", "tcp/80")
        assert its.rows(shown) == [
            ("ord-1", *service, "warning", 5),
            ("ord-1", f"{machine}/up", machine, "web", "up", "informational", "", "critical", 5),
        ]
        await its.put(row(status="passing", updated_at_ms=9), wait=False)
        assert its.rows("select status, updated_at_ms from checks where kind = 'service'") == [("passing", 9)]
        await its.delete(row())
        assert its.rows("select name from checks") == [("up",)]


@virtual_time
async def test_a_machine_with_services_is_told_of_at_once_as_it_begins_to_leave_so_that_it_gets_no_more_requests(
    tmp_path: Path,
) -> None:
    async with told(tmp_path) as there:
        for state in (State.stopping, State.suspending, State.restarting, State.updating, State.destroying):
            await there.put(a_machine(ports=(WEB,)))
            await there.put(a_machine(ports=(WEB,), state=state), wait=False)
            assert there.rows("select state from machines") == [(state,)]
        await there.put(a_machine())
        await there.put(a_machine(state=State.stopping), wait=False)
        assert there.rows("select state from machines") == [("started",)]  # nobody sends it anything


@virtual_time
async def test_a_machine_is_told_of_as_the_program_that_runs_while_an_update_gets_its_image(tmp_path: Path) -> None:
    async with told(tmp_path) as it:
        machine = a_machine(ports=(WEB,))
        await it.put(machine)
        seen = it.rows(STATES), it.rows(SERVED)
        fields = {name: getattr(machine, name) for name in Before.__struct_fields__}
        update = {"state": State.updating, "version": "w", "config": {"image": "shop:2"}, "ports": (DNS,)}
        await it.put(a_machine(**update, before=Before(**fields)))
        assert (it.rows(STATES), it.rows(SERVED)) == seen
        await it.put(a_machine(**update), wait=False)
        assert it.rows(STATES) == [("updating", "w")], "now it is about to be stopped, and that is told at once"
