"""What a start costs in SQLite's work: as much with a thousand machines at rest as with ten, and runs that ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
from msgspec.structs import replace
from tests.kit.markets import free_port
from tests.worker.test_publishing import a_machine

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, TokenSettings, WorkerRole
from hawker.host import live
from hawker.model.machine import State
from hawker.model.rows import RunRow
from hawker.store.tx import Tx
from hawker.telemetry import without_logs

RUN = RunRow(
    id="",
    flow="machine.stop",
    flow_version=1,
    resource="",
    exclusive=True,
    args={},
    steps=["stop"],
    cause="a test",
    source="user",
    trace="",
    started_at_ms=1,
    updated_at_ms=1,
    status="done",
)


@contextmanager
def steps_counted() -> Iterator[list[int]]:
    """Those of the virtual machine for each statement of the connections that are opened meanwhile."""
    steps = list[int]()

    def ended(event: dict[str, Any]) -> None:
        steps.append(event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"])

    def hook(db: apsw.Connection) -> None:
        db.trace_v2(apsw.SQLITE_TRACE_PROFILE, ended)

    apsw.connection_hooks.append(hook)
    try:
        yield steps
    finally:
        apsw.connection_hooks.remove(hook)


def worker(directory: Path, port: int) -> Agent:
    role = WorkerRole(f"127.0.0.1:{port}", capacity={"machines": 10_000}, cgroups=False, drivers=["process"])
    settings = AgentSettings(
        name="ord-1", region="ord", directory=directory, tokens=TokenSettings(cluster="c"), worker=role
    )
    return Agent(settings, live())


async def with_machines(directory: Path, port: int, count: int) -> None:
    """A worker that ran before, with so many machines that are stopped."""
    agent = worker(directory, port)
    await agent.open()

    def change(tx: Tx) -> None:
        tx.record("machines.made", "many", cause="a test")
        for n in range(count):
            tx.put(a_machine(id=f"{n:014x}", name=f"m{n}", state=State.stopped, desired="stopped"))
            tx.put(replace(RUN, id=f"{n:026}", resource=f"{n:014x}"))

    assert agent.worker is not None
    await agent.worker.store.submit(change)
    await agent.close()


async def test_a_start_reads_no_machine_that_is_stopped_and_published(tmp_path: Path) -> None:
    cost = {}
    for count in (10, 1000):
        directory, port = tmp_path / str(count), free_port()
        await with_machines(directory, port, count)
        agent = worker(directory, port)
        with steps_counted() as steps, without_logs():
            await agent.open()
        await agent.close()
        cost[count] = len(steps), sum(steps)
    statements, work = (cost[1000][n] - cost[10][n] for n in (0, 1))
    assert abs(statements) < 20, cost
    assert work < 990, cost
