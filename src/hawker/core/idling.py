"""When a machine that is not needed is stopped or suspended: what is documented of autostop.

    idler = Idler("web", Pace())                       # one for each app that a door has machines of
    wish = idler.look(now, running, coming)            # every few seconds

Each worker's proxy decides about its own machines, and knows what is in flight at these alone. Of the app's other
machines in the region it sees the rows. All agree which machines are kept for `min_machines_running`, since all rank
them in the same way.

A machine in which nothing happened for `idle_s` is stopped, unless it is the spare one of an app whose others are all
at their soft limits: excess = running - (those at their soft limit + 1). Where all are used, but fewer would do, the
one that ranks last is closed to new requests, so that it comes to rest. That takes `idle_s` of fewer being enough, with
room to spare, at every look; any change in what runs begins it anew. So load that comes and goes within `idle_s` moves
nothing. Each look stops one machine at most.

Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from hawker.core.rendezvous import weight
from hawker.model.services import Autostop, least_aggressive


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """`headroom`: the part of their soft limits that the machines left may be filled to. `drain_s`: how long a machine
    may take to come to rest before it is opened again."""

    idle_s: float = 300.0
    drain_s: float = 60.0
    headroom: float = 0.7


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """One service of a machine."""

    in_flight: int
    soft: int
    autostop: Autostop
    minimum: int = 0


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs and takes requests. `in_flight` None: its door is another's, and nobody here knows. `load`:
    the part of its soft limit that is used, of the service that is used most. `used_at`: when it was last used, or
    opened."""

    machine: str
    autostop: Autostop
    minimum: int = 0
    in_flight: int | None = None
    load: float = 0.0
    used_at: float = 0.0

    @classmethod
    def of(cls, machine: str, services: Sequence[Use], used_at: float, *, mine: bool = True) -> Running:
        """How an app is stopped, if it has several services: the least aggressive says how, and the largest minimum
        counts."""
        return cls(
            machine=machine,
            autostop=least_aggressive([use.autostop for use in services]),
            minimum=max((use.minimum for use in services), default=0),
            in_flight=sum(use.in_flight for use in services) if mine else None,
            load=max((use.in_flight / use.soft for use in services), default=0.0) if mine else 0.0,
            used_at=used_at,
        )


class Close(msgspec.Struct, frozen=True):
    """Give it no request that another machine can take."""

    machine: str


class Reopen(msgspec.Struct, frozen=True):
    """It is needed after all."""

    machine: str


class Stop(msgspec.Struct, frozen=True):
    """Nothing is in flight there: close it, look again that this is so, and stop it."""

    machine: str
    how: Literal["stop", "suspend"]


Wish = Close | Reopen | Stop | None


class Idler:
    """The machines of one app in this region. `closed` is the one that was closed last, to come to rest."""

    def __init__(self, app: str, pace: Pace) -> None:
        self._app = app
        self._pace = pace
        self._names: frozenset[str] = frozenset()
        self._enough_since: float | None = None
        self._closed_at = 0.0
        self.closed = ""

    def look(self, now: float, running: Sequence[Running], coming: bool = False) -> Wish:
        """What to do now. `coming`: a machine of the app is on its way, since those that run were not enough."""
        names = frozenset(each.machine for each in running)
        if names != self._names:
            self._names = names
            self._enough_since = None
        ranked = sorted(running, key=lambda each: weight(self._app, each.machine), reverse=True)
        minimum = max((each.minimum for each in running), default=0)
        spare = [each for each in reversed(ranked[minimum:]) if each.autostop != "off"]
        load = _all_load(running)
        others = len(running) - 1
        fewer_do = not coming and bool(spare) and others > 0 and load <= self._pace.headroom * others
        if self.closed:
            closed = next((each for each in spare if each.machine == self.closed), None)
            return self._of_closed(now, closed, fewer_do)
        at_soft = sum(each.load >= 1 for each in running)
        if coming or (others > 0 and others - at_soft < 1):
            self._enough_since = None
            return None
        for each in spare:
            if each.in_flight == 0 and now - each.used_at >= self._pace.idle_s:
                return _stop(each)
        if not fewer_do:
            self._enough_since = None
            return None
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since < self._pace.idle_s or spare[0].in_flight is None:
            return None
        self.closed, self._closed_at = spare[0].machine, now
        return Close(self.closed)

    def _of_closed(self, now: float, closed: Running | None, fewer_do: bool) -> Wish:
        machine = self.closed
        if closed is not None and fewer_do and now - self._closed_at <= self._pace.drain_s:
            return _stop(closed) if closed.in_flight == 0 else None
        self.closed, self._enough_since = "", None
        return Reopen(machine) if machine in self._names else None


def _stop(machine: Running) -> Stop:
    return Stop(machine.machine, "suspend" if machine.autostop == "suspend" else "stop")


def _all_load(running: Iterable[Running]) -> float:
    """The load, in machines filled to their soft limits. Where nobody here knows it, it is taken to be as elsewhere:
    requests spread evenly."""
    known = [each.load for each in running if each.in_flight is not None]
    unknown = sum(each.in_flight is None for each in running)
    return sum(known) + (sum(known) / len(known) * unknown if known else 0.0)
