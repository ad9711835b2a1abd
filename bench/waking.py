"""What it adds that a request must wake its machine: to the first byte of an answer, and how many a second can.

    python -m bench.waking [--quick]

The program is a server of a few lines in C. Bare, it is started and asked by this process; through the proxy, a
sleeping machine gets a request. Then as many apps as it takes, all asleep, get one request each on a schedule that
waits for nobody (open loop), at growing rates, until the machine cannot keep up: the answers come later and later.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec
from tests.kit.markets import Client

from bench.command import Table, options, told
from bench.market import USER, free_port, start_agent, worker_role

SOURCE = Path(__file__).with_name("serve.c")
FIRST_PORT = 12_000
"""Below the range of ports that connections are made from, so that nothing takes one meanwhile."""
SLOW_MS = 1000.0
"""Where the median of a rate lies above it, higher ones are not tried."""


class Sizes(msgspec.Struct, frozen=True):
    rounds: int
    rates: tuple[int, ...]
    seconds: float


FULL = Sizes(rounds=300, rates=(1, 10, 40, 80, 100, 125, 150, 175, 200, 250, 300, 400), seconds=5)
QUICK = Sizes(rounds=5, rates=(5,), seconds=1)


class Woken:
    """An agent with its proxy, and sleeping apps `w0`, `w1`, ..., one machine each."""

    def __init__(self, broker: int, http: int, program: Path) -> None:
        self.http = http
        self._client = Client(f"http://127.0.0.1:{broker}", USER)
        self._program = program
        self._machines: list[str] = []

    async def grow(self, count: int) -> None:
        """Have so many apps."""
        for number in range(len(self._machines), count):
            port = FIRST_PORT + number
            service = {"protocol": "tcp", "internal_port": port, "ports": [{"port": 80, "handlers": ["http"]}]}
            config = {"image": "host", "init": {"exec": [str(self._program), str(port)]}, "services": [service]}
            body = {"region": "ord", "config": config, "skip_launch": True}
            await self._client.ok("POST", "/apps", {"app_name": f"w{number}", "org_slug": "bench"})
            self._machines.append((await self._client.ok("POST", f"/apps/w{number}/machines", body))["id"])

        await self._until_known(count - 1)

    async def _until_known(self, number: int) -> None:
        """The catalog tells the proxy of so many new apps only after some seconds, in their order."""
        while True:
            try:
                await self.ask(number)
            except AssertionError:
                await asyncio.sleep(0.05)
            else:
                return await self.sleep(number)

    async def ask(self, number: int) -> float:
        """Seconds to the first byte of the answer of an app."""
        return await first_byte(self.http, f"w{number}.localhost")

    async def sleep(self, number: int) -> None:
        path = f"/apps/w{number}/machines/{self._machines[number]}"
        await self._client.ok("POST", f"{path}/stop", {"signal": "SIGKILL"})
        await self._client.ok("GET", f"{path}/wait?state=stopped&timeout=60")

    async def close(self) -> None:
        await self._client.close()


PHASES = {
    "start": "until the program runs: its order on the disk, its process in its groups",
    "ready": "until it listens",
    "connect": "until the proxy's connection is its own",
    "answer": "until the first byte of the answer is at the proxy",
}


async def phases(port: int, host: str) -> dict[str, float]:
    """Seconds, by phase, of a request as the proxy tells them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\nHawker-Timing: 1\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert " 200 " in head, head
        await reader.read()
    finally:
        writer.close()
    told = re.findall(r"edge-([a-z-]+);dur=([0-9.]+)", head)
    found = {name: float(ms) / 1000 for name, ms in told}
    return found | {"answer": found["first-byte"] - found["obtain"] - found["connect"]}


async def first_byte(port: int, host: str) -> float:
    began = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n")
        took = perf_counter() - began
        assert b" 200 " in head, head
        await reader.read()
        return took
    finally:
        writer.close()


async def bare(program: Path, rounds: int) -> list[float]:
    """From the fork of the program to the first byte of its answer, asked as soon as it listens."""
    taken = []
    for _ in range(rounds):
        port = free_port()
        began = perf_counter()
        process = subprocess.Popen([program, str(port)])  # noqa: ASYNC220 - as in a shell
        try:
            while True:
                try:
                    await first_byte(port, "bare")
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0)
            taken.append(perf_counter() - began)
        finally:
            process.kill()
            process.wait()
    return taken


async def one_by_one(woken: Woken, rounds: int) -> list[float]:
    await woken.grow(1)
    taken = []
    for _ in range(rounds):
        taken.append(await woken.ask(0))
        await woken.sleep(0)
    return taken


async def by_phase(woken: Woken, rounds: int) -> list[dict[str, float]]:
    taken = []
    for _ in range(rounds):
        taken.append(await phases(woken.http, "w0.localhost"))
        await woken.sleep(0)
    return taken


async def at_rate(woken: Woken, rate: int, seconds: float) -> list[float]:
    """Cold requests at a rate, each to an app of its own. Those that fail count as infinite."""
    count = max(3, int(rate * seconds))
    await woken.grow(count)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(number: int) -> float:
        await asyncio.sleep(began + number / rate - loop.time())
        try:
            async with asyncio.timeout(30):
                return await woken.ask(number)
        except (TimeoutError, OSError, AssertionError, asyncio.IncompleteReadError):
            return float("inf")

    taken = await asyncio.gather(*(one(number) for number in range(count)))
    await asyncio.gather(*(woken.sleep(number) for number in range(count)))
    return list(taken)


def at(share: float, times: Sequence[float]) -> float:
    """In ms."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


async def measure(sizes: Sizes, table: Table, home: Path, program: Path) -> None:
    broker, http, backhaul, api = (free_port() for _ in range(4))
    role = (
        f'{worker_role(api, 100_000)}\n[broker]\nlisten = "127.0.0.1:{broker}"\n'
        f'[proxy]\nbackhaul = "127.0.0.1:{backhaul}"\nlisten = {{ "80" = "127.0.0.1:{http}" }}\n'
    )
    agent = start_agent(home, "bench", role, broker)
    woken = Woken(broker, http, program)
    try:
        await one_by_one(woken, 5)
        plain, cold = [], []
        for _ in range(5):  # in turns: what else the machine does hits both
            plain += await bare(program, sizes.rounds // 5)
            cold += await one_by_one(woken, sizes.rounds // 5)
        table.latency("bare: fork to first byte", [taken * 1000 for taken in plain])
        table.latency("through the proxy: request that wakes, to first byte", [taken * 1000 for taken in cold])
        table.add("added, p50", at(0.5, cold) - at(0.5, plain), "ms", "<= 2")
        table.add("added, p99", at(0.99, cold) - at(0.99, plain), "ms", "<= 10")
        told = await by_phase(woken, sizes.rounds // 3)
        for phase, what in PHASES.items():
            table.latency(f"{phase}: {what}", [each[phase] * 1000 for each in told])
        for rate in sizes.rates:
            taken = await at_rate(woken, rate, sizes.seconds)
            failed = sum(each == float("inf") for each in taken)
            note = f"p99 {at(0.99, taken):.1f}, {failed} failed"
            table.add(f"{rate} cold starts a second, open loop", at(0.5, taken), "ms", "", note)
            if statistics.median(taken) * 1000 > SLOW_MS:
                break
    finally:
        await woken.close()
        agent.terminate()
        agent.wait(120)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place:
        program = Path(place) / "serve"
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True)
        asyncio.run(measure(QUICK if given.quick else FULL, table, Path(place), program))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
