"""What a daemon and a supervisor of different versions need to know of each other: a supervisor outlives the daemon
that started it, and then takes the calls of a newer one.

Its hello has `protocol` and `features`. Supervisors from before that say neither, which counts as protocol 0 without
features. The calls themselves are in `hawker.supervisor.calls`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any, Final

from hawker.supervisor.calls import DiscardContainer, MakeContainer, MakeTree, ReleaseContainer, Request, Start

PROTOCOL: Final = 1
"""Counted up when a word comes to mean something else than it did. What is only more has a feature of its own."""

MOUNTS: Final = "mounts"  # it was started so that it can make containers
CONFINED: Final = "confined"  # `Start` takes `confined`
DISKS: Final = "disks"  # limits have `disk_bytes` and `disk_operations`
USER_EACH: Final = "user-each"  # it was started so that each machine of host programs has a user of its own
PRESPAWN: Final = "prespawn"  # it takes `KeepStandby` and `Prespawn`, and start gates have names (`gate_of`)

_OPTIONS: Final = {"--mounts": MOUNTS, "--user-each": USER_EACH}
_LIMITS_OF_DISKS: Final = ("disk_bytes", "disk_operations")

HINDERED: Final = "Hindered"
"""The error of a reply where the host did not let the supervisor: a full disk, a file in the way. The call may be
repeated."""
GATE: Final = ".go"


def gate_of(directory: str, key: str) -> str:
    """The pipe, below a supervisor's directory, that a prespawned process waits at: whoever has made the start durable
    writes one "g" into it."""
    return f"{directory}/run/{key.replace('/', '.')}{GATE}"


def features(options: Iterable[str]) -> list[str]:
    """Those of a supervisor of this version that was started with these options."""
    return [CONFINED, DISKS, PRESPAWN, *(feature for option, feature in _OPTIONS.items() if option in options)]


def needed(request: Request) -> set[str]:
    """Features without which a supervisor would refuse this call or, worse, carry it out by halves."""
    found = set()
    if isinstance(request, MakeContainer | MakeTree | ReleaseContainer | DiscardContainer):
        found.add(MOUNTS)
    if isinstance(request, Start | MakeTree) and request.users:
        found.add(USER_EACH)
    if isinstance(request, Start) and request.confined:
        found.add(CONFINED)
    return found


def fields_of(request: Request, features: Collection[str]) -> dict[str, Any]:
    """The fields of a request with the limits that a supervisor of these features knows: a machine that lacks the
    others is better than none."""
    fields = vars(request)
    if "limits" not in fields or DISKS in features:
        return fields
    limits = {name: value for name, value in asdict(fields["limits"]).items() if name not in _LIMITS_OF_DISKS}
    return {**fields, "limits": limits}
