"""What a proxy's view of a large catalog costs: 10,000 apps and 50,000 machines of one region.

    python -m bench.proxy_catalog [--quick]

The file is written as replication writes it: snapshots of 200 workers' logs, merged into a replica. Then processes of
their own, each beginning from nothing, open it with a whole edge proxy and are measured: until it listens, the first
request's look-up of an app and the later ones', memory, and what rows cost that change all the time, as versions of
their owners. All times include the groups, pools and places that requests are routed by.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time

import msgspec

from bench.catalog import EPOCH, machine, machine_ids, resident_mib
from bench.command import Table, options, told
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import TAKE_S
from hawker.host import live
from hawker.model.catalog import Change, LogId, Numbered, Origin, Range, Tier, Values, Version
from hawker.model.services import Concurrency, PublicPort, catalog_json
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.catalog_view.port_claims import PortClaims
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings

PORT = 80
SHARED = (80, 443)
TOUCHED = 100
"""Apps that users ask for, in the other case."""
BATCH_S = 0.01
PORTS = catalog_json((PublicPort(first=80, last=80, handlers=("http",)), PublicPort(first=443, last=443)))
CONCURRENCY = catalog_json(Concurrency(soft_limit=20, hard_limit=25))


class Sizes(msgspec.Struct, frozen=True):
    apps: int
    machines: int
    workers: int
    rate: int
    """Rows that change in a second."""
    seconds: float
    rounds: int


FULL = Sizes(apps=10_000, machines=50_000, workers=200, rate=1_000, seconds=5.0, rounds=3)
QUICK = Sizes(apps=200, machines=1_000, workers=10, rate=200, seconds=0.5, rounds=1)


def name_of(app: int) -> str:
    return f"app-{app:05d}"


def rows_of(worker: int, sizes: Sizes, ids: list[str]) -> dict[Tier, list[tuple[str, str, Values]]]:
    """A worker's rows, by tier. Machine n is of app n modulo their number, on worker n modulo theirs."""
    name = f"worker-{worker:03d}"
    place = {"region": "ord", "host": "127.0.0.1", "port": 4281, "proxy_port": 4290, "state": "active"}
    everywhere: list[tuple[str, str, Values]] = [("workers", name, place)]
    region: list[tuple[str, str, Values]] = []
    has = set()
    for number in range(worker, sizes.machines, sizes.workers):
        app, id_ = name_of(number % sizes.apps), ids[number]
        has.add(app)
        service = {
            "machine": id_,
            "app": app,
            "process_group": "app",
            "protocol": "tcp",
            "internal_port": 8080,
            "host_port": 20_000 + number // sizes.workers,
            "ports": PORTS,
            "concurrency": CONCURRENCY,
            "autostart": True,
            "autostop": "suspend",
            "min_machines_running": 0,
        }
        region.append(("machines", id_, {**machine(number), "app": app, "process_group": "app"}))
        region.append(("services", f"{id_}/tcp/8080", service))
    everywhere += [("app_regions", app, {"region": "ord", "machines": 1}) for app in sorted(has)]
    for own in range(worker, sizes.apps, sizes.workers):
        values = {"org": f"org-{own % 97}", "network": "default", "number": own, "created_at_ms": own + 1, "stamp": 1}
        everywhere.append(("apps", name_of(own), {**values, "app_id": f"{own:014x}", "deployed": True}))
    return {"region": region, "global": everywhere}


def filled(path: Path, sizes: Sizes) -> None:
    """A replica's file with everybody's rows."""
    replica = Replica.open(path, live())
    ids = machine_ids(sizes.machines)
    for worker in range(sizes.workers):
        for tier, rows in rows_of(worker, sizes, ids).items():
            origin = Origin(f"worker-{worker:03d}", tier, EPOCH, len(rows))
            numbered = tuple(Numbered(n, *row) for n, row in enumerate(rows, 1))
            assert replica.merge([Range(origin, 0, numbered, True)]).refused == 0
    assert replica.rows("select (select count(*) from apps), (select count(*) from machines)") == [
        (sizes.apps, sizes.machines)
    ]
    replica.close()


class Changing:
    """Machines that stop and start, each a version of its owner's, as they come out of datagrams."""

    def __init__(self, replica: Replica, sizes: Sizes) -> None:
        self._replica = replica
        self._sizes = sizes
        self._ids = machine_ids(sizes.machines)
        self._rng = random.Random(2)
        self._heads: dict[str, int] = {}

    def some(self, count: int) -> list[Version]:
        found = []
        for _ in range(count):
            number = self._rng.randrange(self._sizes.machines)
            owner = f"worker-{number % self._sizes.workers:03d}"
            head = self._heads.get(owner) or self._replica.position(LogId(owner, "region")).head
            self._heads[owner] = head + 1
            app = name_of(number % self._sizes.apps)
            state = self._rng.choice(("started", "stopped"))
            values = {**machine(number), "app": app, "process_group": "app", "state": state}
            change = Change("machines", self._ids[number], values)
            found.append(Version(owner, "region", EPOCH, head + 1, (change,)))
        return found


async def opened(replica: Replica) -> Proxy:
    listen = {str(port): "127.0.0.1:0" for port in SHARED}
    settings = ProxySettings(listen=listen, tcp="127.0.0.1", domain="localhost")
    return await Proxy.open(settings, replica, live(), region="ord", token="bench")


def microseconds(each: Callable[[str], object], names: list[str]) -> list[float]:
    taken = []
    for name in names:
        began = perf_counter()
        each(name)
        taken.append((perf_counter() - began) * 1e6)
    return taken


async def looked_up(path: Path, sizes: Sizes, touched: int) -> dict[str, float]:
    """Of a process that has just begun, and of `touched` apps."""
    gc.collect()
    empty = resident_mib()
    began = perf_counter()
    replica = Replica.open(path, live())
    file_s = perf_counter() - began
    proxy = await opened(replica)
    open_s = perf_counter() - began
    untouched = resident_mib()
    order = [f"{name_of(app)}.localhost" for app in range(sizes.apps)]
    random.Random(1).shuffle(order)
    order = order[:touched]
    router = proxy.router

    def hot(host: str) -> None:
        route = router.find(PORT, host)
        assert route is not None

    def taken(host: str) -> None:
        route = router.find(PORT, host)
        assert route is not None
        lease = route.take()
        assert lease is not None
        lease.release()

    first = []
    for host in order:
        assert router.find(PORT, host) is None
        began = perf_counter()
        await router.load(PORT, host)
        first.append((perf_counter() - began) * 1e6)
    gc.collect()
    loaded = resident_mib()
    later = microseconds(hot, order * (1 + 10_000 // len(order)))
    routed = microseconds(taken, order * (1 + 10_000 // len(order)))
    found = {
        "file_s": file_s,
        "open_s": open_s,
        "first_us": statistics.median(first),
        "first_p99_us": at(0.99, first),
        "later_us": statistics.median(later),
        "later_p99_us": at(0.99, later),
        "routed_us": statistics.median(routed),
        "routed_p99_us": at(0.99, routed),
        "untouched_mib": untouched - empty,
        "touched_mib": loaded - empty,
        "empty_mib": empty,
    }
    await proxy.close()
    replica.close()
    return found


async def changed(path: Path, sizes: Sizes, touched: int) -> dict[str, float]:
    """Share of a core, and the longest that the event loop was held up, while rows change; `touched` apps are in
    memory, or, for less than 0, there is no proxy at all."""
    replica = Replica.open(path, live())
    proxy = await opened(replica) if touched >= 0 else None
    if proxy is not None:
        for app in range(touched):
            proxy.app_table.load(name_of(app))
    changing = Changing(replica, sizes)
    loop = asyncio.get_running_loop()
    batches = [changing.some(int(sizes.rate * BATCH_S)) for _ in range(int(sizes.seconds / BATCH_S))]
    gc.collect()
    stalls: list[float] = []
    began, used = loop.time(), process_time()
    for number, batch in enumerate(batches, 1):
        while replica.held_up:  # noqa: ASYNC110  # as those do who hand over what is told
            await asyncio.sleep(TAKE_S)
        at_ = perf_counter()
        replica.receive(batch)
        if proxy is not None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stalls.append(perf_counter() - at_)
        await asyncio.sleep(max(0.0, began + number * BATCH_S - loop.time()))
    found = {
        "cpu": (process_time() - used) / (loop.time() - began),
        "stall_ms": max(stalls) * 1000,
        "per_s": sum(map(len, batches)) / (loop.time() - began),
    }
    if proxy is not None:
        await proxy.close()
    replica.close()
    return found


async def begun(path: Path) -> dict[str, float]:
    """What opening the parts takes, in seconds."""
    replica = Replica.open(path, live())
    found = {}
    for name, make in (
        ("directory_s", lambda: CatalogIndex(replica, "ord")),
        ("claims_s", lambda: PortClaims(replica, SHARED)),
    ):
        began = perf_counter()
        make().close()
        found[name] = perf_counter() - began
    replica.close()
    return found


def at(share: float, times: list[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def apart(home: Path, *what: str) -> dict[str, float]:
    """In a process of its own, which has nothing in memory that another one left."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.proxy_catalog", "--in", str(home), *what], stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=dict[str, float])


def medians(home: Path, rounds: int, *what: str) -> dict[str, float]:
    every = [apart(home, *what) for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in every) for name in every[0]}


def measure(sizes: Sizes, table: Table, home: Path) -> None:
    path = home / "catalog.db"
    filled(path, sizes)
    (home / "sizes.json").write_bytes(msgspec.json.encode(sizes))
    table.add("the file", path.stat().st_size / (1 << 20), "MiB")
    parts = medians(home, sizes.rounds, "begun")
    few = medians(home, sizes.rounds, "looked_up", str(min(TOUCHED, sizes.apps)))
    every = medians(home, sizes.rounds, "looked_up", str(sizes.apps))
    note = ", ".join(f"{name.removesuffix('_s')} {value * 1000:.0f} ms" for name, value in parts.items())
    table.add("begin: from no catalog open to listening", every["open_s"] * 1000, "ms", "", note)
    table.add("  of it the file itself", every["file_s"] * 1000, "ms")
    table.add("an app's first look-up", every["first_us"], "us", "", f"p99 {every['first_p99_us']:.0f}")
    for what, found in ((f"{TOUCHED} apps in memory", few), ("all apps in memory", every)):
        table.add(f"look-up, {what}", found["later_us"], "us", "", f"p99 {found['later_p99_us']:.1f}")
        note = f"p99 {found['routed_p99_us']:.1f}"
        table.add(f"look-up, choice, and end of a request, {what}", found["routed_us"], "us", "", note)
    table.add("memory: the empty process", every["empty_mib"], "MiB")
    table.add("memory beyond that: nothing touched", every["untouched_mib"], "MiB")
    table.add(f"memory beyond that: {TOUCHED} apps", few["touched_mib"], "MiB")
    table.add("memory beyond that: all apps", every["touched_mib"], "MiB")
    for what, touched in (("no proxy", -1), (f"{TOUCHED} apps", min(TOUCHED, sizes.apps)), ("all apps", sizes.apps)):
        if sizes.rounds == 1 and touched < sizes.apps:
            continue  # a process each takes longer than all the rest of a quick run
        found = medians(home, sizes.rounds, "changed", str(touched))
        note = f"{found['per_s']:.0f}/s, the event loop held up {found['stall_ms']:.1f} ms at most"
        table.add(f"rows that change, {what}: of a core", found["cpu"] * 100, "%", "", note)


def child(home: Path, what: list[str]) -> None:
    sizes = msgspec.json.decode((home / "sizes.json").read_bytes(), type=Sizes)
    path = home / "catalog.db"
    match what:
        case ["begun"]:
            found = asyncio.run(begun(path))
        case ["looked_up", touched]:
            found = asyncio.run(looked_up(path, sizes, int(touched)))
        case ["changed", touched]:
            copy = home / "changed.db"
            for old in _files(copy):
                old.unlink(missing_ok=True)
            copy.write_bytes(path.read_bytes())
            found = asyncio.run(changed(copy, sizes, int(touched)))
        case _:
            raise SystemExit(f"there is no such part: {what}")
    sys.stdout.buffer.write(msgspec.json.encode(found))


def _files(path: Path) -> Iterator[Path]:
    for suffix in ("", "-wal", "-shm"):
        yield path.with_name(path.name + suffix)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--in", dest="home", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.home:
        child(given.home, given.what)
        return 0
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place:
        measure(QUICK if given.quick else FULL, table, Path(place))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
