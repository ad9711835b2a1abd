"""What one seed did: the faults and rare paths that there are, and what did not hold."""

from __future__ import annotations

import msgspec

FAULTS = (
    "message lost",
    "message doubled",
    "message blocked",
    "answer lost",
    "killed",
    "power lost",
    "suffix lost",
    "disk lost",
    "backup restored",
    "clock set back",
    "clock set ahead",
    "poison published",
    "run by the version before",
    "replica damaged",
    "tombstones purged",
    "tombstones beyond a number purged",
)
PATHS = (
    "a hole was repaired",
    "versions that waited were applied",
    "a snapshot was taken",
    "a snapshot was taken below the floor",
    "a floor was learned with a version",
    "a lineage was followed",
    "an epoch was raised because somebody was ahead",
    "a row was put in quarantine",
    "a row in quarantine was replaced by a good one",
    "a row of an unknown table was kept",
    "a row of an unknown table was passed on",
    "an upgrade put rows of an unknown table in place",
    "a stamp ahead was accepted later",
    "the own replica was behind its outbox at start",
    "a replica began empty",
    "a write of nothing new was not published",
    "a change waited for others of its row",
    "a doubled version was dropped",
    "a tombstone was merged away",
)


class Report(msgspec.Struct, kw_only=True):
    """What one seed did. `faults` and `paths` are counts; `wrong` says what did not hold, empty when all did."""

    seed: int
    wrong: list[str] = []
    faults: dict[str, int] = {}
    paths: dict[str, int] = {}
    writes: int = 0
    deliveries: int = 0
    checks: int = 0
    rounds: int = 0
    digest: str = ""


class Wrong(Exception):
    """An invariant does not hold."""
