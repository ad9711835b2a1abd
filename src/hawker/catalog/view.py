"""What those who only read want of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class View(Protocol):
    """A replica of the catalog to be read. `on_applied` are told the tables that may have changed, after a commit."""

    on_applied: list[Callable[[tuple[str, ...]], None]]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
