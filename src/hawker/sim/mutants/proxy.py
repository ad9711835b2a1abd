"""Mutations of the proxy, each with what must notice it, for runs with users."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec.structs import replace

from hawker.core import idling as idling_rules
from hawker.core import routing
from hawker.core.pool_entries import Candidate, PoolEntry, Region
from hawker.proxy.background.idling import Idling
from hawker.proxy.embedded import retry_state
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.pool import Pool
from hawker.proxy.embedded.upstream_connection import UpstreamConnection
from hawker.proxy.machines.door import Door
from hawker.proxy.routing.context import RoutingContext
from hawker.sim.mutants.base import Mutant
from hawker.sim.platform.processes import current_process
from hawker.sim.platform.replacing import Change


def _one_more(entry: PoolEntry) -> None:
    entry.hard = entry.row.hard + 1 if entry.row.hard else 0


def _any_that_sleeps(home: Region, out: Collection[str], **options: Any) -> PoolEntry | None:
    """Proxies choose different machines, each by its own name."""
    asleep = [entry for entry in home.asleep if entry.machine not in out]
    return asleep[len(current_process().name) % len(asleep)] if asleep else None


def _sent_again(
    method: bytes, how: str, *, sent: bool, whole: bool, tries: int, sent_tries: int, sent_most: int
) -> bool:
    return whole and sent_tries < 3


def _at_rest(machine: str, uses: Sequence[Any], used_at: float, *, mine: bool = True) -> idling_rules.Running:
    found = _running_of(machine, uses, used_at, mine=mine)
    return replace(found, in_flight=0, load=0.0) if mine else found


def _keeps_none(machine: str, uses: Sequence[Any], used_at: float, *, mine: bool = True) -> idling_rules.Running:
    return replace(_running_of(machine, uses, used_at, mine=mine), minimum=0)


_running_of = idling_rules.Running.of


def _any_connection(pool: Pool, address: Any, repeatable: bool) -> UpstreamConnection | None:
    """Whatever waits, to whatever machine."""
    for idle in pool._idle.values():
        if idle:
            connection = idle.pop()
            connection.waiting = False
            return connection
    return None


def _knows_all(context: RoutingContext) -> bool:
    return True


async def _looks_at_nothing(idling: Idling) -> None: ...


def _nothing(*args: Any) -> None: ...


def _runs_on(door: Door, row: Candidate) -> Candidate:
    return replace(row, state="started") if row.state in ("stopping", "suspending") else row


_running = property(lambda door: "started" if door.machine.state in ("stopping", "suspending") else door.machine.state)
_none = property(lambda door: 0)

PROXY_MUTANTS: dict[str, Mutant] = {
    "stopped with requests in flight": Mutant(
        "a machine is put to rest by what was in flight a while ago",
        ("put to rest", "which its proxy is putting to rest"),
        (Change(idling_rules.Running, "of", staticmethod(_at_rest)), Change(Door, "in_flight", _none)),
    ),
    "stopping is running": Mutant(
        "requests go to a machine while it is being put to rest",
        ("which its proxy is putting to rest", "which is being stopped", "came to machine"),
        (Change(Door, "candidate", _runs_on), Change(Door, "state", _running)),
    ),
    "any machine is started": Mutant(
        "proxies do not agree which machine to start",
        ("these were started",),
        (Change(routing, "to_start", _any_that_sleeps),),
    ),
    "one over the hard limit": Mutant(
        "a machine gets one request more than it takes",
        ("in flight, and takes",),
        (Change(PoolEntry, "limit", _one_more),),
    ),
    "POST sent again": Mutant(
        "a request that may have been acted on is sent again",
        ("was delivered",),
        (Change(retry_state, "may_retry", _sent_again),),
        ("kill", "kill at an effect"),
    ),
    "any connection": Mutant(
        "a request goes out on a connection to another machine",
        ("reached machine",),
        (Change(Pool, "take", _any_connection),),
    ),
    "no autostop": Mutant("nothing is ever put to rest", ("run on for",), (Change(Idling, "look", _looks_at_nothing),)),
    "none kept": Mutant(
        "min_machines_running is not heeded",
        ("are to be kept",),
        (Change(idling_rules.Running, "of", staticmethod(_keeps_none)),),
    ),
    "404 without knowing": Mutant(
        "an edge that lost its catalog says that apps are not there before it has caught up",
        ("got 404",),
        (Change(RoutingContext, "complete", _knows_all),),
        ("lost catalog",),
    ),
    "break not told": Mutant(
        "the user does not hear that the machine has broken off",
        ("no answer and no end",),
        (Change(Exchange, "broken", _nothing),),
        ("kill", "power cut"),
    ),
}
"""A few seeds notice each of these (`tests/sim/test_users.py`)."""
