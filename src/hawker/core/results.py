"""What changed between two results of one query, as changes of numbered rows.

SQL does not say which row of a new result is which of the old one. Equal rows are taken for the same row. A row counts
as changed, not as new, if its leading columns stayed the same: as many columns as tell all rows of both results apart.
So a query that begins with its key shows updates as updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["insert", "update", "delete"]
Row = tuple[Any, ...]


class RowChange(msgspec.Struct, frozen=True):
    """`row`: a number that the row keeps as long as it is in the result. `values`: all its columns; for a deleted row
    their last values."""

    kind: Kind
    row: int
    values: Row


def numbered(rows: Sequence[Row]) -> dict[int, Row]:
    """A first result: rows are numbered from 1."""
    return dict(enumerate(rows, start=1))


def changes(before: Mapping[int, Row], after: Sequence[Row], unused: int) -> list[RowChange]:
    """The changes that turn `before` into `after`: deletions by number, then updates and insertions in the order of
    `after`. New rows are numbered from `unused` on. A row that occurs several times counts as that many rows."""
    left = Counter(after)
    gone: list[tuple[int, Row]] = []
    for number, row in before.items():
        if left[row]:
            left[row] -= 1
        else:
            gone.append((number, row))
    came: list[Row] = []
    for row in reversed(after):  # among equal rows the later ones are new, because the earlier ones keep their numbers
        if left[row]:
            left[row] -= 1
            came.append(row)
    came.reverse()
    if not gone and not came:
        return []
    width = _key_width(list(before.values()), after) if gone and came else 0
    same = {row[:width]: number for number, row in gone} if width else {}
    found: list[RowChange] = []
    for row in came:
        kept = same.pop(row[:width], None) if width else None
        if kept is None:
            found.append(RowChange("insert", unused, row))
            unused += 1
        else:
            found.append(RowChange("update", kept, row))
    updated = {change.row for change in found if change.kind == "update"}
    return [RowChange("delete", number, row) for number, row in gone if number not in updated] + found


def apply(rows: Mapping[int, Row], told: Sequence[RowChange]) -> dict[int, Row]:
    """The rows after some changes, by number, as a client computes them."""
    result = dict(rows)
    for change in told:
        if change.kind == "delete":
            del result[change.row]
        else:
            result[change.row] = change.values
    return result


def _key_width(before: Sequence[Row], after: Sequence[Row]) -> int:
    """How many leading columns tell all rows of each result apart; 0 if not even all columns but the last do."""
    columns = len(after[0])
    for width in range(1, columns):
        if all(len({row[:width] for row in rows}) == len(rows) for rows in (before, after)):
            return width
    return 0
