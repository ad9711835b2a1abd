"""Owners of rows, for tests of what reads them: each change is a range of one version, merged into a replica."""

from __future__ import annotations

from typing import Any

from hawker.catalog.gossip.replica import Replica
from hawker.model.catalog import Numbered, Origin, Range, Tier, Values


class Owner:
    """One owner's log of one tier, as one replica gets it."""

    def __init__(self, replica: Replica, name: str, tier: Tier = "region") -> None:
        self._replica = replica
        self.origin = Origin(name, tier, 1, 0)

    def put(self, table: str, **rows: Values | None) -> None:
        """Whole rows by key; None is a tombstone. One version."""
        before = self.origin.head
        self.origin = Origin(self.origin.owner, self.origin.tier, 1, before + 1)
        numbered = tuple(Numbered(before + 1, table, key, values) for key, values in rows.items())
        outcome = self._replica.merge([Range(self.origin, before, numbered, snapshot=not before)])
        assert outcome.merged == [self.origin.log], outcome


def machine(state: str = "started", **more: Any) -> Values:
    return {"app": "web", "name": "a", "region": "ord", "state": state, "generation": 1, "created_at_ms": 1, **more}
