"""An app as a worker keeps it and as the catalog shows it: the same row in two forms."""

from __future__ import annotations

from typing import Any

from hawker.model.catalog import Values
from hawker.model.rows import AppRow

COLUMNS = "id, app_id, org, network, number, created_at_ms, stamp, deleted, deployed, role"
"""The columns of the view `apps_rows` that `read` takes, in this order."""
_STAMP_BITS = 16
"""An app's stamp is in ms; the catalog's stamps have a counter below the ms (`core.hlc`)."""


def values(row: AppRow) -> Values:
    """The app's row as it is published; its key is the app's name."""
    return {
        "app_id": row.id,
        "org": row.org,
        "network": row.network,
        "number": row.number,
        "role": row.role,
        "deployed": row.deployed,
        "deleted": row.deleted,
        "created_at_ms": row.created_at_ms,
        "stamp": row.stamp_ms << _STAMP_BITS,
    }


def read(row: tuple[Any, ...]) -> AppRow:
    name, app_id, org, network, number, created_at_ms, stamp, deleted, deployed, role = row
    return AppRow(
        name=name,
        id=app_id,
        org=org,
        network=network,
        number=number,
        created_at_ms=created_at_ms,
        stamp_ms=stamp >> _STAMP_BITS,
        deleted=bool(deleted),
        deployed=bool(deployed),
        role=role,
    )
