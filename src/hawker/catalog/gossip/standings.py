"""What one member says of itself and of the others: who is known, how fresh their rows are, whether it is fit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from math import nan

from hawker.catalog.base import Site
from hawker.catalog.gossip.membership import Membership
from hawker.catalog.gossip.readiness import Readiness
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import Replication
from hawker.core import freshness as rules
from hawker.core.freshness import Freshness
from hawker.core.swim.members import Status, View
from hawker.core.swim.swim import Swim
from hawker.errors import StoreError
from hawker.model.api import Member, OwnerLog
from hawker.model.catalog import TIERS, LogId, Tier
from hawker.model.values import rfc3339
from hawker.telemetry import Metrics

REMOTE, MISSING = "remote", "missing"
_WORKERS = "select name, region, host, port from workers order by name"
_REMEMBERED = "select name from members where name <> ? and status <> 'left'"


class Standings:
    """One member's."""

    def __init__(
        self,
        site: Site,
        replica: Replica,
        swim: Swim,
        membership: Membership,
        freshness: Freshness,
        replication: Replication,
        readiness: Readiness,
    ) -> None:
        self._site = site
        self._replica = replica
        self._swim = swim
        self._membership = membership
        self._freshness = freshness
        self._replication = replication
        self._readiness = readiness
        freshness.silent_s(asyncio.get_running_loop().time())  # silence counts from now

    def owners(self) -> list[Member]:
        """Every node that membership or a log tells of. Raises `StoreError`."""
        now = asyncio.get_running_loop().time()
        home, known = self._site.region, self._swim.members
        workers = {name: (region, f"{host}:{port}") for name, region, host, port in self._replica.rows(_WORKERS)}
        found = [self._member(known[name], now) for name in sorted(known)]
        for name in sorted({owner for tier in TIERS for owner in self._replica.origins(tier)} - set(known)):
            region, address = workers.get(name, ("", ""))
            here = region == home or not region
            found.append(
                Member(
                    name=name,
                    region=region,
                    roles=["worker"],
                    address=address,
                    status=MISSING if here else REMOTE,
                    logs=self._logs(name, TIERS if here else ("global",), now),
                )
            )
        return found

    def _member(self, view: View, now: float) -> Member:
        member = view.member
        since_ms = self._site.machine.now_ms() - round(1000 * (now - view.since)) if view.since else member.born
        return Member(
            name=member.name,
            region=member.region,
            roles=list(member.roles),
            address=f"{member.host}:{member.port}",
            status=view.status.name,
            here=member.name == self._site.name,
            since=rfc3339(since_ms),
            incarnation=view.incarnation,
            logs=self._logs(member.name, TIERS, now),
        )

    def _logs(self, owner: str, tiers: Iterable[Tier], now: float) -> list[OwnerLog]:
        found = []
        for log in (LogId(owner, tier) for tier in tiers):
            at = self._replica.position(log)
            standing = self._freshness.standing(log, at, now)
            behind_s = max(standing.behind_s, self._replication.behind(log, now))
            if at.epoch or behind_s:
                confirmed_s = 0.0 if owner == self._site.name else standing.confirmed_s
                found.append(
                    OwnerLog(
                        tier=log.tier,
                        epoch=at.epoch,
                        head=at.head,
                        confirmed_s=None if confirmed_s is None else round(confirmed_s, 3),
                        behind_s=round(behind_s, 3),
                    )
                )
        return found

    def unfit(self) -> str:
        """Why this node should get no traffic now, "" when it may. Raises `StoreError`."""
        site, now = self._site, asyncio.get_running_loop().time()
        others = {name for name, view in self._swim.members.items() if view.status is not Status.left}
        others |= {name for name, region, *_ in self._replica.rows(_WORKERS) if region != site.region}
        others -= {site.name}
        if not others:  # it has joined nobody yet: whom it was told of, and whom it knew the last time
            others |= {f"{host}:{port}" for host, port in site.join if (host, port) != (site.host, site.port)}
            others |= {name for (name,) in self._replica.rows(_REMEMBERED, (site.name,))}
        silent_s = self._freshness.silent_s(now)
        caught_up = self._readiness()
        return rules.unfit(behind_s=self._behind_s(now), others=len(others), silent_s=silent_s, caught_up=caught_up)

    def _behind_s(self, now: float) -> float:
        """For how long this node has lacked something of a log whose owner lives in its region. What a node announced
        that died before anybody had it is not lacking: nobody ever gets it. Nobody here knows who lives in other
        regions."""
        behind = self._replication.behind
        live = [member.name for member in self._membership.live()]
        return max((behind(LogId(name, tier), now) for name in live for tier in TIERS), default=0.0)

    def measure(self, metrics: Metrics) -> None:
        metrics.catalog_behind.set(self._behind_s(asyncio.get_running_loop().time()))
        metrics.catalog_aside.set(nan)
        with suppress(StoreError):
            metrics.catalog_aside.set(self._replica.rows("select count(*) from quarantine")[0][0])
        views = list(self._swim.members.values())
        for status in Status:
            metrics.members.labels(status.name).set(sum(view.status is status for view in views))
