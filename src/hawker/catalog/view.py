"""What readers of the catalog see of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol


class View(Protocol):
    """The catalog's tables, to be read. Each of `on_applied` is called after a commit with the tables that may have
    changed."""

    on_applied: list[Callable[[tuple[str, ...]], None]]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...


Changed = Mapping[str, AbstractSet[str] | None]
"""Keys of rows that may have changed, by table. None: any of the table."""


class RowView(View, Protocol):
    """The same for readers that keep what they have read: each of `on_rows` is called with the rows to read again."""

    on_rows: list[Callable[[Changed], None]]
