"""How fast a machine may read and write, by its size: as upstream documents it for volumes.

Source: fly.io/docs/volumes/overview, "Volume limits", read in November 2026. Upstream's table has one row for each size
that it sold when it was written; sizes between and beyond them have what the next smaller one has.
"""

from __future__ import annotations

import msgspec

from hawker.model.guest import Guest

MIB = 1 << 20

_TABLE = {
    "shared": ((1, 4_000, 16), (4, 8_000, 32)),
    "performance": ((1, 12_000, 48), (2, 16_000, 64), (8, 32_000, 128)),
}
"""By kind of cpu: from so many cpus on, operations a second, MiB a second."""


class DiskSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What may be read a second, and again as much written. 0 is without bound."""

    operations: int = 0
    bytes: int = 0


def disk_speed(guest: Guest, scale: float = 1.0) -> DiskSpeed:
    """The speed for a guest, times `scale`; a scale of 0 sets no bound."""
    if scale == 0:
        return DiskSpeed()
    row = max(row for row in _TABLE[guest.cpu_kind] if row[0] <= guest.cpus)
    _, operations, mib = row
    return DiskSpeed(operations=max(1, round(operations * scale)), bytes=max(4096, round(mib * MIB * scale)))
