"""One member of the catalog: its replica, its neighbours, and what it tells and asks them.

    node = Node(site)
    await node.open(source)           # None for an agent that owns no rows
    ... serve node.routes() at site.host:site.port ...
    await node.close()

Datagrams go to the same port as HTTP. A region's nodes are one SWIM group; other regions are reached now and then, by
whoever's turn it is, for the logs of the global tier alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, cast

from hawker.catalog.base import Site, Source
from hawker.catalog.gossip import membership, rumours
from hawker.catalog.gossip.bridging import Bridging
from hawker.catalog.gossip.exchange import Address, Answer, Answering, Exchange, Sealed
from hawker.catalog.gossip.joining import Join, Joining
from hawker.catalog.gossip.local_log import LocalLog
from hawker.catalog.gossip.membership import ExchangeMembers, Membership, Probe
from hawker.catalog.gossip.notes import Notes
from hawker.catalog.gossip.packets import UNREADABLE, NotOurs, Sealer
from hawker.catalog.gossip.readiness import Readiness
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import CompareDigests, FetchLogs, Replication
from hawker.catalog.gossip.rumours import RumourSender
from hawker.catalog.gossip.standings import Standings
from hawker.client.wire import PeerUnreachable
from hawker.core import hlc
from hawker.core.beats import until_beat
from hawker.core.freshness import Freshness
from hawker.core.swim.members import Member
from hawker.core.swim.settings import LAN, Settings
from hawker.errors import HawkerError, NotFound, StoreError
from hawker.http.handlers import Route
from hawker.model import api
from hawker.model.catalog import TIERS, Change, LogId, Position, Tier, Version
from hawker.telemetry import Metrics, get_logger

RECHECK_S = 5.0
AGAIN_S = 1.0


class Node:
    """The engine `gossip` (`catalog.base.Catalog`). `swim` are the settings of membership."""

    def __init__(self, site: Site, swim: Settings = LAN) -> None:
        host, rng = site.machine, site.machine.rng
        self.site = site
        self._metrics = site.metrics
        self._sealer = Sealer(site.cluster, site.secrets, rng)
        self.exchange = Exchange(self._sealer, site.token)
        self.replica = Replica.open(site.path, host, vfs=host.vfs)
        me = Member(site.name, host.now_ms(), site.host, site.port, site.region, site.roles)
        self.membership = Membership(me, swim, host, self.replica, self.exchange, self, self._hint)
        self.swim = self.membership.swim
        self.freshness = Freshness()
        self.readiness = Readiness(
            site.name,
            site.region,
            self.replica,
            self.freshness,
            lambda: self._joining.expected(),
            self.membership.live,
        )
        self.replication = Replication(
            site.name,
            (site.host, site.port),
            self.replica,
            self.exchange,
            self._tell,
            self._ahead,
            site.metrics,
            self.readiness,
        )
        self._joining = Joining(me, site.join, self.replica, self.exchange, self.membership, self.replication, rng)
        self._bridging = Bridging(
            site.region, self.replica, self.replication, self.freshness, rng, lambda: len(self.swim.members)
        )
        self._notes = Notes(site.name, self.replica, rng, self.swim.set_note, self._heard, self._differs)
        self.replica.on_applied.append(self._applied)
        self._local: LocalLog | None = None
        self._rumours = RumourSender(swim, rng, self._neighbours, self.send)
        self.standings = Standings(
            site, self.replica, self.swim, self.membership, self.freshness, self.replication, self.readiness
        )
        self._transport: asyncio.DatagramTransport | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self._disk_failed = False

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self, source: Source | None = None) -> None:
        """Raises `HawkerError` when the port is taken."""
        await self._listen()
        self.readiness()  # whom it meets later meets one that was all there is
        if source:
            local = LocalLog(source, self.replica, self._tell)
            await local.open()
            self._local = local
        self._notes.write()
        self.membership.open()
        for name, work in (("join", self._joining.run), ("bridge", self._bridging.run), ("recheck", self._recheck)):
            self.start(self._for_ever(name, work), name)

    async def _listen(self) -> None:
        bind, port = self.site.bind, self.site.bind_port or self.site.port
        try:
            loop = asyncio.get_running_loop()
            await loop.create_datagram_endpoint(lambda: _Datagrams(self), local_addr=(bind, port))
        except OSError as error:
            raise HawkerError(
                f"cannot take datagrams on {bind}:{port}: {os.strerror(error.errno or 0)}",
                hint="members of the catalog meet on the same port by TCP and UDP",
            ) from error

    async def _for_ever(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """A node's own work ends with the node, whatever goes wrong in it."""
        while True:
            try:
                await work()
            except Exception:
                _logger.exception("catalog.fault", work=name, cause="a fault of ours")
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """Leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._local:
            self._local.tell()
        with self._unless_disk_fails():
            self.membership.close()
        self._rumours.close()
        self._notes.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._local:
            await self._local.close()
        await self.replication.close()
        await self.exchange.close()
        if self._transport:
            self._transport.close()
        self.replica.close()

    def routes(self) -> tuple[Route, ...]:
        """What other members ask over HTTP."""
        answers: dict[type[Sealed[Any]], Answer] = {
            CompareDigests: self.replication.answer_digest,
            FetchLogs: self.replication.answer_fetch,
            Join: self._joining.answer,
            ExchangeMembers: self.membership.answer_members,
            Probe: self.membership.answer_probe,
        }
        return Answering(self._sealer, self._stranger, lambda: self._closed).routes(answers)

    # --- for the rest of the agent ------------------------------------------------------------------------------------

    @property
    def view(self) -> Replica:
        return self.replica

    def seen(self, owner: str) -> Mapping[Tier, Position]:
        return {tier: self.replica.position(LogId(owner, tier)) for tier in TIERS}

    def complete(self) -> bool:
        return self.readiness()

    def unfit(self) -> str:
        return self.standings.unfit()

    def owners(self) -> list[api.Member]:
        return self.standings.owners()

    async def forget(self, name: str, cause: str) -> None:
        assert self._local is not None  # a broker asks a worker
        origin = self.replica.origin(LogId(name, "global"))
        if origin is None or name == self.site.name:
            raise NotFound(f"no worker is called {name}", hint="hawker workers lists them")
        stamp = hlc.tick(self.replica.newest_stamp(), self.site.machine.now_ms())
        change = Change("forgotten", name, {"epoch": origin.epoch, "stamp": stamp})
        await self._local.source.put("global", change, "worker.forgotten", cause)

    def measure(self, metrics: Metrics) -> None:
        metrics.catalog_rumours.set(len(self._rumours))
        self.standings.measure(metrics)

    async def joined(self, within_s: float) -> None:
        """Until a member was reached and its logs were read, one of the own region if any is known there; at most so
        long, and not at all with nobody to ask. Raises `HawkerError` when another node has our name."""
        with suppress(TimeoutError, StoreError):  # its own disk keeps nobody from starting
            if self._joining.anyone():
                async with asyncio.timeout(within_s):
                    await self._joining.joined.wait()
                    await self.readiness.until_met()
        if holder := self._joining.holder:
            raise HawkerError(
                f"the name {self.site.name} is taken: the agent at {holder} has it, and answers",
                hint="give this agent a name of its own, in its configuration; or end the other one",
            )

    # --- what comes in, and what membership needs --------------------------------------------------------------------

    def received(self, source: Address, message: bytes) -> None:
        """A datagram."""
        if self._closed:
            return
        try:
            payload = self._sealer.open(message)
        except NotOurs as error:
            self._stranger(error.why)
            return
        self._metrics.catalog_bytes.labels("received").inc(len(message))
        self.reached()
        kind, payload = payload[:1], payload[1:]
        with self._unless_disk_fails():
            if kind == membership.KIND:
                self.membership.received(source, payload)
            elif kind == rumours.KIND:
                self._read_news(source, payload)

    def reached(self) -> None:
        """Another node was heard from."""
        self.freshness.reached(asyncio.get_running_loop().time())

    def _hint(self, address: Address) -> None:
        """A member that we do not know sends packets from there."""
        self._joining.hint(address)

    def noted(self, name: str, note: bytes) -> None:
        self._notes.read(name, note)

    async def exchange_logs(self, member: Member) -> None:
        for tier in TIERS:
            await self.replication.compare(member.address, tier, home=True)

    def send(self, to: Address, payload: bytes) -> None:
        # asyncio ends an endpoint for good over an address that makes no sense, and members announce what they like.
        if self._transport is None or self._transport.is_closing() or not _is_address(to[0]):
            return
        message = self._sealer.seal(payload)
        self._metrics.catalog_bytes.labels("sent").inc(len(message))
        self._transport.sendto(message, to)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends with the node."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _tell(self, version: Version) -> None:
        """Something is new here."""
        self._rumours.tell(version, ours=version.owner == self.site.name)

    def _read_news(self, source: Address, payload: bytes) -> None:
        try:
            versions = rumours.read(payload)
        except UNREADABLE:
            self._stranger("unreadable")
            return
        self.replication.told(source, versions)

    def _heard(self, name: str, log: LogId, at: Position) -> None:
        """A member says how far a log of its own goes."""
        view = self.swim.members.get(name)
        if view:
            self.freshness.told(log, at, self.replica.position(log), asyncio.get_running_loop().time())
            self.replication.heard(view.member.address, log, at)

    def _differs(self, name: str) -> None:
        view = self.swim.members.get(name)
        if view:
            self.start(self._compare(view.member), "compare")

    async def _compare(self, member: Member) -> None:
        try:
            await self.exchange_logs(member)
        except (PeerUnreachable, StoreError) as error:
            _logger.info(
                "catalog.compare_failed", member=member.name, error=str(error), cause="local rule: notes differ"
            )

    def _ahead(self, tier: Tier, epoch: int) -> None:
        if self._local:
            self.start(self._local.ahead(tier, epoch), "ahead")

    def _applied(self, tables: tuple[str, ...]) -> None:
        self._disk_failed = False
        if "forgotten" in tables:
            asyncio.get_running_loop().call_soon(self._forget)

    def _forget(self) -> None:
        """An operator has given nodes up: what they published goes, until they are back with a later epoch."""
        if self._closed:
            return
        for name, epoch in self.replica.rows("select id, epoch from forgotten order by id"):
            origin = self.replica.origin(LogId(name, "global"))
            if origin and origin.epoch <= epoch and name != self.site.name:
                _logger.warning("member.forgotten", member=name, cause="an operator gave it up")
                self.replica.forget(name)

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(until_beat(asyncio.get_running_loop().time(), RECHECK_S))
            with self._unless_disk_fails():
                self.replica.recheck()
                if not self.readiness():
                    self._notes.write()  # a file that was begun anew: the next packet of anybody tells what is lacking

    # --- the rest ----------------------------------------------------------------------------------------------------

    def _neighbours(self) -> list[Address]:
        return [member.address for member in self.membership.live()]

    @contextmanager
    def _unless_disk_fails(self) -> Iterator[None]:
        """The replica's disk may be full or broken. What was told is lost then, and comes again once it is well: the
        replica knows that it is behind, and health says so. The log tells of it once, until a commit has succeeded."""
        try:
            yield
        except StoreError as error:
            if not self._disk_failed:
                _logger.error("catalog.disk_failed", error=error.message, cause="the replica's database")
            self._disk_failed = True

    def _stranger(self, why: str) -> None:
        self._metrics.catalog_refused.labels(why).inc()

    def connected(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def disconnected(self) -> None:
        """The endpoint has ended. Unless we ended it, another one takes its place."""
        if not self._closed:
            _logger.error("catalog.endpoint_lost", cause="the datagram endpoint")
            self.start(self._listen_again(), "listen")

    async def _listen_again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                return await self._listen()
            except HawkerError as error:
                _logger.error("catalog.not_listening", error=error.message, cause="the datagram endpoint")


@lru_cache(maxsize=4096)
def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, node: Node) -> None:
        self._node = node

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._node.connected(cast(asyncio.DatagramTransport, transport))  # asyncio's own class is none on Python 3.11

    def datagram_received(self, data: bytes, addr: Sequence[object]) -> None:
        self._node.received((str(addr[0]), int(str(addr[1]))), data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._node.disconnected()

    def error_received(self, exc: Exception) -> None:
        """A neighbour's port is closed, or the network is down: membership finds out by itself."""


_logger = get_logger()
