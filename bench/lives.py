"""What a worker keeps of machines that are gone: `python -m bench.lives [--quick] [--lives N]`.

One agent (worker and broker) is asked for machines that run `/bin/true` and are destroyed when it ends, so many at a
time. After each tenth of them all are gone, and it is looked at what is left: the databases, the memory and descriptors
of the agent and of its supervisor, files, rows. At the end the agent is stopped and started again. What grows from line
to line grows for ever.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter

import apsw
import msgspec

from bench.command import Table, options, say_machine, told
from bench.market import USER, free_port, memory_mib, start_agent, supervisor_pids, worker_role
from bench.run import APP, MACHINES, SHORT, asked, order, peer
from hawker.client.connection import Peer

NAME = "bench"
AT_ONCE = 32
STEPS = 10
GONE_S = 300.0
"""So long may it take until the last machine of a step is gone."""
MIB = 1 << 20


class Left(msgspec.Struct, frozen=True):
    """What there is after so many lives. Sizes in MiB, a database's with its WAL beside it; `rows` by table."""

    lives: int
    per_s: float
    worker_db: float
    wal: float
    catalog_db: float
    agent: float
    supervisor: float
    descriptors: int
    files: int
    rows: dict[str, int]

    COLUMNS = (
        "lives",
        "lives/s",
        "worker.db",
        "WAL",
        "catalog.db",
        "agent",
        "supervisor",
        "descriptors",
        "files",
        "rows",
    )

    def cells(self) -> list[str]:
        sizes = [f"{each:.1f} MiB" for each in (self.worker_db, self.wal, self.catalog_db, self.agent, self.supervisor)]
        counts = [f"{each:,}" for each in (self.descriptors, self.files, sum(self.rows.values()))]
        return [f"{self.lives:,}", f"{self.per_s:.0f}", *sizes, *counts]


class Lives(Table):
    """With a line for each step before the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Left] = []

    def step(self, left: Left) -> None:
        self.steps.append(left)
        print("  ".join(f"{name} {cell}" for name, cell in zip(Left.COLUMNS, left.cells(), strict=True)), flush=True)

    def markdown(self) -> str:
        head = [f"| {' | '.join(Left.COLUMNS)} |", f"|{'---|' * len(Left.COLUMNS)}"]
        steps = [f"| {' | '.join(each.cells())} |" for each in self.steps]
        return "\n".join([*head, *steps, "", super().markdown()])


async def lived(user: Peer, count: int) -> float:
    """Have so many lives. Returns the seconds until the last machine was gone."""
    began = monotonic()
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await asked(user, MACHINES, order(SHORT))

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    while (await user.request("GET", MACHINES, timeout_s=30)).body.strip() != b"[]":
        assert monotonic() - began < GONE_S + count, "machines are left"
        await asyncio.sleep(0.05)
    return monotonic() - began


def look(home: Path, agent: int, lives: int, per_s: float) -> Left:
    directory = home / NAME
    supervisors = supervisor_pids(home, NAME)
    pids = [agent, *supervisors]
    return Left(
        lives=lives,
        per_s=per_s,
        worker_db=mib(directory / "worker.db"),
        wal=mib(directory / "worker.db-wal"),
        catalog_db=mib(directory / "catalog.db") + mib(directory / "catalog.db-wal"),
        agent=memory_mib(agent),
        supervisor=sum(map(memory_mib, supervisors)),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        files=sum(len(names) for _, _, names in os.walk(directory)),
        rows=rows(directory / "worker.db"),
    )


def mib(path: Path) -> float:
    return path.stat().st_size / MIB if path.exists() else 0.0


def rows(path: Path) -> dict[str, int]:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        tables = [name for (name,) in db.execute("select name from sqlite_schema where type = 'table' order by name")]
        return {name: next(iter(db.execute(f'select count(*) from "{name}"')))[0] for name in tables}
    finally:
        db.close()


async def measure(table: Lives, home: Path, lives: int) -> None:
    api, broker = free_port(), free_port()
    role = f'{worker_role(api, 100_000)}\n[broker]\nlisten = "127.0.0.1:{broker}"\n'
    agent = start_agent(home, NAME, role, broker)
    try:
        user = peer(broker, USER, AT_ONCE)
        await asked(user, "/v1/apps", APP)
        for number in range(1, STEPS + 1):
            done, due = lives * (number - 1) // STEPS, lives * number // STEPS
            took = await lived(user, due - done)
            table.step(look(home, agent.pid, due, (due - done) / took))
        await user.close()
        agent.terminate()
        agent.wait(120)
        began = perf_counter()
        agent = start_agent(home, NAME, role, broker)
        tell(table, (perf_counter() - began) * 1000)
    finally:
        agent.terminate()
        agent.wait(120)


def tell(table: Lives, restart_ms: float) -> None:
    middle, end = table.steps[len(table.steps) // 2 - 1], table.steps[-1]
    lives = end.lives - middle.lives
    what = f"after {end.lives:,} lives"
    table.add(f"{what}: restart of the agent, to its first answer", restart_ms, "ms")
    table.add(f"{what}: worker.db", end.worker_db, "MiB")
    table.add(
        "worker.db, growth over the second half, for a life", (end.worker_db - middle.worker_db) * 1024 / lives, "KiB"
    )
    table.add("memory of the agent, growth, for a life", (end.agent - middle.agent) * 1024 / lives, "KiB")
    table.add(
        "memory of the supervisor, growth, for a life", (end.supervisor - middle.supervisor) * 1024 / lives, "KiB"
    )
    table.add("descriptors of both, growth", end.descriptors - middle.descriptors, "", "0")
    for name, count in sorted(end.rows.items(), key=lambda each: -each[1]):
        if count > middle.rows.get(name, 0):
            table.add(f"rows of {name}, growth for a life", (count - middle.rows.get(name, 0)) / lives, "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--lives", type=int, default=100_000)
    given = parser.parse_args(arguments)
    table = Lives()
    say_machine()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as home:
        asyncio.run(measure(table, Path(home), 40 if given.quick else given.lives))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
