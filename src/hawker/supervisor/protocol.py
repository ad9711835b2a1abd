"""What a daemon and a supervisor of different versions need to know of each other: a supervisor outlives the daemon
that started it, and is then asked by a newer one.

Its hello has `protocol` and `features`. Supervisors from before that say neither, which counts as protocol 0 without
features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

PROTOCOL: Final = 1
"""Counted up when a word comes to mean something else than it did. What is only more has a feature of its own."""

MOUNTS: Final = "mounts"  # it was started so that it can make containers
CONFINED: Final = "confined"  # `start` takes `confined`
DISKS: Final = "disks"  # limits have `disk_bytes` and `disk_operations`
USER_EACH: Final = "user-each"  # it was started so that each machine of host programs has a user of its own
FORESEES: Final = "releases-as"  # it knows the orders `keep` and `foresee`, and what waits has a name (`release_of`)

_OPTIONS: Final = {"--mounts": MOUNTS, "--user-each": USER_EACH}
_LIMITS_OF_DISKS: Final = ("disk_bytes", "disk_operations")
_ORDERS: Final = {"make": MOUNTS, "go": MOUNTS, "unmake": MOUNTS}
_FIELDS: Final = {("start", "confined"): CONFINED, ("start", "users"): USER_EACH, ("make", "users"): USER_EACH}

HINDERED: Final = "Hindered"
"""The error of an answer where the host did not let us: a full disk, a file in the way. The order may come again."""
RELEASE: Final = ".go"


def release_of(directory: str, key: str) -> str:
    """The pipe, below a supervisor's directory, by which a process that waits for the order of a start is let go: who
    has made that order durable writes a "g" into it, once."""
    return f"{directory}/run/{key.replace('/', '.')}{RELEASE}"


def features(options: Iterable[str]) -> list[str]:
    """Those of a supervisor of this version that was started with these options."""
    return [CONFINED, DISKS, FORESEES, *(feature for option, feature in _OPTIONS.items() if option in options)]


def needed(order: str, fields: Mapping[str, Any]) -> set[str]:
    """Features without which an order would be refused or, worse, carried out by halves."""
    found = {_ORDERS[order]} if order in _ORDERS else set()
    return found | {feature for (op, name), feature in _FIELDS.items() if op == order and fields.get(name)}


def understood(fields: Mapping[str, Any], features: Collection[str]) -> dict[str, Any]:
    """An order with the limits that a supervisor of these features knows. A machine that lacks the others is better
    than none."""
    limits = fields.get("limits")
    if limits is None or DISKS in features:
        return dict(fields)
    return {**fields, "limits": {name: value for name, value in limits.items() if name not in _LIMITS_OF_DISKS}}
