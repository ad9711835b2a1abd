"""Follows the log of a machine to its last line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hawker.model.machine import State
from hawker.model.rows import EventRow, MachineRow
from hawker.store.db import Store
from hawker.worker.drivers.base import LogLine
from hawker.worker.machine.writer import MachineWriter

LAST_LINES_S = 0.1
"""How long the log of a machine that is gone must be silent to have ended. A driver tells of the last line before it
has purged the machine, so this waits for nothing but its turn to read."""


async def until_destroyed(
    lines: AsyncIterator[LogLine], store: Store, writer: MachineWriter, machine: str
) -> AsyncIterator[LogLine]:
    """Give the lines of a log as they come, to the last one once the machine is destroyed."""
    gone = False
    waiting: asyncio.Timeout | None = None

    def look(now: MachineRow, event: EventRow | None) -> None:
        nonlocal gone
        if now.state is State.destroyed and not gone:
            gone = True
            if waiting:
                waiting.reschedule(asyncio.get_running_loop().time() + LAST_LINES_S)

    stop = writer.listen(machine, look)
    row = store.read.get(MachineRow, machine)
    gone = row is None or row.state is State.destroyed
    try:
        while True:
            try:
                async with asyncio.timeout(LAST_LINES_S if gone else None) as waiting:
                    line = await anext(lines)
            except (StopAsyncIteration, TimeoutError):
                return
            finally:
                waiting = None
            yield line
    finally:
        stop()
