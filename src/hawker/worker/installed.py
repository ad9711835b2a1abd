"""The kinds that other installed distributions bring."""

from __future__ import annotations

from hawker.plugins import installed
from hawker.worker.kinds import GROUP, Kind, Parts
from hawker.worker.machine.kind import MACHINE


def other_kinds() -> list[Kind[Parts]]:
    """Those beside machines, by the entry points of the group `hawker.kinds`."""
    return [point.load() for point in installed(GROUP, (MACHINE.name,)).values()]
