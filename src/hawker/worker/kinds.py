"""What a worker can own: each *kind* of thing brings all that is particular to it, in one directory.

Machines are the built-in kind. Others are found by the entry point group `hawker.kinds`, each of which names a `Kind`.
The worker goes by what its kinds say: their tables are in its database, its runner runs their flows, the ledger counts
what their rows hold, the catalog shows what they publish, and they are recovered before anything goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hawker.catalog.publish.outbox import Projection
from hawker.model.guest import Resources
from hawker.model.rows import Row
from hawker.services import Service
from hawker.store.compaction import Last, Named
from hawker.store.schema import Schema
from hawker.store.tx import Reads, Tx
from hawker.worker.context import WorkerContext
from hawker.worker.flows.flow import Flow

GROUP = "hawker.kinds"
"""The entry points of kinds that other distributions bring."""


class Parts(Protocol):
    """What looks after the things of one kind in one worker. The worker opens `recovery` first: it compares the rows
    with what is there. Then every run goes on that was under way, and the worker opens `services`, which serve the
    kind's calls."""

    @property
    def flows(self) -> Sequence[Flow]: ...

    @property
    def recovery(self) -> Sequence[Service]: ...

    @property
    def services(self) -> Sequence[Service]: ...


P = TypeVar("P", bound=Parts, covariant=True)


def _nothing(*args: object) -> Any:
    return ()


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[P]):
    """One kind of thing. `schema` names its rows and makes their tables; `parts` builds what looks after the things."""

    schema: Schema
    parts: Callable[[WorkerContext], P]
    holds: Mapping[type[Row], Callable[[Any], Resources]] = field(default_factory=dict)
    """What a row of each type holds of the worker's capacity."""
    projections: Callable[[Reads], Mapping[type[Row], Projection]] = lambda reads: {}
    """What the catalog shows of each type of row. `Reads` tell what is published when the worker begins."""
    broken: Callable[[Tx, Row], Collection[str]] = _nothing
    """What does not hold of a row that a change has written, where every change is checked."""
    audit: Callable[[Reads], Collection[str]] = _nothing
    """What is wrong with the kind's totals, which the ledger does not know."""
    over: Callable[[Tx, Collection[Last]], Collection[Named]] = _nothing
    """Which of these rows, and of what belongs to them, need not be kept any more (`store.compaction`)."""
    life: Callable[[], str] = str
    """The tables of the life of such a thing, as a page."""

    @property
    def name(self) -> str:
        return self.schema.name


Kinds = Sequence[Kind[Parts]]


def holds(kinds: Kinds) -> dict[type[Row], Callable[[Any], Resources]]:
    """What rows hold of the ledger, of all kinds."""
    return {row: held for kind in kinds for row, held in kind.holds.items()}
