"""What those who only read want of a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol


class View(Protocol):
    """A replica of the catalog to be read. `on_applied` are told the tables that may have changed, after a commit."""

    on_applied: list[Callable[[tuple[str, ...]], None]]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...


Changed = Mapping[str, AbstractSet[str] | None]
"""Keys of rows that may have changed, by table. None: any of the table."""


class RowView(View, Protocol):
    """The same for readers that keep what they have read: `on_rows` are told which rows to read again."""

    on_rows: list[Callable[[Changed], None]]
