"""The catalog for its readers: SQL on this node's replica, subscriptions to queries, the members and how fresh each
one's rows are, and whether this node should get traffic.

Every agent that is a member serves this, whichever roles it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from hawker.catalog.read.queries import Queries
from hawker.catalog.read.subscriptions import Subscriptions
from hawker.core.freshness import unfit
from hawker.core.metrics import Level
from hawker.core.swim.members import Status, View
from hawker.errors import HawkerError, Invalid, PreconditionFailed, StoreError
from hawker.host import Host
from hawker.http.app import reply
from hawker.http.call import Call
from hawker.http.events import EventStream
from hawker.http.handlers import Route, on
from hawker.model import api
from hawker.model.catalog import TIERS, LogId, Tier
from hawker.model.fleet_calls import ListMembers, RunSql, Subscribe
from hawker.model.op import Declared
from hawker.model.values import rfc3339

if TYPE_CHECKING:
    from hawker.catalog.gossip.node import Node

REMOTE, MISSING = "remote", "missing"
_WORKERS = "select name, region, host, port from workers order by name"
_REMEMBERED = "select name from members where name <> ? and status <> 'left'"


class CatalogApi:
    """One member's. `routes` are for the application of each of the agent's roles; `close` before those stop
    serving, since it ends the streams that never end by themselves."""

    def __init__(self, node: Node, host: Host) -> None:
        self._node = node
        self._host = host
        self._queries = Queries(node.replica, host)
        self._subscriptions = Subscriptions(node.replica, self._queries, host)
        node.freshness.silent_s(asyncio.get_running_loop().time())  # silence counts from now
        self._measure()

    def routes(self) -> tuple[Route, ...]:
        return (on(RunSql, self.sql), on(Subscribe, self.subscribe), on(ListMembers, self.members))

    async def close(self) -> None:
        """End the subscriptions; whoever listens is told. May be called again."""
        await self._subscriptions.close()

    # --- SQL ---------------------------------------------------------------------------------------------------------

    async def sql(self, call: Call, request: RunSql) -> Any:
        """A query on the replica. Workers' own databases are asked through a broker."""
        check_sql(request)
        if request.worker or request.on == "workers":
            raise PreconditionFailed(
                "this agent is no broker, and asks no worker for its database",
                hint="leave worker and on out to read the catalog, or ask a broker",
            )
        found = await self._queries.ask(request.query)
        return {"columns": found.columns, "rows": found.rows}

    async def subscribe(self, call: Call, request: Subscribe) -> Response:
        """A query's result and its changes, as server-sent events."""
        for_s = None if request.seconds is None else float(request.seconds)
        since = request.last_event_id or request.since
        subscription = await self._subscriptions.subscribe(request.query)
        return EventStream(self._subscriptions.events(subscription, since, for_s))

    # --- members -----------------------------------------------------------------------------------------------------

    async def members(self, call: Call, request: ListMembers) -> list[api.Member]:
        """Everybody that membership or a log tells of: this node, its region's, then the other regions'."""
        now = asyncio.get_running_loop().time()
        home, known = self._node.settings.region, self._node.swim.members
        owned = {name: (region, f"{host}:{port}") for name, region, host, port in self._node.replica.rows(_WORKERS)}
        owners = sorted({owner for tier in TIERS for owner in self._node.replica.origins(tier)} - set(known))
        found = [self._member(known[name], now) for name in sorted(known)]
        for name in owners:
            region, address = owned.get(name, ("", ""))
            here = region == home or not region
            found.append(
                api.Member(
                    name=name,
                    region=region,
                    roles=["worker"],
                    address=address,
                    status=MISSING if here else REMOTE,
                    logs=self._logs(name, TIERS if here else ("global",), now),
                )
            )
        return sorted(found, key=lambda m: (not m.here, m.region != home, m.region, m.name))

    def _member(self, view: View, now: float) -> api.Member:
        member = view.member
        since_ms = self._host.now_ms() - round(1000 * (now - view.since)) if view.since else member.born
        return api.Member(
            name=member.name,
            region=member.region,
            roles=list(member.roles),
            address=f"{member.host}:{member.port}",
            status=view.status.name,
            here=member.name == self._node.settings.name,
            since=rfc3339(since_ms),
            incarnation=view.incarnation,
            logs=self._logs(member.name, TIERS, now),
        )

    def _logs(self, owner: str, tiers: Iterable[Tier], now: float) -> list[api.OwnerLog]:
        node = self._node
        ours = owner == node.settings.name
        found = []
        for log in (LogId(owner, tier) for tier in tiers):
            at = node.replica.position(log)
            standing = node.freshness.standing(log, at, now)
            behind_s = max(standing.behind_s, node.replication.behind(log, now))
            if at.epoch or behind_s:
                confirmed_s = 0.0 if ours else standing.confirmed_s
                found.append(
                    api.OwnerLog(
                        tier=log.tier,
                        epoch=at.epoch,
                        head=at.head,
                        confirmed_s=None if confirmed_s is None else round(confirmed_s, 3),
                        behind_s=round(behind_s, 3),
                    )
                )
        return found

    # --- health ------------------------------------------------------------------------------------------------------

    def unfit(self) -> str:
        """Why this node should get no traffic now, "" when it may."""
        try:
            return self._unfit()
        except StoreError as error:
            return f"its replica cannot be read: {error.message}"

    def _unfit(self) -> str:
        node, now = self._node, asyncio.get_running_loop().time()
        me = node.settings.name
        others = {name for name, view in node.swim.members.items() if view.status is not Status.left}
        others |= {name for name, region, *_ in node.replica.rows(_WORKERS) if region != node.settings.region}
        others -= {me}
        if not others:  # it has joined nobody yet: whom it was told of, and whom it knew the last time
            here = node.settings.host, node.settings.port
            others |= {f"{host}:{port}" for host, port in node.settings.join if (host, port) != here}
            others |= {name for (name,) in node.replica.rows(_REMEMBERED, (me,))}
        silent_s = node.freshness.silent_s(now)
        caught_up = node.readiness()
        return unfit(behind_s=self._behind_s(now), others=len(others), silent_s=silent_s, caught_up=caught_up)

    def _behind_s(self, now: float) -> float:
        """Of the logs whose owners live in this region. What a node announced that died before anybody had it is not
        lacking: nobody ever gets it. Of other regions it is not known who lives."""
        node = self._node
        behind = node.replication.behind
        live = [member.name for member in node.live_members()]
        return max((behind(LogId(name, tier), now) for name in live for tier in TIERS), default=0.0)

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Gauges are read when somebody asks for them."""
        node, metrics, subscriptions = self._node, self._node.metrics, self._subscriptions
        clock = asyncio.get_running_loop().time
        _watch(metrics.catalog_behind, lambda: self._behind_s(clock()))
        _watch(metrics.catalog_aside, lambda: node.replica.rows("select count(*) from quarantine")[0][0])
        _watch(metrics.catalog_rumours, lambda: node.waiting)
        _watch(metrics.catalog_subscriptions.labels("queries"), lambda: len(subscriptions))
        _watch(metrics.catalog_subscriptions.labels("listeners"), lambda: subscriptions.listeners)
        for status in Status:
            _watch(metrics.members.labels(status.name), partial(self._count, status))

    def _count(self, status: Status) -> int:
        return sum(view.status is status for view in self._node.swim.members.values())


def health(role: str, name: str, reading: CatalogApi | None) -> Response:
    """200, or 503 with a reason: what a load balancer goes by. Without a catalog nothing is there to be behind in."""
    why = reading.unfit() if reading else ""
    return reply(api.Health(ok=not why, role=role, name=name, reason=why), 503 if why else 200)


async def no_catalog(call: Call) -> Any:
    """The handler of all of it where there is none."""
    raise PreconditionFailed(
        "this agent has a fixed list of workers, and no catalog",
        hint="leave broker.workers out of its configuration, or ask another agent",
    )


def check_sql(request: RunSql) -> None:
    """Raises `Invalid` for a worker of the catalog."""
    if request.worker and request.on == "catalog":
        raise Invalid("on", request.on, "leave it out with a worker: the catalog is this node's own")


CATALOG_CALLS: tuple[type[Declared[Any]], ...] = (RunSql, Subscribe, ListMembers)


def _watch(gauge: Level, value: Callable[[], float]) -> None:
    def read() -> float:
        with suppress(HawkerError):
            return float(value())
        return nan

    gauge.set_function(read)
