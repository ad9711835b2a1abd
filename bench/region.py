"""What a region of 200 workers costs its members: `python -m bench.region [--quick] [--workers N]`.

Real catalog members (membership, sealing, spreading, replicas on SQLite) on virtual time over a simulated network with
1-5 ms of delay. Every worker changes `updates` rows a second, each a machine's row of the size they have. Counted are
bytes and packets of one member in a second, and how long a version takes to be everywhere.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.command import Table, options, told
from hawker.catalog.base import Site
from hawker.catalog.gossip.node import Node
from hawker.catalog.publish.outbox import Outbox
from hawker.catalog.publish.owner_log import OwnerLog
from hawker.catalog.publish.publisher import Publisher
from hawker.core.ownerlog import Budget
from hawker.core.swim.members import Status, View
from hawker.host import Host
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.server import serve
from hawker.model.catalog import LogId, Position
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process
from hawker.sim.platform.record import Record
from hawker.store.db import Store
from hawker.telemetry import Metrics, set_up_logs
from hawker.worker.publishing import Publishing

TOKEN = "cluster"
PORT = 4281
ROWS = 50
"""Machines of a worker, of which one changes at a time."""


class Worker:
    """One catalog member that owns machines, without the market around it."""

    def __init__(self, name: str, address: str, directory: Path, host: Host) -> None:
        self.name = name
        self._host = host
        self.metrics = Metrics()
        self.store = Store.open(directory / f"{name}-worker.db", host)
        capacity = Resources(cpus_shared=64, memory_mib=65536, disk_mib=1 << 20, machines=1000)
        publishing = Publishing(name, "ord", address, PORT, capacity, "process")
        unlimited = Budget(versions_per_s=1000, bytes_per_s=1e6, versions_at_once=1000, bytes_at_once=1e7)
        self.outbox = Outbox(host, OwnerLog(host, name), publishing.projections(), unlimited)
        self.publisher = Publisher(self.store, self.outbox)
        self.node = Node(
            Site(
                name=name,
                region="ord",
                host=address,
                port=PORT,
                bind=address,
                cluster="bench",
                secrets=("k",),
                token=TOKEN,
                path=directory / f"{name}-catalog.db",
                machine=host,
                metrics=self.metrics,
            )
        )
        self.changed: list[tuple[float, Position]] = []

    async def open(self) -> None:
        serving = Serving(self._host, Tokens({TOKEN: AGENT}), self.metrics, "ord")
        await serve(serving.app(self.node.routes()), (self.node.site.host, PORT), self._host)
        await self.node.open(self.publisher)

    async def change(self, number: int) -> None:
        """One machine goes to another state."""

        def change(tx: Any) -> None:
            tx.record("bench", self.name, cause="bench")
            tx.put(machine(self.name, number % ROWS, number // ROWS, tx.now_ms))

        await self.store.submit(change)
        at = self.outbox.log.origin(self.store.read, "region").position
        self.changed.append((asyncio.get_running_loop().time(), at))


def machine(worker: str, number: int, turn: int, now_ms: int) -> MachineRow:
    return MachineRow(
        id=f"{int(worker[1:]) * 1000 + number:014x}",
        app=f"app-{number % 7}",
        name=f"quiet-leaf-{number:04d}",
        region="ord",
        state=State.started if turn % 2 else State.stopped,
        desired="started",
        version="01M7YTDX2ZABGAT3KFPBXM9EB1",
        config={"image": "registry.example/app:1", "guest": {"cpu_kind": "shared", "cpus": 1, "memory_mb": 256}},
        resources=Resources(cpus_shared=1, memory_mib=256, disk_mib=1024, machines=1),
        created_at_ms=1,
        updated_at_ms=now_ms,
        cause="bench",
        private_ip="fdaa:1234:5678:9abc:def0:1234:5678:2",
    )


async def region(loop: SimLoop, workers: int, updates: float, seconds: float, directory: Path) -> dict[str, Any]:
    record = Record(loop.time)
    net = Net(loop, record, "bench", ["ord"])
    rng = random.Random(1)
    members: list[Worker] = []
    opened: list[asyncio.Task[None]] = []
    for n in range(workers):
        station = net.station(f"w{n}", "ord")
        host = Host(lambda: 1_700_000_000 + loop.time(), random.Random(n))
        process = Process(station.name, station)

        async def make(name: str = station.name, address: str = station.address, host: Host = host) -> None:
            worker = Worker(name, address, directory, host)
            members.append(worker)
            await worker.open()

        opened.append(loop.run_in(process, make(), station.name))
    await asyncio.gather(*opened)
    views = [View(w.node.swim.me, Status.alive, 0) for w in members]
    for worker in members:  # as if they had joined long ago
        worker.node.membership.introduce(views)
    await asyncio.sleep(5)

    def total(of: Callable[[Worker], float]) -> float:
        return sum(of(worker) for worker in members)

    def sent(worker: Worker) -> float:
        datagrams: float = worker.metrics.catalog_bytes.labels("sent").value
        return datagrams

    def asked(worker: Worker) -> float:
        return worker.node.exchange.bytes_sent + worker.node.exchange.bytes_received

    bytes_before, asked_before, packets_before = total(sent), total(asked), record.kinds["packet"]
    holes_before = total(lambda w: w.node.replication.holes)
    began, real = loop.time(), perf_counter()

    async def changing(worker: Worker) -> None:
        number = 0
        while loop.time() < began + seconds:
            await asyncio.sleep(rng.expovariate(updates) if updates else seconds)
            if updates:
                await worker.change(number)
                number += 1

    spreads: list[float] = []

    async def watching() -> None:
        """How long one version in a hundred takes to be at every member."""
        while loop.time() < began + seconds:
            worker = rng.choice(members)
            count = len(worker.changed)
            while len(worker.changed) == count and loop.time() < began + seconds:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
            if len(worker.changed) == count:
                return
            at, position = worker.changed[-1]
            log = LogId(worker.name, "region")
            while any(m.node.replica.position(log) < position for m in members):  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
            spreads.append(loop.time() - at)

    tasks = [asyncio.create_task(changing(worker)) for worker in members]
    watches = [asyncio.create_task(watching()) for _ in range(4)] if updates else []
    await asyncio.gather(*tasks)
    took = loop.time() - began
    versions = sum(len(worker.changed) for worker in members)
    result = {
        "workers": workers,
        "updates/s": round(versions / took, 1),
        "datagram bytes/s per member": round((total(sent) - bytes_before) / took / workers),
        "packets/s per member": round((record.kinds["packet"] - packets_before) / took / workers, 1),
        "asked bytes/s per member": round((total(asked) - asked_before) / 2 / took / workers),
        "fetches/s per member": round((total(lambda w: w.node.replication.holes) - holes_before) / took / workers, 2),
    }
    if watches:
        await asyncio.wait(watches, timeout=20)
        if spreads:
            result["everywhere p50 s"] = round(statistics.median(spreads), 3)
            result["everywhere max s"] = round(max(spreads), 3)
    result["real s per virtual s"] = round((perf_counter() - real) / took, 2)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument(
        "--updates", type=float, nargs="+", default=[0.0, 0.025, 5.0], help="rows that each worker changes in a second"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args(arguments)
    if given.quick:
        given.workers, given.updates, given.seconds = 4, [1.0], 2.0
    set_up_logs(level="warning")
    table = Table()
    for updates in given.updates:
        with tempfile.TemporaryDirectory(prefix="hawker-region-") as directory:
            sizes = {"workers": given.workers, "updates": updates, "seconds": given.seconds}
            found = run(partial(region, **sizes, directory=Path(directory)))
        for name, value in found.items():
            table.add(f"{given.workers} workers, {updates:g} changes/s of each: {name}", value, "")
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
