"""Keeping the replica up to date: what neighbours tell in datagrams, what this node fetches, what it answers.

Versions come in datagrams, perhaps out of order, twice, or not at all. The node fetches a hole from the neighbour that
told it of what lies behind the hole, a moment later, since what is missing is often only late. Digests that are
compared now and then find everything else. An owner never fetches its own log from others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from hawker.catalog.gossip.exchange import FETCH_S, Address, Exchange, Sealed, sealed_op
from hawker.catalog.gossip.readiness import Readiness
from hawker.catalog.gossip.replica import Replica
from hawker.client.wire import PeerUnreachable
from hawker.core import ownerlog
from hawker.errors import StoreError
from hawker.model.catalog import LogId, Position, Range, Tier, Version
from hawker.telemetry import Metrics, get_logger

HOLE_S = 0.1
"""Half a gossip tick: another neighbour may be about to tell."""
SOON_S = 0.005
"""How long the node waits before it fetches rows that were too many to be told: it fetches what comes meanwhile with
them. An owner tells a few neighbours at a time, and they tell others once they have the rows, so an owner is not asked
by its whole region at once."""
TAKE_S = 0.002
TAKE_MOST = 256
"""One commit for what is told within a moment: 30,000 versions a second instead of 15,000."""
HELD_MOST = 4096
"""So many versions are kept while the replica's file is brought up to date: at most a second of them."""
ANSWER_BYTES = 8 << 20
"""An answer to a fetch has about so many bytes, and at least one whole log."""


class DigestAsk(msgspec.Struct, frozen=True, array_like=True):
    """`back` is where whoever finds a difference can ask the asker in turn."""

    tier: Tier
    digest: bytes
    back: Address | None = None


class DigestAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The positions of the logs in the buckets that differ. `complete`: the answering node has caught up itself."""

    positions: tuple[tuple[str, Position], ...]
    complete: bool = True


class CompareDigests(Sealed[DigestAnswer]):
    """Say which logs differ, and where they stand."""

    op = sealed_op("digest")


class FetchAsk(msgspec.Struct, frozen=True, array_like=True):
    """Logs, and where the asker stands in each."""

    logs: tuple[tuple[LogId, Position], ...]


class FetchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`rest`: how many of the logs asked for, counted from the end, were not looked at."""

    ranges: tuple[Range, ...]
    rest: int = 0


class FetchLogs(Sealed[FetchAnswer]):
    """Give what lies beyond the asker's positions."""

    op = sealed_op("fetch", FETCH_S)


class Replication:
    """One node's part in replication. `me` is the owner whose logs are ours; `ahead` is called with a tier and an epoch
    when somebody holds more of them than we have, `news` with versions that were new to us."""

    def __init__(
        self,
        me: str,
        address: Address,
        replica: Replica,
        exchange: Exchange,
        news: Callable[[Version], None],
        ahead: Callable[[Tier, int], None],
        metrics: Metrics,
        readiness: Readiness | None = None,
    ) -> None:
        self._me = me
        self._address = address
        self._replica = replica
        self._exchange = exchange
        self._news = news
        self._ahead = ahead
        self._readiness = readiness
        self._count = metrics.catalog_versions
        self._wanted: dict[Address, dict[LogId, None]] = {}  # to be asked for, by whom to ask
        self._timers: dict[Address, asyncio.TimerHandle] = {}
        self._asking: dict[LogId, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._known: dict[LogId, tuple[Position, float]] = {}  # how far a log goes, and since when we have lacked it
        self.holes = 0
        self._fresh: list[Version] = []  # told, and not taken yet
        self._sources: dict[LogId, Address] = {}
        self._taking: asyncio.TimerHandle | None = None
        self._closed = False
        self._disk_failed = False

    async def close(self) -> None:
        """End: what is told from now on is not taken, and nothing is fetched."""
        self._closed = True
        if self._taking:
            self._taking.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def behind(self, log: LogId, now: float) -> float:
        """For how long this replica has known that it lacks something of a log; 0 when it knows of nothing."""
        known = self._known.get(log)
        return now - known[1] if known and self._lacks(log) else 0.0

    # --- told by others ----------------------------------------------------------------------------------------------

    def told(self, source: Address, versions: Sequence[Version]) -> None:
        """Take versions out of a datagram. All that come within a few milliseconds are taken in one commit."""
        if self._closed:
            return
        for version in versions:
            if version.owner == self._me:
                self.heard(source, version.log, version.position)
            else:
                if not self._fresh:
                    self._taking = asyncio.get_running_loop().call_later(TAKE_S, self.take)
                self._fresh.append(version)
                self._sources[version.log] = source
        if len(self._fresh) >= TAKE_MOST:
            self.take()

    def take(self) -> None:
        """Take what was told so far, or take it a moment later if the event loop would stand still for the disk."""
        if self._replica.held_up and len(self._fresh) < HELD_MOST:
            if self._taking:
                self._taking.cancel()
            self._taking = asyncio.get_running_loop().call_later(TAKE_S, self.take)
            return
        fresh, self._fresh = self._fresh, []
        sources, self._sources = self._sources, {}
        if self._taking:
            self._taking.cancel()
        if not fresh:
            return
        try:
            outcome = self._replica.receive(fresh)
        except StoreError as error:  # it is found missing and fetched once the disk is well
            if not self._disk_failed:  # once, not with every packet
                _logger.warning("catalog.not_taken", versions=len(fresh), error=error.message, cause="news")
            self._disk_failed = True
            return
        self._disk_failed = self._disk_failed and not outcome.applied
        self._count.labels("applied").inc(len(outcome.applied))
        self._count.labels("missing").inc(len(outcome.missing))
        self._count.labels("refused").inc(outcome.refused)
        for version in outcome.applied:
            self._news(version)
        told: dict[LogId, Position] = {}
        for version in fresh:
            told[version.log] = max(version.position, told.get(version.log, version.position))
        for log in outcome.missing:
            self._note(log, told[log])
            self._want(sources[log], log, SOON_S if log in outcome.behind else HOLE_S)

    def heard(self, source: Address, log: LogId, at: Position) -> None:
        """Somebody stands there in a log: fetch what this replica lacks."""
        mine = self._replica.position(log)
        if log.owner == self._me:
            if at > mine:
                self._ahead(log.tier, at.epoch)
        elif at > mine and not self._replica.gave_up(log, at):
            self._note(log, at)
            self._want(source, log)

    def _note(self, log: LogId, at: Position) -> None:
        now = asyncio.get_running_loop().time()
        known, since = self._known.get(log, (at, now))
        if not self._behind(log, known):  # the log caught up since: what is missing now is news
            since = now
        self._known[log] = max(known, at), since

    def _behind(self, log: LogId, known: Position) -> bool:
        return self._replica.position(log) < known and not self._replica.gave_up(log, known)

    def _want(self, source: Address, log: LogId, within_s: float = HOLE_S) -> None:
        if log in self._asking:
            return
        self._wanted.setdefault(source, {})[log] = None
        loop = asyncio.get_running_loop()
        at = loop.time() + within_s
        timer = self._timers.get(source)
        if timer is None or timer.when() > at:
            if timer is not None:
                timer.cancel()
            self._timers[source] = loop.call_at(at, self._ask_for, source)

    def _ask_for(self, source: Address) -> None:
        self._timers.pop(source, None)
        logs = [log for log in self._wanted.pop(source, {}) if self._lacks(log) and log not in self._asking]
        if logs and not self._closed:
            self.holes += len(logs)
            self._start(self._fetch_quietly(source, logs), "fetch")

    def _lacks(self, log: LogId) -> bool:
        known = self._known.get(log)
        return known is not None and self._behind(log, known[0])

    async def _fetch_quietly(self, source: Address, logs: list[LogId]) -> None:
        try:
            moved = await self.fetch(source, logs)
        except (PeerUnreachable, StoreError) as error:
            _logger.info("catalog.fetch_failed", error=error.message, logs=len(logs), cause="local rule: a hole")
        else:
            self._tell_positions(moved)
            for log in moved:
                if self._lacks(log):  # the log went on meanwhile, and nobody asked for what was told of that
                    self._want(source, log, SOON_S)

    async def _compare_back(self, with_: Address, tier: Tier) -> None:
        try:
            await self.catch_up(with_, tier, mutual=False)
        except (PeerUnreachable, StoreError) as error:
            _logger.info("catalog.compare_failed", error=error.message, cause="local rule: a digest differs")

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    # --- asking ------------------------------------------------------------------------------------------------------

    async def catch_up(self, with_: Address, tier: Tier, *, mutual: bool = True, home: bool = False) -> None:
        """Compare, and tell the neighbours how far the logs go that moved on. Raises `PeerUnreachable`."""
        self._tell_positions(await self.compare(with_, tier, mutual=mutual, home=home))

    async def compare(self, with_: Address, tier: Tier, *, mutual: bool = True, home: bool = False) -> list[LogId]:
        """Compare digests with another node and fetch what it has and we lack. Returns the logs that moved on. `home`:
        it is of our region.

        If it differs from us it does the same with us then, when `mutual`. Raises `PeerUnreachable`.
        """
        ask = DigestAsk(tier, ownerlog.digest(self._positions(tier)), self._address if mutual else None)
        answer = await self._exchange.ask(with_, CompareDigests, ask)
        lacking: dict[LogId, Position] = {}
        for owner, theirs in answer.positions:
            log = LogId(owner, tier)
            at = self._replica.position(log)
            if owner == self._me:
                if theirs > at:
                    self._ahead(tier, theirs.epoch)
            elif theirs > at and not self._replica.gave_up(log, theirs):
                self._note(log, theirs)
                lacking[log] = theirs
        moved = await self.fetch(with_, lacking)
        if home and self._readiness and not any(self._behind(log, theirs) for log, theirs in lacking.items()):
            self._readiness.compared(tier, answer.complete)
        return moved

    async def fetch(self, source: Address, logs: Iterable[LogId]) -> list[LogId]:
        """Ask for what lies beyond where we stand in these logs. Returns the logs that moved on. Raises
        `PeerUnreachable`."""
        todo = [log for log in logs if log.owner != self._me and log not in self._asking]
        asking = list(todo)
        self._asking |= dict.fromkeys(asking)
        moved: list[LogId] = []
        try:
            while todo:
                ask = FetchAsk(tuple((log, self._replica.position(log)) for log in todo))
                answer = await self._exchange.ask(source, FetchLogs, ask)
                before = {found.origin.log: self._replica.position(found.origin.log) for found in answer.ranges}
                if answer.ranges:
                    ranges = [found for found in answer.ranges if found.origin.owner != self._me]
                    outcome = self._replica.merge(ranges)
                    self._count.labels("merged").inc(len(outcome.merged))
                    self._count.labels("refused").inc(outcome.refused)
                moved += [log for log, at in before.items() if self._replica.position(log) > at]
                if not 0 <= answer.rest < len(todo):
                    break
                todo = todo[len(todo) - answer.rest :] if answer.rest else []
        finally:
            for log in asking:
                self._asking.pop(log, None)
        return moved

    def _tell_positions(self, logs: Iterable[LogId]) -> None:
        for log in logs:
            at = self._replica.position(log)
            self._news(Version(log.owner, log.tier, at.epoch, at.head, ()))

    def _positions(self, tier: Tier) -> dict[str, Position]:
        return {owner: origin.position for owner, origin in self._replica.origins(tier).items()}

    # --- answering ---------------------------------------------------------------------------------------------------

    async def answer_digest(self, question: bytes) -> bytes:
        ask = _decode_digest(question)
        mine = self._positions(ask.tier)
        differing = ownerlog.differing(ownerlog.digest(mine), ask.digest)
        found = tuple((owner, mine[owner]) for owner in ownerlog.in_buckets(mine, differing))
        if differing and ask.back:
            self._start(self._compare_back(ask.back, ask.tier), "compare back")
        return _encode(DigestAnswer(found, self._readiness is None or self._readiness()))

    async def answer_fetch(self, question: bytes) -> bytes:
        ask = _decode_fetch(question)
        ranges: list[msgspec.Raw] = []
        size = 0
        for seen, (log, at) in enumerate(ask.logs, start=1):
            found = self._replica.answer(LogId(*log), Position(*at))
            if found is not None:
                raw = _encode(found)
                ranges.append(msgspec.Raw(raw))
                size += len(raw)
            if size >= ANSWER_BYTES:
                return _encode((ranges, len(ask.logs) - seen))
        return _encode((ranges, 0))


_encode = msgspec.msgpack.Encoder().encode
_decode_digest = msgspec.msgpack.Decoder(DigestAsk).decode
_decode_fetch = msgspec.msgpack.Decoder(FetchAsk).decode
_logger = get_logger()
