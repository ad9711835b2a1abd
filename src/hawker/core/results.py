"""What changed between two results of one query, as changes of numbered rows.

SQL says nothing of which row of a new result is which of the old one. Rows that are equal are the same. A row is taken
for a changed one, rather than for a new one in the place of an old, when its leading columns stayed the same: as many
as are needed to tell all rows of both results apart. So a query that begins with its key shows updates as updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["insert", "update", "delete"]
Row = tuple[Any, ...]


class RowChange(msgspec.Struct, frozen=True):
    """`row`: a number that belongs to the row for as long as it is in the result. `values`: all its columns; of a
    deleted row the last ones."""

    kind: Kind
    row: int
    values: Row


def numbered(rows: Sequence[Row]) -> dict[int, Row]:
    """A first result: rows are numbered from 1."""
    return dict(enumerate(rows, start=1))


def changes(before: Mapping[int, Row], after: Sequence[Row], unused: int) -> list[RowChange]:
    """What makes `after` of `before`: deletions by number, then updates and insertions in the order of `after`. New
    rows are numbered from `unused` on. A row that is there several times is that many rows."""
    left = Counter(after)
    gone: list[tuple[int, Row]] = []
    for number, row in before.items():
        if left[row]:
            left[row] -= 1
        else:
            gone.append((number, row))
    came: list[Row] = []
    for row in reversed(after):  # of equal rows the later ones are new, as the earlier numbers were kept
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
    """The rows after changes, by number: what a client does with them."""
    result = dict(rows)
    for change in told:
        if change.kind == "delete":
            del result[change.row]
        else:
            result[change.row] = change.values
    return result


def _key_width(before: Sequence[Row], after: Sequence[Row]) -> int:
    """How many leading columns tell all rows of each result apart. 0: not even all but the last do."""
    columns = len(after[0])
    for width in range(1, columns):
        if all(len({row[:width] for row in rows}) == len(rows) for rows in (before, after)):
            return width
    return 0
