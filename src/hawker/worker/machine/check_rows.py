"""What the region is told of a machine's health checks: rows that begin and end with each of its instances.

They are written in the very commit by which an instance becomes a machine's, so nobody ever sees a machine that has
started beside the results of its program before. A machine that is suspended keeps them: its program goes on where it
was. An update begins them anew when its image is there, before its program does: until then the old one is checked.
"""

from __future__ import annotations

from typing import Any

from hawker.core import checking
from hawker.core.checking import Health
from hawker.model.checks import Check, has_checks
from hawker.model.config import known_config
from hawker.model.rows import CheckRow, MachineRow
from hawker.store.tx import Tx


def follow(tx: Tx, before: MachineRow, after: MachineRow) -> None:
    """To be called with every change of a machine's row, under its record. A machine that has an instance has the rows
    of its configuration's checks, and no others; one that has none has none."""
    if before.instance == after.instance and (before.config is after.config or _said(before) == _said(after)):
        return
    if before.instance and has_checks(before.config):
        for check in known_config(before.config).checks:
            tx.delete(CheckRow, key_of(before.id, check.name))
    if after.instance and has_checks(after.config):
        health = checking.fresh(tx.now_ms)
        for check in known_config(after.config).checks:
            tx.put(row_of(after, check, health))


def learned(tx: Tx, began: MachineRow, check: Check, health: Health, cause: str) -> None:
    """Write what a look has found that began with this row of the machine. Nothing is written where the machine has
    another instance or another check by now: its rows are taken away with those that it has then, and one of no check
    would stay for ever."""
    found = tx.get(MachineRow, began.id)
    if found is None or found.instance != began.instance:
        return
    machine = found.as_it_runs()
    if _said(machine) != _said(began) and check not in known_config(machine.config).checks:
        return
    tx.record("check.changed", machine.id, cause=cause)
    tx.put(row_of(machine, check, health))


def row_of(machine: MachineRow, check: Check, health: Health) -> CheckRow:
    return CheckRow(
        machine=machine.id,
        app=machine.app,
        name=check.name,
        kind=check.kind,
        service=check.service,
        instance=machine.instance,
        status=health.status,
        output=health.output,
        updated_at_ms=health.changed_ms,
    )


def key_of(machine: str, name: str) -> str:
    return f"{machine}/{name}"


def _said(row: MachineRow) -> tuple[Any, Any]:
    return row.config.get("services"), row.config.get("checks")
