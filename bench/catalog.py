"""What the catalog costs: versions applied per second, catch-up, memory and disk with 100,000 machines.

    python -m bench.catalog [--quick] [--cpu]

Medians of several runs, on a file of the temporary directory. The rows are machines as a worker publishes them.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import msgspec

from bench.command import Table, options, told
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.host import live
from hawker.model.catalog import NOTHING, Change, LogId, Numbered, Origin, Range, Values, Version
from hawker.model.rows import LeaseRow
from hawker.store.db import Store
from hawker.store.tx import Tx

OWNERS = 200
_clock = [perf_counter]
EPOCH = 1 << 60


class Sizes(msgspec.Struct, frozen=True):
    """`machines` of the whole catalog and below the versions that are applied, which are `versions`; `runs` of each."""

    machines: int
    below: int
    versions: int
    runs: int


FULL = Sizes(machines=100_000, below=20_000, versions=40_000, runs=5)
QUICK = Sizes(machines=2_000, below=1_000, versions=800, runs=1)


def machine(number: int) -> Values:
    return {
        "app": f"app-{number % 997}",
        "name": f"misty-leaf-{number % 9973}",
        "region": "ord",
        "state": "started",
        "desired": "started",
        "generation": 1,
        "version": f"01HZ{number:022d}",
        "image": "registry.example.com/team/service:2026-11-20",
        "private_ip": f"fdaa:0:{number % 65536:x}:a7b:{number // 65536:x}::2",
        "cpu_kind": "shared",
        "cpus": 1,
        "memory_mib": 256,
        "cordoned": False,
        "created_at_ms": 1_763_000_000_000 + number,
    }


def machine_ids(count: int) -> list[str]:
    rng = random.Random(1)
    return [f"{rng.getrandbits(56):014x}" for _ in range(count)]


def snapshots(count: int, owners: int) -> list[Range]:
    """`count` machines on `owners` workers."""
    return list(arriving(count, owners))


def arriving(count: int, owners: int) -> Iterator[Range]:
    ids = machine_ids(count)
    each = count // owners
    for o in range(owners):
        yield Range(
            Origin(f"worker-{o:03d}", "region", EPOCH, each),
            0,
            tuple(Numbered(n + 1, "machines", ids[o * each + n], machine(o * each + n)) for n in range(each)),
            True,
        )


def versions(count: int, owners: int, head: int, ids: list[str]) -> list[Version]:
    """Changes of machines, one a version, from all owners in turn."""
    return [
        Version(
            f"worker-{n % owners:03d}",
            "region",
            EPOCH,
            head + 1 + n // owners,
            (Change("machines", ids[(n * 7919) % len(ids)], machine(n) | {"state": "stopped"}),),
        )
        for n in range(count)
    ]


@contextmanager
def fresh() -> Iterator[Replica]:
    with tempfile.TemporaryDirectory() as directory:
        replica = Replica.open(Path(directory) / "catalog.db", live())
        yield replica
        replica.close()


def median(measure: Callable[[], float], runs: int) -> float:
    return statistics.median(measure() for _ in range(runs))


def applied_per_s(batch: int, count: int, below: int) -> float:
    """Versions applied per second on top of so many machines, `batch` in a commit."""
    with fresh() as replica:
        base = snapshots(below, OWNERS)
        replica.merge(base)
        todo = versions(count, OWNERS, base[0].origin.head, [row.key for each in base for row in each.rows])
        began = _clock[0]()
        for start in range(0, count, batch):
            replica.receive(todo[start : start + batch])
        took = _clock[0]() - began
        assert replica.position(LogId("worker-000", "region")).head == base[0].origin.head + count // OWNERS
    return count / took


def caught_up_per_s(count: int, owners: int) -> float:
    """Rows per second of a replica that begins empty."""
    given = snapshots(count, owners)
    with fresh() as replica:
        began = _clock[0]()
        replica.merge(given)
        took = _clock[0]() - began
        assert replica.rows("select count(*) from machines_all") == [(count,)]
    return count / took


def answered_per_s(count: int) -> float:
    """Rows per second read to answer somebody who begins empty."""
    with fresh() as replica:
        replica.merge(snapshots(count, OWNERS))
        began = _clock[0]()
        found = [replica.answer(LogId(owner, "region"), NOTHING) for owner in replica.origins("region")]
        took = _clock[0]() - began
        assert sum(len(each.rows) for each in found if each) == count
    return count / took


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the kernel does not tell")


def size(count: int) -> tuple[float, float]:
    """MiB of memory that a replica of so many rows takes, and on disk."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.db"
        replica = Replica.open(path, live())
        before = resident_mib()
        for each in arriving(count, OWNERS):
            replica.merge([each])
        replica.rows("select count(*), sum(memory_mib) from machines")
        after = resident_mib()
        replica.close()
        return after - before, path.stat().st_size / (1 << 20)


def publish_us(count: int) -> tuple[float, float]:
    """Microseconds of a change of the worker's, without a catalog and published: as many as share commits."""

    async def run(published: bool) -> float:
        host = live()
        with tempfile.TemporaryDirectory() as directory:
            store = Store.open(Path(directory) / "worker.db", host)
            if published:
                outbox = Outbox(
                    host,
                    OwnerLog(host, "me"),
                    {LeaseRow: lambda reads, key, row: [("region", Change("leases", key, {"nonce": row.nonce}), True)]},
                )
                outbox._budget = outbox._budget.__class__(1e9, 1e9, 1e9, 1e9)
                outbox._bucket = outbox._bucket.__class__(1e9, 1e9, 0)
                await store.submit(outbox.open)
                store.on_change[:] = [outbox.on_change]

            def change(number: int) -> Callable[[Tx], None]:
                def write(tx: Tx) -> None:
                    tx.record("bench", f"m{number}", cause="bench")
                    row = LeaseRow(machine=f"m{number}", nonce="n", owner="o", description="", expires_at_ms=0)
                    tx.put(row)

                return write

            began = _clock[0]()
            for start in range(0, count, 100):
                await asyncio.gather(*(store.submit(change(start + n)) for n in range(100)))
            took = _clock[0]() - began
            await store.close()
        return took / count * 1e6

    return asyncio.run(run(False)), asyncio.run(run(True))


def measure(sizes: Sizes, table: Table) -> None:
    memory, disk = size(sizes.machines)
    for batch, part in ((1, 4), (16, 2), (256, 1)):
        rate = median(partial(applied_per_s, batch, sizes.versions // part, sizes.below), sizes.runs)
        table.add(f"versions applied/s, {batch} a commit", rate, "1/s", "20,000" if batch == 256 else "")
    for owners, aim in ((OWNERS, "200,000"), (1, "")):
        rate = median(partial(caught_up_per_s, sizes.machines, owners), sizes.runs)
        table.add(f"rows caught up/s, {sizes.machines:,} rows, owners: {owners}", rate, "1/s", aim)
    rate = median(partial(answered_per_s, sizes.machines), sizes.runs)
    table.add("rows read/s to answer another replica", rate, "1/s")
    table.add(f"memory of {sizes.machines:,} machines", memory, "MiB")
    table.add("the same on disk", disk, "MiB")
    plain, published = publish_us(sizes.versions // 4)
    table.add("a worker's change of a row, not published", plain, "us")
    table.add("a worker's change of a row, published", published, "us")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--cpu", action="store_true", help="count the process's own time, on a busy machine")
    given = parser.parse_args(arguments)
    if given.cpu:
        _clock[0] = process_time
    table = Table()
    measure(QUICK if given.quick else FULL, table)
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
