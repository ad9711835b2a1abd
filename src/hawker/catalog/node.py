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
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec

from hawker.catalog import spreading
from hawker.catalog.exchange import Address, Answering, Exchange
from hawker.catalog.joining import JOIN, Joining
from hawker.catalog.notes import Notes
from hawker.catalog.packets import PAYLOAD_MAX, UNREADABLE, NotOurs, Sealer
from hawker.catalog.publisher import Publisher
from hawker.catalog.replica import Replica
from hawker.catalog.replication import DIGEST, FETCH, Replication
from hawker.catalog.spreading import Spreading
from hawker.client.wire import PeerUnreachable
from hawker.core.freshness import Freshness
from hawker.core.swim import actions, members
from hawker.core.swim.settings import LAN, Settings
from hawker.core.swim.swim import Swim
from hawker.errors import HawkerError, StoreError
from hawker.host import Host
from hawker.http.app import Handler
from hawker.model.catalog import TIERS, LogId, Position, Tier, Version
from hawker.telemetry import Metrics, get_logger

MEMBERS = "/v1/catalog/members"
PROBE = "/v1/catalog/probe"
SWIM = b"s"
"""The first byte of a packet of membership."""
BRIDGES_PER_S = 3.0
"""Comparisons with other regions that a region makes in a second, whatever its size."""
BRIDGE_S = 1.0
RECHECK_S = 5.0


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
        me = members.Member(settings.name, host.now_ms(), settings.host, settings.port, settings.region, settings.roles)
        self.swim = Swim(me, settings.swim, host.rng, payload_max=PAYLOAD_MAX - 1)
        address = settings.host, settings.port
        self.replication = Replication(
            settings.name, address, self.replica, self._exchange, self._tell, self._ahead, metrics
        )
        self.freshness = Freshness()
        self._notes = Notes(settings.name, self.replica, host.rng, self.swim.set_note, self._heard, self._differs)
        self._joining = Joining(self)
        self.replica.on_applied.append(self._applied)
        self._publisher: Publisher | None = None
        self._spreading = Spreading(settings.swim, host.rng, self._neighbours, self._send)
        self._transport: asyncio.DatagramTransport | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self._disk_failed = False
        self._addresses: dict[Address, None] = {}

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self, publisher: Publisher | None = None) -> None:
        """Raises `HawkerError` when the port is taken."""
        loop = asyncio.get_running_loop()
        bind, port = self.settings.bind, self.settings.bind_port or self.settings.port
        try:
            await loop.create_datagram_endpoint(lambda: _Datagrams(self), local_addr=(bind, port))
        except OSError as error:
            raise HawkerError(
                f"cannot take datagrams on {bind}:{port}: {os.strerror(error.errno or 0)}",
                hint="members of the catalog meet on the same port by TCP and UDP",
            ) from error
        if publisher:
            await publisher.open(self.replica, self._tell)
            self._publisher = publisher
        self.swim.start(loop.time())
        self._notes.write()
        self._act()
        self._start(self._joining.run(), "join")
        self._start(self._bridge(), "bridge")
        self._start(self._recheck(), "recheck")

    async def close(self) -> None:
        """Say goodbye, so that nobody waits to find out. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.swim.leave(asyncio.get_running_loop().time())
        self._act()
        if self._ticking:
            self._ticking.cancel()
        self._spreading.close()
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
            MEMBERS: self._answer_members,
            PROBE: self._answer_probe,
        }
        return Answering(self._sealer, self._stranger).routes(answers)

    @property
    def waiting(self) -> int:
        """How much waits to be told to neighbours."""
        return len(self._spreading)

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def rng(self) -> Random:
        return self._host.rng

    def introduce(self, views: Sequence[members.View]) -> None:
        """Neighbours that a third party told of."""
        entries = [(view.member, view.incarnation, view.status) for view in views]
        self.swim.join(asyncio.get_running_loop().time(), entries)
        self._act()

    async def joined(self, within_s: float) -> None:
        """Until a member was reached and its logs were read; at most so long, and not at all with nobody to ask."""
        if self._joining.anyone():
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._joining.joined.wait()

    # --- membership --------------------------------------------------------------------------------------------------

    def received(self, source: Address, message: bytes) -> None:
        """A datagram."""
        try:
            payload = self._sealer.open(message)
        except NotOurs as error:
            self._stranger(error.why)
            return
        self.metrics.catalog_bytes.labels("received").inc(len(message))
        self.freshness.reached(asyncio.get_running_loop().time())
        kind, payload = payload[:1], payload[1:]
        with self._unless_disk_fails():
            if kind == SWIM:
                self.swim.on_packet(asyncio.get_running_loop().time(), source, payload)
                self._act()
                if source not in self._addresses:  # it knows us: it may be of a part of the region that we lost
                    self._joining.hint(source)
            elif kind == spreading.KIND:
                self._read_news(source, payload)

    def _act(self) -> None:
        """Do what the membership core asks for, and set its clock."""
        loop = asyncio.get_running_loop()
        for action in self.swim.take():
            match action:
                case actions.Send(to, payload):
                    self._send(to, SWIM + payload)
                case actions.StreamProbe(member, probe_id, deadline):
                    self._start(self._probe(member, probe_id, deadline), "probe")
                case actions.PushPull(member):
                    self._start(self._push_pull(member), "push-pull")
                case actions.Noted(name, note):
                    self._notes.read(name, note)
                case actions.Changed(name, before, after, member):
                    with self._unless_disk_fails():
                        self._changed(name, before, after, member)
                case actions.Conflict(ours, theirs):
                    _logger.error(
                        "member.conflict",
                        member=ours.name,
                        ours=ours.address,
                        theirs=theirs.address,
                        cause="membership",
                    )
        if self._ticking:
            self._ticking.cancel()
        if not self._closed:
            self._ticking = loop.call_at(max(loop.time(), self.swim.due()), self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self.swim.tick(asyncio.get_running_loop().time())
        with self._unless_disk_fails():
            self._act()

    def _changed(
        self, name: str, before: members.Status | None, after: members.Status | None, member: members.Member
    ) -> None:
        _logger.info(
            "member.changed",
            member=name,
            before=before.name if before is not None else None,
            after=after.name if after is not None else None,
            cause="membership",
        )
        if after is None:
            self._addresses.pop(member.address, None)
        else:
            self._addresses[member.address] = None
        self._keep_member(name)

    def _keep_member(self, name: str) -> None:
        """The table of members in the replica, for SQL and for the next start."""
        view = self.swim.members.get(name)
        if name == self.settings.name:
            return
        if view is None:
            self.replica.drop_member(name)
            return
        member = view.member
        self.replica.keep_member(
            name,
            region=member.region,
            host=member.host,
            port=member.port,
            roles=",".join(member.roles),
            status=view.status.name,
            incarnation=view.incarnation,
            born_ms=member.born,
            changed_ms=self._host.now_ms(),
        )

    async def _probe(self, member: members.Member, probe_id: int, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._exchange.ask_bytes(member.address, PROBE, b"", max(0.05, deadline - loop.time()))
            reached = True
            self.freshness.reached(loop.time())  # where datagrams are lost, streams may get through
        except PeerUnreachable:
            reached = False
        self.swim.on_stream_probe(loop.time(), probe_id, reached)
        self._act()

    async def _answer_probe(self, question: bytes) -> bytes:
        return b""

    async def _push_pull(self, member: members.Member) -> None:
        """Exchange tables of members, then compare both tiers' logs, with the same neighbour."""
        loop = asyncio.get_running_loop()
        try:
            ask: bytes | None = self.swim.push_pull_ask(loop.time())
            while ask is not None:
                answer = await self._exchange.ask_bytes(member.address, MEMBERS, ask)
                ask = self.swim.push_pull_done(loop.time(), answer)
                self._act()
            for tier in TIERS:
                await self.replication.compare(member.address, tier)
        except (PeerUnreachable, StoreError, ValueError) as error:
            _logger.info("catalog.exchange_failed", member=member.name, error=str(error), cause="local rule: push-pull")

    async def _answer_members(self, question: bytes) -> bytes:
        answer = self.swim.push_pull_answer(asyncio.get_running_loop().time(), question)
        self._act()
        return answer

    # --- rows --------------------------------------------------------------------------------------------------------

    def _tell(self, version: Version) -> None:
        """Something is new here."""
        ours = version.owner == self.settings.name
        if ours:
            self._notes.write()
        self._spreading.tell(version, ours=ours)

    def _read_news(self, source: Address, payload: bytes) -> None:
        try:
            versions = spreading.read(payload)
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
            self._start(self._compare(view.member), "compare")

    async def _compare(self, member: members.Member) -> None:
        try:
            for tier in TIERS:
                await self.replication.compare(member.address, tier)
        except (PeerUnreachable, StoreError) as error:
            _logger.info(
                "catalog.compare_failed", member=member.name, error=str(error), cause="local rule: notes differ"
            )

    def _ahead(self, tier: Tier, epoch: int) -> None:
        if self._publisher:
            self._publisher.ahead(tier, epoch)

    async def _bridge(self) -> None:
        """Compare the global tier with other regions: every node in its turn, so that a region does it a few times a
        second whatever its size."""
        while True:
            turn_s = max(BRIDGE_S, (len(self.swim.members) + 1) / BRIDGES_PER_S)
            await asyncio.sleep(turn_s * self._host.rng.uniform(0.5, 1.5))
            try:
                others = self._joining.elsewhere()
                if others:
                    name, address = self._host.rng.choice(others)
                    await self.replication.catch_up(address, "global")
                    self._confirm_neighbours_of(name)
            except (PeerUnreachable, StoreError) as error:
                _logger.info("catalog.bridge_failed", error=str(error), cause="local rule: bridge")

    def _confirm_neighbours_of(self, name: str) -> None:
        """Who was compared with knows how far the logs of its region's workers go."""
        now = asyncio.get_running_loop().time()
        self.freshness.reached(now)
        sql = "select name from workers where region = (select region from workers where name = ?) order by name"
        for (owner,) in self.replica.rows(sql, (name,)):
            log = LogId(owner, "global")
            at = self.replica.position(log)
            self.freshness.told(log, at, at, now)

    def _applied(self, tables: tuple[str, ...]) -> None:
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
            await asyncio.sleep(RECHECK_S)
            with self._unless_disk_fails():
                self.replica.recheck()

    # --- the rest ----------------------------------------------------------------------------------------------------

    def live_members(self) -> list[members.Member]:
        """The neighbours taken for living, by name."""
        found = self.swim.members
        return [found[name].member for name in sorted(found) if found[name].status.live and name != self.settings.name]

    def _neighbours(self) -> list[Address]:
        return [member.address for member in self.live_members()]

    @contextmanager
    def _unless_disk_fails(self) -> Iterator[None]:
        """The replica's disk may be full or broken. What was told is lost then, and comes again once it is well: the
        replica knows that it is behind, and health says so."""
        try:
            yield
        except StoreError as error:
            if not self._disk_failed:
                _logger.error("catalog.disk_failed", error=error.message, cause="the replica's database")
            self._disk_failed = True
        else:
            self._disk_failed = False

    def _send(self, to: Address, payload: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        message = self._sealer.seal(payload)
        self.metrics.catalog_bytes.labels("sent").inc(len(message))
        self._transport.sendto(message, to)

    def _stranger(self, why: str) -> None:
        self.metrics.catalog_refused.labels(why).inc()

    def connected(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, node: Node) -> None:
        self._node = node

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._node.connected(cast(asyncio.DatagramTransport, transport))  # asyncio's own class is none on Python 3.11

    def datagram_received(self, data: bytes, addr: Sequence[object]) -> None:
        self._node.received((str(addr[0]), int(str(addr[1]))), data)

    def error_received(self, exc: Exception) -> None:
        """A neighbour's port is closed, or the network is down: membership finds out by itself."""


_logger = get_logger()
