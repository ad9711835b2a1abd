"""What owners of logs really had: the measure of every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hawker.model.catalog import LogId, Origin, Position, Version

State = Mapping[tuple[str, str], tuple[int, dict[str, Any] | None]]
"""The rows of a log by table and key: the number that wrote each, and its values."""


class Truth:
    """Every state that an owner's log ever had, by position. Written from what its outbox said, read by the checks."""

    def __init__(self) -> None:
        self.states: dict[LogId, dict[Position, State]] = {}
        self.at: dict[LogId, Position] = {}

    def begin(self, origin: Origin, rows: State) -> str:
        """An epoch began. Gives what is wrong with what it began with."""
        known = self.states.setdefault(origin.log, {})
        wrong = ""
        if origin.lineage and origin.lineage[-1].head == origin.head:
            before = known.get(origin.lineage[-1])
            if before is not None and before != rows:
                wrong = f"{origin.log}: begins with other rows than it had at {origin.lineage[-1]}"
        known[origin.position] = rows
        self.at[origin.log] = origin.position
        return wrong

    def add(self, version: Version) -> str:
        """A version was published. Gives what is wrong with it."""
        log, at = version.log, self.at[version.log]
        if (version.epoch, version.number) != (at.epoch, at.head + 1):
            return f"{log}: {version.position} was published after {at}"
        state = dict(self.states[log][at])
        for change in version.changes:
            if change.table == "_floor":
                continue
            name = change.table, change.key
            if name in state and state[name][1] == change.values:
                return f"{log}: {version.position} publishes {name} as it was"
            state[name] = version.number, change.values
        self.states[log][version.position] = {
            name: row for name, row in state.items() if row[1] is not None or row[0] > version.floor
        }
        self.at[log] = version.position
        return ""

    def now(self, log: LogId) -> State:
        return self.states[log][self.at[log]]
