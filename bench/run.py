"""The market from the order to the program: `python -m bench.run [--quick] [--only PART...]` from the checkout.

Real agents, real sockets, real SQLite with `synchronous=FULL`, real processes. Figures are medians of rounds; the
machine's own costs stand beside them (`bench.floor`). The load generator shares the machine's cores with the
agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from bench import floor
from bench.command import Table, options, say_machine, told
from bench.market import (
    CLUSTER,
    USER,
    Agents,
    cpu_of,
    memory_mib,
    running_agents,
    start_agent,
    supervisor_pids,
    worker_role,
)
from hawker.client.connection import Peer, Response
from hawker.model.config import check_config
from hawker.model.market import Order

SLEEPER = {"image": "host", "init": {"exec": ["sleep", "3600"]}, "restart": {"policy": "no"}}
SHORT = {"image": "host", "init": {"exec": ["/bin/true"]}, "restart": {"policy": "no"}, "auto_destroy": True}
HUGE = {**SLEEPER, "guest": {"cpu_kind": "performance", "cpus": 128, "memory_mb": 262144}}
MACHINES = "/v1/apps/bench/machines"
BUSY = (b"no_answer", b"in_doubt", b"unreachable")
"""What a broker says of workers that were too busy to answer it in time."""
APP = b'{"app_name":"bench"}'


class Sizes(msgspec.Struct, frozen=True):
    """How much of everything: the full run and the quick one."""

    latency: int
    seconds: float
    rounds: int
    logged: int
    restarts: int
    running: int


FULL = Sizes(latency=400, seconds=4.0, rounds=3, logged=10_000, restarts=3, running=200)
QUICK = Sizes(latency=10, seconds=0.2, rounds=1, logged=100, restarts=1, running=10)


PARTS = ("memory", "latencies", "throughputs", "restart")


async def measure(sizes: Sizes, table: Table, parts: Sequence[str] = PARTS) -> None:
    home = Path(tempfile.mkdtemp(prefix="hawker-bench-"))
    try:
        floors = await measured_floors(table, sizes, home)
        if set(parts) - {"restart"}:
            with running_agents(home) as agents:
                user = peer(agents.broker, USER)
                await asked(user, "/v1/apps", APP)
                if "memory" in parts:
                    await memory(table, sizes, home, agents, user)
                if "latencies" in parts:
                    await latencies(table, sizes, agents, user, home, floors)
                if "throughputs" in parts:
                    await throughputs(table, sizes, agents, home)
                await user.close()
        if "restart" in parts:
            await restart(table, sizes, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Floors(msgspec.Struct, frozen=True):
    """What the machine itself takes, in ms: to make bytes durable, for an HTTP round trip, to start a program."""

    durable: float
    http: float
    process: float


async def measured_floors(table: Table, sizes: Sizes, home: Path) -> Floors:
    durable = floor.fdatasync_ms(home, sizes.latency)
    http = await floor.http_ms(sizes.latency)
    process = floor.process_ms(sizes.latency)
    table.latency("this machine: append 256 B + fdatasync", durable)
    table.latency("this machine: HTTP round trip, bare asyncio server", http)
    table.latency("this machine: vfork + exec /bin/echo to its first byte", process)
    return Floors(*map(statistics.median, (durable, http, process)))


def peer(port: int, token: str, connections_max: int = 64) -> Peer:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    return Peer("127.0.0.1", port, headers=headers, connections_max=connections_max)


def order(config: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"region": "ord", "config": config, **fields}).encode()


async def ordered(user: Peer, body: bytes, query: str = "") -> tuple[Response, float]:
    """Place an order. Returns the answer, and the milliseconds that it took."""
    return await asked(user, MACHINES + query, body)


async def asked(user: Peer, path: str, body: bytes) -> tuple[Response, float]:
    """Ask for something, again while the workers are too busy to answer the broker in time; the milliseconds are those
    of the last time."""
    while True:
        began = perf_counter()
        reply = await user.request("POST", path, body=body, timeout_s=30)
        took_ms = ms(began)
        if reply.status < 300:
            return reply, took_ms
        assert any(word in reply.body for word in BUSY), reply


def reservation(number: int) -> Order:
    """An order as a broker sends it, held for as long as the benchmark lasts."""
    config = check_config(SLEEPER)
    return Order(
        key=f"bench-{os.getpid()}-{number}",
        app="bench",
        region="ord",
        name="bench",
        config=config.raw,
        resources=config.guest.resources(),
        hold_s=600.0,
        request="bench",
    )


async def latencies(table: Table, sizes: Sizes, agents: Agents, user: Peer, home: Path, floors: Floors) -> None:
    """One order after the other. The started program writes its first byte into a pipe that is waited on here."""
    filled = 4 * floors.http + 2 * floors.durable  # the order, and for it offers, reserve and confirm
    worker = peer(next(iter(agents.workers.values())), CLUSTER)
    reserve = []
    for n in range(sizes.latency):
        body = msgspec.json.encode([reservation(n)])
        began = perf_counter()
        reply = await worker.request("POST", "/v1/market/reserve", body=body, timeout_s=10)
        reserve.append(ms(began))
        assert b'"reservation"' in reply.body, reply
    await worker.close()
    table.latency("worker: order -> durable reservation", reserve, "0.5 (p99 2)", floor=floors.http + floors.durable)

    placed: list[float] = []
    phases: dict[str, list[float]] = {"offers": [], "reserve": [], "confirm": []}
    for _ in range(sizes.latency):
        reply, took_ms = await ordered(user, order(SLEEPER, skip_launch=True))
        placed.append(took_ms)
        timing = dict(part.strip().split(";dur=") for part in reply.headers["server-timing"].split(","))
        for name, times in phases.items():
            times.append(float(timing[name]))
    table.latency("API: order -> filled, durable on the worker", placed, floor=filled)
    for name, times in phases.items():
        table.latency(f"  of which {name}, as the broker sees it", times)

    refused = []
    for _ in range(sizes.latency):
        began = perf_counter()
        reply = await user.request("POST", MACHINES, body=order(HUGE), timeout_s=10)
        refused.append(ms(began))
        assert reply.status == 409, reply
    table.latency("API: refusal of the impossible", refused, "5", floor=2 * floors.http)

    fifo = home / "first-byte"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    running, bare = [], []
    program = {**SLEEPER, "init": {"exec": ["/bin/sh", "-c", f"echo x > {fifo}; exec sleep 3600"]}}
    loop = asyncio.get_running_loop()
    for _ in range(sizes.latency // 2):
        arrived: list[float] = []
        loop.add_reader(first, take_byte, first, arrived)
        reply, took_ms = await ordered(user, order(program))
        began = perf_counter() - took_ms / 1000
        while not arrived:  # noqa: ASYNC110  # the time is taken in the moment it comes
            await asyncio.sleep(0.001)
        running.append((arrived[0] - began) * 1000)
        loop.remove_reader(first)
        await destroy(agents.broker, [msgspec.json.decode(reply.body)["id"]])  # so that the next order meets no work
        bare.append(bare_shell_ms(fifo, first))
    os.close(first)
    table.latency(
        "API: order -> first instruction of the program",
        running,
        "2",
        floor=filled + floors.process,
    )
    table.latency("  the same program by bare vfork + exec, interleaved", bare)


def take_byte(fd: int, arrived: list[float]) -> None:
    arrived.append(perf_counter())
    os.read(fd, 16)


def bare_shell_ms(fifo: Path, first: int) -> float:
    began = perf_counter()
    child = subprocess.Popen(["/bin/sh", "-c", f"echo x > {fifo}"])
    select.select([first], [], [])
    took = ms(began)
    os.read(first, 16)
    child.wait()
    return took


async def throughputs(table: Table, sizes: Sizes, agents: Agents, home: Path) -> None:
    for connections in (1, 16, 64):
        rates = [
            await rate(agents.broker, order(SLEEPER, skip_launch=True), sizes, connections) for _ in range(sizes.rounds)
        ]
        table.add(f"API: orders filled/s, {connections} connections", statistics.median(rates), "1/s")
    for in_flight in (16, 64, 256):
        rates = [await reserve_rate(agents, sizes, in_flight) for _ in range(sizes.rounds)]
        aim = "10,000" if in_flight == 256 else ""
        table.add(
            f"worker: durable reservations/s, {in_flight} in flight, batched", statistics.median(rates), "1/s", aim
        )
    for connections in (1, 16, 64):
        rates, used = [], {}
        for _ in range(sizes.rounds):
            before = cpu_seconds(home, agents)
            count, took, machines = await started(agents.broker, order(SLEEPER), sizes, connections)
            used = {name: (now - before[name]) * 1000 / count for name, now in cpu_seconds(home, agents).items()}
            rates.append(count / took)
            await destroy(agents.broker, machines)
        aim = "500" if connections == 64 else ""
        table.add(f"API: real machines started/s, {connections} connections", statistics.median(rates), "1/s", aim)
    for name, cpu_ms in used.items():
        table.add(f"  cpu time of each, {name}", cpu_ms, "ms")
    rates = [await rate(agents.broker, order(SHORT), sizes, 64, "?wait=true") for _ in range(sizes.rounds)]
    table.add("API: whole lives/s (start, run, exit, destroyed), 64", statistics.median(rates), "1/s")


async def rate(port: int, body: bytes, sizes: Sizes, connections: int, query: str = "") -> float:
    """Orders per second over so many connections, each one order after the other."""
    count, took, _ = await started(port, body, sizes, connections, query)
    return count / took


async def started(
    port: int, body: bytes, sizes: Sizes, connections: int, query: str = "?wait=true"
) -> tuple[int, float, list[str]]:
    """How many orders were filled in how many seconds, and their machines."""
    user = peer(port, USER, connections)
    machines: list[str] = []

    async def one() -> None:
        reply, _ = await ordered(user, body, query)
        machines.append(msgspec.json.decode(reply.body)["id"])

    count, took = await for_a_while(one, connections, sizes.seconds)
    await user.close()
    return count, took, machines


async def destroy(port: int, machines: list[str]) -> None:
    user = peer(port, USER, 16)

    async def some(of: list[str]) -> None:
        for machine in of:
            reply = await user.request("DELETE", f"{MACHINES}/{machine}?force=true", timeout_s=30)
            assert reply.status == 200, reply

    await asyncio.gather(*(some(machines[n::16]) for n in range(16)))
    await user.close()


def cpu_seconds(home: Path, agents: Agents) -> dict[str, float]:
    """What each kind of process has used so far, the children it has reaped included."""
    pids = {
        "broker": [agents.pid("broker")],
        "workers": [agents.pid(name) for name in agents.workers],
        "supervisors": [pid for name in agents.workers for pid in supervisor_pids(home, name)],
        "load generator": [os.getpid()],
    }
    return {name: sum(map(cpu_of, of)) for name, of in pids.items()}


async def reserve_rate(agents: Agents, sizes: Sizes, in_flight: int) -> float:
    """Reservations made durable per second at one worker, asked for in batches as brokers do."""
    from hawker.broker.fleet import BATCH_MAX
    from hawker.client.batching import Batcher

    worker = peer(next(iter(agents.workers.values())), CLUSTER)

    async def send(orders: Sequence[Order]) -> list[Any]:
        body = msgspec.json.encode(list(orders))
        reply = await worker.request("POST", "/v1/market/reserve", body=body, timeout_s=30)
        answers: list[Any] = msgspec.json.decode(reply.body)
        return answers

    batcher: Batcher[Order, Any] = Batcher(send, in_flight_max=2, batch_max=BATCH_MAX)

    async def one() -> None:
        answer = await batcher.submit(reservation(next(_numbers)))
        assert answer["type"] == "reservation", answer

    count, took = await for_a_while(one, in_flight, sizes.seconds)
    await worker.close()
    return count / took


_numbers = iter(range(10**6, 10**9))


async def for_a_while(one: Callable[[], Awaitable[None]], tasks: int, seconds: float) -> tuple[int, float]:
    began = perf_counter()
    count = 0

    async def keep_going() -> None:
        nonlocal count
        while perf_counter() - began < seconds:
            await one()
            count += 1

    await asyncio.gather(*(keep_going() for _ in range(tasks)))
    return count, perf_counter() - began


async def memory(table: Table, sizes: Sizes, home: Path, agents: Agents, user: Peer) -> None:
    """What agents take at rest, and what a running machine adds. The program's own memory is its own."""
    names = list(agents.workers)
    table.add("memory (PSS): idle worker daemon", memory_mib(agents.pid(names[0])), "MiB", "60")
    table.add("memory (PSS): broker", memory_mib(agents.pid("broker")), "MiB")

    def supervisors() -> list[int]:
        return [pid for name in names for pid in supervisor_pids(home, name)]

    def held() -> float:
        return sum(map(memory_mib, [*map(agents.pid, names), *supervisors()]))

    async def start(count: int) -> list[str]:
        machines = []
        for _ in range(count):
            reply, _ = await ordered(user, order(SLEEPER), "?wait=true")
            machines.append(msgspec.json.decode(reply.body)["id"])
        return machines

    machines = await start(1)  # a worker's first machine starts its supervisor
    table.add("memory (PSS): supervisor, one per worker", max(map(memory_mib, supervisors())), "MiB")
    machines += await start(sizes.running // 5)  # so that code and buffers of the first starts are not counted
    before = held()
    machines += await start(sizes.running)
    table.add("memory: per running machine, daemon and supervisor", (held() - before) * 1024 / sizes.running, "KiB")
    await destroy(agents.broker, machines)


async def restart(table: Table, sizes: Sizes, home: Path) -> None:
    """From exec of the daemon to its first answer, with so many machines in its log that were ordered and not
    started."""
    place = home / "restart"
    place.mkdir()
    with running_agents(place, workers=1) as agents:
        await fill(agents.broker, sizes.logged)
        ((name, port),) = agents.workers.items()
    times = []
    for _ in range(sizes.restarts):
        began = perf_counter()
        process = start_agent(place, name, worker_role(port, 10_000_000), port)
        times.append(ms(began))
        process.terminate()
        process.wait(30)
    table.latency(f"restart of a worker daemon, {sizes.logged} machines in its log", times, "300")


async def fill(broker: int, count: int) -> None:
    """Order so many machines that rest."""
    user = peer(broker, USER)
    await asked(user, "/v1/apps", APP)
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await ordered(user, order(SLEEPER, skip_launch=True))

    await asyncio.gather(*(some() for _ in range(32)))
    await user.close()


def ms(since: float) -> float:
    return (perf_counter() - since) * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="these parts alone")
    given = parser.parse_args(arguments)
    table = Table()
    say_machine()
    asyncio.run(measure(QUICK if given.quick else FULL, table, given.only))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
