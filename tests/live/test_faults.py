"""Users while something breaks: a steady load at an edge proxy, real agents, and one fault after the other.

The steps are in `bench/faults.py`, which takes longer and prints more. What is promised: every request that was
accepted is answered, or its connection visibly cut; one that may be made twice does not fail while another machine is
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from time import monotonic

import msgspec
import pytest
import pytest_asyncio
from bench.faults import SHORT, served
from tests.kit.edges import SERVER, Region, region, region_of_hosts
from tests.kit.load import Report
from tests.kit.markets import free_port
from tests.kit.namespaces import missing_for_namespaces
from tests.kit.waiting import eventually, until

from bench import faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
MISSING = missing_for_namespaces()
BUSY = {"ANSWER_S": "0.03"}
"""So that some requests are under way at every moment."""
IMPATIENT = {"ports": [{"port": 80, "handlers": ["http"], "http_options": {"idle_timeout": 1}}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Region]:
    async with region(tmp_path_factory.mktemp("region"), edges=2, routing={"gone_s": 1.5}) as it:
        yield it


def nothing_failed(report: Report) -> None:
    assert (report.failed, report.lost, report.refused) == (0, 0, 0), str(report)
    assert report.fine > 30, str(report)


async def few_are_slow(fault: Callable[[], Awaitable[Report]]) -> None:
    """Nor does one fail, in any of the attempts that it may take on a host that is itself slow for a while."""
    reports = []
    for _ in range(3):
        reports.append(report := await fault())
        nothing_failed(report)
        if report.slow < report.sent / 4:
            return
    raise AssertionError("; ".join(map(str, reports)))


async def test_a_killed_machine_fails_no_request_that_can_go_to_another(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY) as load:
        nothing_failed(await faults.machine_killed(shared, load, SHORT))


@pytest.mark.full
async def test_a_machine_that_hangs_fails_none_and_gets_few(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY, service=IMPATIENT) as load:
        await few_are_slow(lambda: faults.machine_hung(shared, load, SHORT))


async def test_a_killed_worker_fails_none_and_gets_requests_again(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY) as load:
        machine, _ = faults.of_worker(shared, load, "worker-1")
        nothing_failed(await faults.agent_killed(shared, load, SHORT))
        mark = load.now()
        await until(lambda: any(said.startswith(machine) for said in load.by(mark)))


@pytest.mark.full
async def test_a_worker_that_hangs_fails_none(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY) as load:
        await few_are_slow(lambda: faults.agent_hung(shared, load, SHORT))


async def test_an_edge_that_is_restarted_answers_all_that_it_has_accepted(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY) as load:
        report = await faults.agent_restarted(shared, load, SHORT, "edge-1")
        assert (report.failed, report.lost, report.cut) == (0, 0, 0), str(report)


async def test_an_edge_and_a_worker_that_begin_anew_in_place_fail_and_refuse_none(shared: Region) -> None:
    async with served(shared, SHORT, env=BUSY) as load:
        mark = load.now()
        await asyncio.gather(*(faults.begun_anew(shared, load, SHORT, name) for name in ("edge-1", "worker-1")))
        report = load.since(mark)
        nothing_failed(report)
        assert report.cut == 0, str(report)


@pytest.mark.full
async def test_workers_and_their_proxies_die_apart_and_no_request_fails(tmp_path: Path) -> None:
    """Where they are two processes. While the worker is away its proxy carries on."""
    async with region(tmp_path, doors=True) as it, served(it, SHORT, env=BUSY) as load:
        nothing_failed(await faults.agent_killed(it, load, SHORT, "door-1"))
        worker = await faults.agent_killed(it, load, SHORT, "worker-1")
        nothing_failed(worker)
        assert worker.cut == 0, str(worker)


@pytest.mark.full
async def test_an_app_whose_only_worker_dies_is_answered_when_that_is_back(shared: Region) -> None:
    """Also while its machine is on the way up: it is started once, by whoever asked first."""
    machine = await shared.machine("only", worker="worker-1", program=f"import time; time.sleep(1.5)\n{SERVER}")
    await shared.known([machine], "stopped")
    for _ in range(2):
        asked = [asyncio.ensure_future(shared.get("only", f"edge-{n % 2 + 1}")) for n in range(40)]
        await until(lambda: shared.starts(machine) == 1 and shared.state(machine) == "started")
        await shared.kill("worker-1")
        shared.start("worker-1")
        await shared.up("worker-1")
        began = monotonic()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        assert monotonic() - began < 15.0
    assert shared.starts(machine) == 1


async def test_a_machine_that_stands_by_starts_once_when_the_worker_is_gone_and_three_proxies_see_it(
    shared: Region,
) -> None:
    took = await faults.standby_started(shared, partial(shared.kill, "worker-2"))
    assert took < 12.0
    shared.start("worker-2")
    await shared.up("worker-2")


@pytest.mark.full
@pytest.mark.root
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
async def test_hosts_that_are_cut_off_and_an_edge_without_a_catalog_fail_no_request(tmp_path: Path) -> None:
    async with region_of_hosts(tmp_path, edges=2, embedded={"gone_s": 2.0}) as it:
        async with served(it, SHORT, env=BUSY) as load:
            mark = load.now()
            nothing_failed(await faults.worker_cut_off(it, load, msgspec.structs.replace(SHORT, hold_s=4.0)))
            assert load.slowest(mark, "GET") < 5.0, "those under way went elsewhere, before the network came back"
            nothing_failed(await faults.catalog_stopped(it, load, SHORT))
        await silent_connection_ends(it)


async def silent_connection_ends(it: Region) -> None:
    """One of a plain TCP service, where no answer is overdue, when its machine's host is cut off."""
    public = free_port()
    machine = await it.machine("plain", worker="worker-1", started=True, service={"ports": [{"port": public}]})
    await it.known([machine], "started")
    edge = it.agents["edge-1"].address, public

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection(*edge)
        except OSError:
            return False
        writer.close()
        return True

    await eventually(listens, "the edge has opened the app's port")
    reader, writer = await asyncio.open_connection(*edge)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await reader.readuntil(machine.encode())
    assert it.network is not None
    it.network.cut("of-worker-1")
    try:
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(10.0):
                await reader.readuntil(b"never")
    finally:
        writer.close()
        it.network.mend("of-worker-1")
