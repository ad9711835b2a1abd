"""Programs that run and that no row of the database knows: how to find them, and how one becomes a machine again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import UNENDED, MachineRow, PortRow, RunRow, VersionRow
from hawker.store.tx import Reads, Tx
from hawker.telemetry import get_logger
from hawker.worker import ledger
from hawker.worker.drivers.base import Instance
from hawker.worker.machine import check_rows, tally


def unknown(reads: Reads, instances: Collection[Instance]) -> list[Instance]:
    """Instances that no machine and no run knows, by their keys."""
    rows = reads.select(MachineRow, "instance > ''")
    active = reads.select(RunRow, UNENDED)
    known = {row.instance for row in rows} | {run.args.get("instance", "") for run in active}
    begun = {run.id for run in active}
    found = [each for each in instances if each.key not in known and each.key.partition("/")[0] not in begun]
    return sorted(found, key=lambda each: each.key)


def take_over(tx: Tx, program: Instance, capacity: Resources, cause: str) -> str:
    """Make the row of the machine that a program belongs to, from the note that its driver keeps. Returns why that
    could not be, or ""."""
    row = _row(program.note, program, tx.now_ms, cause)
    if row is None:
        return "its driver kept no note of the machine"
    before = tx.get(MachineRow, row.id)
    try:
        ledger.adjust(tx, capacity, before.held() if before else Resources(), row.held())
    except ledger.Full as full:
        return full.message
    if before is None or before.state is State.destroyed:
        tally.count(tx, row.app, 1)
    if tx.get(VersionRow, row.version) is None:
        tx.put(VersionRow(id=row.version, machine=row.id, config=row.config, created_at_ms=tx.now_ms))
    for port in row.ports:
        tx.put(PortRow(number=port.host_port, machine=row.id))
    tx.put(row)
    check_rows.follow(tx, before or replace(row, instance=""), row)
    _logger.warning("machine.recovered", resource=row.id, instance=row.instance, cause=cause)
    return ""


def _row(note: Mapping[str, Any], program: Instance, now_ms: int, cause: str) -> MachineRow | None:
    try:
        return msgspec.convert(
            {
                **note,
                "id": program.machine,
                "state": "suspended" if program.suspended else "started",
                "desired": "suspended" if program.suspended else "started",
                "instance": program.key,
                "started_at_ms": program.started_at_ms,
                "updated_at_ms": now_ms,
                "cause": cause,
            },
            MachineRow,
        )
    except msgspec.ValidationError:
        return None


_logger = get_logger()
