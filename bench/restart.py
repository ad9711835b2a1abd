"""Fills a worker's database with machines, through the worker's own market: reserved, confirmed, resting."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hawker.host import live
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.market import Order
from hawker.model.rows import AppRow, WorkerRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import Metrics, set_up_logs
from hawker.worker.drivers.process import ProcessDriver
from hawker.worker.drivers.several import Several
from hawker.worker.flows.machine import MachineFlows
from hawker.worker.flows.runner import Runner
from hawker.worker.machine_log import MachineLog
from hawker.worker.market import Market


async def fill_log(path: Path, name: str, count: int) -> None:
    """Make `count` machines that rest, in batches that share commits."""
    set_up_logs(level="warning")
    path.parent.mkdir(parents=True, exist_ok=True)
    host = live()
    store = Store.open(path, host)
    me = WorkerRow(name=name, region="ord", epoch=host.ulid(), created_at_ms=host.now_ms())

    def identify(tx: Tx) -> None:
        tx.record("worker.started", name, cause="bench")
        tx.put(me)

    await store.submit(identify)
    room = 10 * count
    capacity = Resources(cpus_shared=room, memory_mib=room * 512, disk_mib=room * 2048, machines=room)
    log = MachineLog(host, capacity)
    processes = ProcessDriver(path.parent / "process")
    driver = Several({"process": processes})  # not opened: nothing is started
    runner = Runner(store, host, MachineFlows(store, host, driver, log).all(), Metrics())
    market = Market(store, host, driver, log, runner, me)
    market.drivers = {"process": await processes.fingerprint()}
    config = check_config({"image": "host", "init": {"exec": ["sleep", "3600"]}})
    app = AppRow(name="bench", id="bench", org="bench", network="default", number=1, created_at_ms=1, stamp_ms=1)

    async def one(number: int) -> None:
        order = Order(
            key=f"fill-{number}",
            app="bench",
            region="ord",
            name=f"machine-{number}",
            config=config.raw,
            resources=config.guest.resources(),
            skip_launch=True,
            request="bench",
        )
        await market.reserve(order)
        await market.confirm(order.key, app, None)

    for start in range(0, count, 100):
        await asyncio.gather(*(one(n) for n in range(start, min(count, start + 100))))
    await runner.close()
    await store.close()
