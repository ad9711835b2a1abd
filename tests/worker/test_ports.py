"""Ports of the host: each is given to one machine, kept as long as it needs it, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, machine_config, order
from tests.kit.virtual_time import virtual_time

from hawker.model.config import check_config
from hawker.model.machine import State
from hawker.model.market import Refusal, Reservation
from hawker.model.rows import PortRow
from hawker.worker.ports import NoPort


def services(*ports: int, protocol: str = "tcp") -> list[dict[str, Any]]:
    return [{"internal_port": port, "protocol": protocol} for port in ports]


def given(worker: SimWorker) -> dict[int, str]:
    return {row.number: row.machine for row in worker.store.read.select(PortRow)}


def published(worker: SimWorker, machine: str) -> dict[int, int]:
    return {port.internal_port: port.host_port for port in worker.machine(machine).ports}


async def update(worker: SimWorker, machine: str, **fields: Any) -> None:
    config = check_config(machine_config(**fields))
    await worker.updates.update(APP.name, machine, worker.request(), config=config)
    await worker.at_rest()


@virtual_time
async def test_each_service_has_a_port_of_its_own_that_the_driver_is_told_to_publish(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machines = [
            await worker.run_machine(f"order-{n}", image="app:1", services=services(80, 443)) for n in range(20)
        ]
        everything = [port for machine in machines for port in published(worker, machine).values()]
        assert len(set(everything)) == 40
        assert set(everything) <= set(worker.log.ports)
        network = worker.world.starts[0].network
        assert network
        told = {each.internal_port: each.host_port for each in network.publish}
        assert told == published(worker, machines[0])


@virtual_time
async def test_a_port_is_given_once_for_a_service_that_is_named_twice(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        both = [*services(80, 80), *services(80, protocol="udp")]
        machine = await worker.run_machine(image="app:1", services=both)
        assert [(p.protocol, p.internal_port) for p in worker.machine(machine).ports] == [("tcp", 80), ("udp", 80)]
        assert len(given(worker)) == 2


@virtual_time
async def test_a_port_that_a_program_of_the_host_has_is_passed_over_and_given_up_by_an_update(tmp_path: Path) -> None:
    held: set[tuple[str, int]] = set()
    async with a_worker(tmp_path) as worker:
        worker.log.holder = lambda protocol, port: "nginx" if (protocol, port) in held else ""
        machine = await worker.run_machine(image="app:1", services=services(80, 81))
        before = published(worker, machine)
        held.add(("tcp", before[80]))
        await update(worker, machine, image="app:1", services=services(80, 81))
        after = published(worker, machine)
        assert after[80] != before[80]
        assert after[81] == before[81]
        assert given(worker) == dict.fromkeys(after.values(), machine)
        held.update(("tcp", port) for port in set(worker.log.ports) - set(after.values()))
        with pytest.raises(NoPort, match="1 wanted, 0 free"):
            await worker.run_machine("other", image="app:1", services=services(80))
        one = await worker.run_machine("datagrams", image="app:1", services=services(80, protocol="udp"))
        assert published(worker, one)[80] in {port for _, port in held}


@virtual_time
async def test_an_update_keeps_the_ports_it_still_needs_and_gives_the_others_back(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", services=services(80, 81))
        before = published(worker, machine)
        await update(worker, machine, image="app:1", services=services(82, 80))
        after = published(worker, machine)
        assert after[80] == before[80]
        assert set(after) == {80, 82}
        assert given(worker) == dict.fromkeys(after.values(), machine)


@virtual_time
async def test_a_process_is_reached_where_it_listens_and_takes_no_port(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(services=services(8080))
        assert published(worker, machine) == {8080: 8080}
        assert given(worker) == {}
        await update(worker, machine, image="app:1", services=services(8080))
        (port,) = given(worker)
        assert published(worker, machine) == {8080: port}
        await update(worker, machine, services=services(8080))
        assert published(worker, machine) == {8080: 8080}
        assert given(worker) == {}


@virtual_time
async def test_a_destroyed_machine_has_given_its_ports_back(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", services=services(80))
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest()
        assert given(worker) == {}
        assert worker.machine(machine).ports == ()


@virtual_time
async def test_a_worker_without_ports_refuses_an_order_so_that_another_one_fills_it(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.log.ports = range(20000, 20002)
        await worker.run_machine("first", image="app:1", services=services(80))
        refused = await worker.market.reserve(order("second", image="app:1", services=services(80, 81)))
        assert isinstance(refused, Refusal)
        assert refused.sentence() == f"{refused.worker}: ports 2 wanted, 1 free"
        assert isinstance(
            await worker.market.reserve(order("third", image="app:1", services=services(80))), Reservation
        )
        assert isinstance(await worker.market.reserve(order("fourth", services=services(80, 81))), Reservation)


@virtual_time
async def test_an_order_that_finds_no_port_changes_nothing(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.log.ports = range(20000, 20002)
        first = await worker.run_machine("first", image="app:1", services=services(80))
        await worker.market.reserve(order("second", image="app:1", services=services(80)))
        await worker.market.reserve(order("third", image="app:1", services=services(80)))
        await worker.market.confirm("second", APP, None)
        with pytest.raises(NoPort, match="ports: 1 wanted, 0 free"):
            await worker.market.confirm("third", APP, None)
        await worker.market.release("third", "gave up")
        await worker.machines.destroy(APP.name, worker.market.fate("second"), worker.request(), force=True)
        await worker.at_rest()
        assert set(given(worker).values()) == {first}
        with pytest.raises(NoPort):
            await update(worker, first, image="app:1", services=services(80, 81, 82))
        assert worker.machine(first).state is State.started
        assert worker.wrong() == []
