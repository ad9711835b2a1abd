"""What a worker's health checks cost: `python -m bench.checks [--quick] [--machines N] [--interval S] [--seconds S]`.

So many started machines with an HTTP check each, all of one real server on loopback in a process of its own, which
answers at once. Prints looks a second, what they take of one core in the worker's process, and how late its event loop
is meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import Table, options, told
from hawker.host import live
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import set_up_logs
from hawker.worker.machine.inside.checks import Checks
from hawker.worker.machine.writer import MachineWriter

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nup"
WARM_S = 3.0
LOOK_S = 0.1
"""Between looks at how late the loop is: they cost, too."""


class Answering(asyncio.Protocol):
    def __init__(self, asked: Any) -> None:
        self._asked = asked

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked.value += 1
        self._transport.write(ANSWER)
        self._transport.close()


def serve(listener: socket.socket, asked: Any) -> None:
    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Answering(asked), sock=listener, backlog=1024)
        await server.serve_forever()

    asyncio.run(forever())


async def measure(given: argparse.Namespace, port: int, asked: Any, directory: Path, table: Table) -> None:
    count, interval_s, seconds = given.machines, given.interval, given.seconds
    host = live()
    store = Store.open(directory / "worker.db", host)
    late = [0.0]
    config = check_config(
        {
            "image": "host",
            "init": {"exec": ["true"]},
            "services": [
                {"internal_port": port, "checks": [{"type": "http", "path": "/up", "interval": f"{interval_s}s"}]}
            ],
        }
    ).raw

    def make(tx: Tx) -> None:
        tx.record("machines.made", "bench", cause="bench")
        for n in range(count):
            tx.put(machine(f"{n:014x}", config, tx.now_ms))

    await store.submit(make)
    checks = Checks(store, host, MachineWriter(host, Resources()), lambda row, port: [("127.0.0.1", port)])
    began = time.perf_counter()
    await checks.open()
    begun_ms = (time.perf_counter() - began) * 1000
    table.add(f"{count:,} machines, each checked every {interval_s:g} s: to begin", begun_ms, "ms")
    await asyncio.sleep(min(WARM_S, seconds))
    before = asked.value
    used, loop = cpu_s(), asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        due = loop.time() + LOOK_S
        await asyncio.sleep(LOOK_S)
        late.append(loop.time() - due)
    took, looks = cpu_s() - used, asked.value - before
    passing = sum(check.status == "passing" for row in store.read.select(MachineRow) for check in checks.shown(row))
    late.sort()
    table.add("passing", passing, "")
    table.add("looks a second", looks / seconds, "1/s")
    table.add("of one core", took / seconds * 100, "%")
    table.add("a look, time on a core", took / max(1, looks) * 1e6, "us")
    table.add("the event loop late, p99", late[int(len(late) * 0.99)] * 1000, "ms")
    await checks.close()
    await store.close()


def machine(id_: str, config: dict[str, Any], now_ms: int) -> MachineRow:
    return MachineRow(
        id=id_,
        app="web",
        name=id_,
        region="ord",
        state=State.started,
        desired="started",
        version="v",
        config=config,
        resources=Resources(),
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        cause="bench",
        private_ip="fdaa::2",
        instance=f"{id_}/launch",
        started_at_ms=now_ms,
    )


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    if given.quick:
        given.machines, given.interval, given.seconds = 20, 0.5, 1.0
    set_up_logs(level="critical")
    table = Table()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = multiprocessing.Value("q", 0)
        server = multiprocessing.Process(target=serve, args=(listener, asked), daemon=True)
        server.start()
        try:
            with tempfile.TemporaryDirectory(prefix="hawker-checks-") as directory:
                asyncio.run(measure(given, listener.getsockname()[1], asked, Path(directory), table))
        finally:
            server.terminate()
            server.join()
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
