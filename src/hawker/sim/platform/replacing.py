"""Replaces a method, or something that a module uses, until a block ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Change(NamedTuple):
    """`owner.name` is `value` instead."""

    owner: Any
    name: str
    value: Any


_MISSING: Any = object()


@contextmanager
def replaced(changes: Iterable[Change]) -> Iterator[None]:
    """Replace these until the block ends."""
    with ExitStack() as undo:
        for owner, attribute, value in changes:
            before = vars(owner).get(attribute, _MISSING)
            undo.callback(*((delattr, owner, attribute) if before is _MISSING else (setattr, owner, attribute, before)))
            setattr(owner, attribute, value)
        yield
