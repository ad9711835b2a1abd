"""One member of the catalog: its replica, its neighbours, and what it tells and asks them.

    node = Node(settings, host, path, metrics)
    await node.open(publisher)        # None for an agent that owns no rows
    ... serve node.routes() at settings.host:settings.port ...
    await node.close()

Datagrams go to the same port as HTTP. A region's nodes are one SWIM group; other regions are reached now and then, by
whoever's turn it is, for the logs of the global tier alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import msgspec

from hawker.catalog.gossip import membership, rumours
from hawker.catalog.gossip.bridging import Bridging
from hawker.catalog.gossip.exchange import Address, Answering, Exchange
from hawker.catalog.gossip.joining import JOIN, Joining
from hawker.catalog.gossip.membership import MEMBERS, PROBE, Membership
from hawker.catalog.gossip.notes import Notes
from hawker.catalog.gossip.packets import UNREADABLE, NotOurs, Sealer
from hawker.catalog.gossip.publisher import Publisher
from hawker.catalog.gossip.readiness import Readiness
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.gossip.replication import DIGEST, FETCH, Replication
from hawker.catalog.gossip.rumours import RumourSender
from hawker.client.wire import PeerUnreachable
from hawker.core.beats import until_beat
from hawker.core.freshness import Freshness
from hawker.core.swim.members import Member
from hawker.core.swim.settings import LAN, Settings
from hawker.errors import HawkerError, StoreError
from hawker.host import Host
from hawker.http.app import Handler
from hawker.model.catalog import TIERS, LogId, Position, Tier, Version
from hawker.telemetry import Metrics, get_logger

RECHECK_S = 5.0
AGAIN_S = 1.0


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`host`, `port`: where others reach this node, by HTTP and datagrams; `bind` is the address to listen on, with
    `bind_port` where it is not `port`. `join`: members to begin with. `secrets`: the cluster's keys, the first one
    seals."""

    name: str
    region: str
    host: str
    port: int
    bind: str
    bind_port: int = 0
    cluster: str
    secrets: tuple[str, ...]
    token: str
    roles: tuple[str, ...] = ()
    join: tuple[Address, ...] = ()
    swim: Settings = LAN


class Node:
    """`open`, serve `routes()`, `close`."""

    def __init__(self, settings: NodeSettings, host: Host, path: Path, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._host = host
        self._sealer = Sealer(settings.cluster, settings.secrets, host.rng)
        self._exchange = Exchange(self._sealer, settings.token)
        self.replica = Replica.open(path, host, vfs=host.vfs)
        me = Member(settings.name, host.now_ms(), settings.host, settings.port, settings.region, settings.roles)
        self.membership = Membership(me, settings.swim, host, self.replica, self._exchange, self, self._hint)
        self.swim = self.membership.swim
        address = settings.host, settings.port
        self.replication = Replication(
            settings.name, address, self.replica, self._exchange, self._tell, self._ahead, metrics
        )
        self._joining = Joining(
            me, settings.join, self.replica, self._exchange, self.membership, self.replication, host.rng
        )
        self.freshness = Freshness()
        self.readiness = self.replication.readiness = Readiness(
            settings.name, settings.region, self.replica, self.freshness, self._joining.expected, self.membership.live
        )
        self._bridging = Bridging(
            settings.region,
            self.replica,
            self.replication,
            self.freshness,
            host.rng,
            lambda: len(self.swim.members),
        )
        self._notes = Notes(settings.name, self.replica, host.rng, self.swim.set_note, self._heard, self._differs)
        self.replica.on_applied.append(self._applied)
        self._publisher: Publisher | None = None
        self._rumours = RumourSender(settings.swim, host.rng, self._neighbours, self.send)
        self._transport: asyncio.DatagramTransport | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self._disk_failed = False

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self, publisher: Publisher | None = None) -> None:
        """Raises `HawkerError` when the port is taken."""
        await self._listen()
        self.readiness()  # whom it meets later meets one that was all there is
        if publisher:
            await publisher.open(self.replica, self._tell)
            self._publisher = publisher
        self._notes.write()
        self.membership.open()
        for name, work in (("join", self._joining.run), ("bridge", self._bridging.run), ("recheck", self._recheck)):
            self.start(self._for_ever(name, work), name)

    async def _listen(self) -> None:
        bind, port = self.settings.bind, self.settings.bind_port or self.settings.port
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
        if self._publisher:
            self._publisher.tell()
        with self._unless_disk_fails():
            self.membership.close()
        self._rumours.close()
        self._notes.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._publisher:
            await self._publisher.close()
        await self.replication.close()
        await self._exchange.close()
        if self._transport:
            self._transport.close()
        self.replica.close()

    def routes(self) -> dict[tuple[str, str], Handler]:
        """What other members ask over HTTP."""
        answers = {
            DIGEST: self.replication.answer_digest,
            FETCH: self.replication.answer_fetch,
            JOIN: self._joining.answer,
            MEMBERS: self.membership.answer_members,
            PROBE: self.membership.answer_probe,
        }
        return Answering(self._sealer, self._stranger, lambda: self._closed).routes(answers)

    @property
    def waiting(self) -> int:
        """How much waits to be told to neighbours."""
        return len(self._rumours)

    @property
    def exchange(self) -> Exchange:
        return self._exchange

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
                f"the name {self.settings.name} is taken: the agent at {holder} has it, and answers",
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
        self.metrics.catalog_bytes.labels("received").inc(len(message))
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
        self.metrics.catalog_bytes.labels("sent").inc(len(message))
        self._transport.sendto(message, to)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends with the node."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _tell(self, version: Version) -> None:
        """Something is new here."""
        self._rumours.tell(version, ours=version.owner == self.settings.name)

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
        if self._publisher:
            self._publisher.ahead(tier, epoch)

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
            if origin and origin.epoch <= epoch and name != self.settings.name:
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

    def live_members(self) -> list[Member]:
        """The neighbours taken for living, by name."""
        return self.membership.live()

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
        self.metrics.catalog_refused.labels(why).inc()

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
