"""The world of the simulation of replication: nodes, the messages between them, and what must hold after each one.

What is done to it is in `chaos` and `calm`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

from tests.sim.replication.node import POISON, Kinds, Node
from tests.sim.replication.report import FAULTS, PATHS, Report, Wrong
from tests.sim.replication.truth import Truth

from hawker.catalog.gossip.replica import Outcome
from hawker.core import hlc, ownerlog
from hawker.model.catalog import NOTHING, TIERS, LogId, Origin, Position, Range, Tier, Version
from hawker.model.rows import LeaseRow, TallyRow
from hawker.store.tx import Tx

NODES = 6
LOSS = 0.3
DOUBLED = 0.1


class World:
    def __init__(self, seed: int, kinds: Kinds) -> None:
        self.seed = seed
        self.now_ms = 1_700_000_000_000
        self.rng = random.Random(f"replication/{seed}")
        self.nodes = {name: Node(name, seed, kinds, lambda: self.now_ms) for name in map("n{}".format, range(NODES))}
        self.names = sorted(self.nodes)
        self.truth = Truth()
        self.faults: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.report = Report(seed=seed)
        self.trace = blake2b(digest_size=16)
        self._heap: list[tuple[int, int, Callable[[], Any]]] = []
        self._order = 0
        self.blocked: set[tuple[str, str]] = set()
        self.calm = False
        self.failure: BaseException | None = None  # of a call after a commit
        self.seen: dict[tuple[str, LogId], Position] = {}
        self._asked: dict[tuple[str, LogId], Position] = {}

    # --- time ---

    def at(self, after_ms: int, call: Callable[[], Any]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_ms + after_ms, self._order, call))

    async def go_on(self, until_ms: int | None = None) -> None:
        """Let things happen until a time, or until nothing more does."""
        while self._heap and (until_ms is None or self._heap[0][0] <= until_ms):
            at_ms, _, call = heapq.heappop(self._heap)
            self.now_ms = max(self.now_ms, at_ms)
            waiting = call()
            if waiting is not None:
                await waiting
            if self.failure is not None:
                raise self.failure
        if until_ms is not None:
            self.now_ms = max(self.now_ms, until_ms)

    # --- the network ---

    def send(self, source: str, target: str, kind: str, body: Any) -> None:
        if not self.calm:
            if (source, target) in self.blocked:
                self.faults["message blocked"] += 1
                return
            if self.rng.random() < LOSS:
                self.faults["answer lost" if kind == "give" else "message lost"] += 1
                return
            if self.rng.random() < DOUBLED:
                self.faults["message doubled"] += 1
                self._deliver_in(self._delay_ms(), source, target, kind, body)
        self._deliver_in(self._delay_ms(), source, target, kind, body)

    def _delay_ms(self) -> int:
        return self.rng.randrange(1, 30) if self.rng.random() < 0.8 else self.rng.randrange(30, 600)

    def _deliver_in(self, ms: int, source: str, target: str, kind: str, body: Any) -> None:
        self.at(ms, lambda: self._deliver(source, target, kind, body))

    def _deliver(self, source: str, target: str, kind: str, body: Any) -> Any:
        node = self.nodes[target]
        if not node.up:
            return None
        self.report.deliveries += 1
        match kind:
            case "tell":
                others = [version for version in body if version.owner != target]
                if others:
                    self._took(node, source, node.replica.receive(others), others)
                return self._compare(node, source, {v.log: v.position for v in body if v.owner == target}, None)
            case "give":
                self._merged(node, source, [each for each in body if each.origin.owner != target])
                own = {each.origin.log: each.origin.position for each in body if each.origin.owner == target}
                return self._compare(node, source, own, None)
            case "ask":
                log, at = body
                self._answer(node, source, log, at)
            case "digest":
                ours = {tier: node.replica.differing(tier, body[tier]) for tier in TIERS}
                positions = {o.log: o.position for tier in TIERS for o in ours[tier].values()}
                self.send(target, source, "where", (positions, {tier: node.replica.digest(tier) for tier in TIERS}))
            case "where":
                return self._compare(node, source, *body)
        return None

    def others(self, name: str, count: int) -> list[str]:
        return self.rng.sample([other for other in self.names if other != name], count)

    def _published(self, node: Node, version: Version) -> None:
        self.must(self.truth.add(version))
        log = version.log
        before = node.replica.position(log)
        outcome = node.replica.receive([version])
        if node.replica.position(log) == before:
            node.catch_up()
        self.check_logs(node, [log])
        self._check_stamps(node, outcome.applied)
        self._check_win(node, version)
        self._tell(node.name, [version], 3)

    def _tell(self, name: str, versions: list[Version], count: int) -> None:
        for other in self.others(name, count):
            self.send(name, other, "tell", versions)

    def _took(self, node: Node, source: str, outcome: Outcome, versions: list[Version]) -> None:
        floors = {v.log: v.floor for v in outcome.applied if v.floor}
        if any(change.table == "_floor" for v in outcome.applied for change in v.changes) and floors:
            self.paths["a floor was learned with a version"] += 1
        if len(outcome.applied) > len(versions):
            self.paths["versions that waited were applied"] += 1
        if not outcome.applied and not outcome.missing and not outcome.ahead:
            self.paths["a doubled version was dropped"] += 1
        self._note_aside(node, outcome.applied)
        self.check_logs(node, [version.log for version in (*versions, *outcome.applied)])
        self._check_stamps(node, outcome.applied)
        if outcome.applied and self.rng.random() < 0.7:
            self._tell(node.name, outcome.applied, 2)
        for log in outcome.missing:
            at = node.replica.position(log)
            self._asked[node.name, log] = at
            self.send(node.name, source, "ask", (log, at))
        self._warn(node, outcome.ahead)

    def _merged(self, node: Node, source: str, given: list[Range]) -> None:
        before = {each.origin.log: node.replica.origin(each.origin.log) for each in given}
        outcome = node.replica.merge(given)
        for each in given:
            log, was = each.origin.log, before[each.origin.log]
            if log in outcome.merged:
                if self._asked.pop((node.name, log), None) is not None:
                    self.paths["a hole was repaired"] += 1
                if each.snapshot:
                    self.paths["a snapshot was taken"] += 1
                    if was and was.epoch == each.origin.epoch:
                        self.paths["a snapshot was taken below the floor"] += 1
                elif was and was.epoch != each.origin.epoch:
                    self.paths["a lineage was followed"] += 1
                if any(row.values is None for row in each.rows):
                    self.paths["a tombstone was merged away"] += 1
        if outcome.applied:
            self.paths["versions that waited were applied"] += 1
        self.check_logs(node, [each.origin.log for each in given])
        self._warn(node, outcome.ahead)

    def _answer(self, node: Node, source: str, log: LogId, at: Position) -> None:
        found = node.replica.answer(log, at)
        if found is not None:
            if node.old and any(row.table == "extras" for row in found.rows):
                self.paths["a row of an unknown table was passed on"] += 1
            self.send(node.name, source, "give", [found])
        elif node.replica.position(log) < at:
            self._warn(node, [])

    def _warn(self, node: Node, logs: Iterable[LogId]) -> None:
        """Tell owners that we hold more of them than they say there is."""
        for log in logs:
            if log.owner != node.name:
                self.send(node.name, log.owner, "where", ({log: node.replica.position(log)}, None))

    def pull(self, name: str, other: str) -> None:
        node = self.nodes[name]
        if node.up:
            self.send(name, other, "digest", {tier: node.replica.digest(tier) for tier in TIERS})

    async def _compare(
        self, node: Node, source: str, theirs: dict[LogId, Position], digests: dict[Tier, bytes] | None
    ) -> None:
        """Another node told where it stands: ask for what it has, give what it has not. Of our own log nobody has what
        we have not, unless we came back from the past."""
        for log, at in sorted(theirs.items()):
            ours = node.replica.position(log)
            if log.owner == node.name and ownerlog.fits(at, node.origin(log.tier)) == "ahead":
                await self._raise(node, log, at)
            elif at > ours:
                self.send(node.name, source, "ask", (log, ours))
            elif at < ours:
                self._answer(node, source, log, at)
        for tier, digest in sorted((digests or {}).items()):
            for owner in sorted(node.replica.differing(tier, digest)):
                if LogId(owner, tier) not in theirs:
                    self._answer(node, source, LogId(owner, tier), NOTHING)

    async def _raise(self, node: Node, log: LogId, at: Position) -> None:
        before = node.origin(log.tier).epoch
        above = max(at.epoch, before)
        origin: Origin = await node.write(lambda tx: node.log.raise_epoch(tx, log.tier, above))
        if origin.epoch > before:
            self.paths["an epoch was raised because somebody was ahead"] += 1
            self.must(self.truth.begin(origin, node.published(log.tier)))
            node.catch_up()

    # --- nodes ---

    async def start(self, node: Node) -> None:
        origins = await node.start()
        node.on_published = lambda version: self._published(node, version)
        node.on_due = lambda ms: self._flush_in(node, ms)
        for origin in origins:
            self.must(self.truth.begin(origin, node.published(origin.tier)))
        if node.replica.resets:
            self.paths["a replica began empty"] += 1
        for tier in TIERS:
            at = node.replica.position(LogId(node.name, tier))
            if at.epoch and at != NOTHING and at.head < node.origin(tier).head:
                self.paths["the own replica was behind its outbox at start"] += 1
        node.catch_up()
        self.check_logs(node, [LogId(name, tier) for name in self.names for tier in TIERS])
        self._flush_in(node, 0)

    def _flush_in(self, node: Node, ms: int) -> None:
        store = node.store

        async def flush() -> None:
            if node.up and node.store is store:
                await node.write(node.outbox.flush)

        if ms:
            self.paths["a change waited for others of its row"] += 1
        self.at(ms, flush)

    async def write(self, node: Node) -> None:
        """One change of the worker's."""
        rng = node.rng
        thing, app, name = (f"{kind}{rng.randrange(count)}" for kind, count in (("t", 5), ("a", 2), ("k", 3)))
        draw = rng.random()
        color = POISON if rng.random() < 0.06 else rng.choice(("red", "blue"))
        row = LeaseRow(
            machine=thing,
            nonce=color,
            owner=rng.choice("xy"),  # not published: a write of nothing new
            description=rng.choice(("", "note")),
            expires_at_ms=rng.randrange(5),
        )
        to = f"{node.name}-{rng.randrange(100)}"

        def change(tx: Tx) -> None:
            tx.record("write", thing, cause="simulation")
            if draw < 0.45:
                tx.put(row)
            elif draw < 0.65:
                tx.delete(LeaseRow, thing)
            elif draw < 0.8:
                tx.put(TallyRow(app=app, machines=rng.randrange(3)))
            elif draw < 0.95:
                node.put_name(tx, name, {"to": to})
            else:
                node.put_name(tx, name, {"to": to, "deleted": True})

        before = [node.origin(tier).head for tier in TIERS]
        self.report.writes += 1
        if draw < 0.45 and color == POISON:
            self.faults["poison published"] += 1
        await node.write(change)
        if draw < 0.65 and before == [node.origin(tier).head for tier in TIERS]:
            self.paths["a write of nothing new was not published"] += 1

    # --- what must hold ---

    def must(self, wrong: str) -> None:
        if wrong:
            raise Wrong(wrong)

    def check_logs(self, node: Node, logs: Iterable[LogId]) -> None:
        """S11 and S12, for the logs that may have changed."""
        for log in sorted(set(logs)):
            origin = node.replica.origin(log)
            if origin is None:
                continue
            at = origin.position
            self.report.checks += 1
            if at < self.seen.get((node.name, log), NOTHING):
                raise Wrong(f"{node.name}: {log} went back from {self.seen[node.name, log]} to {at}")
            self.seen[node.name, log] = at
            state = self.truth.states.get(log, {}).get(at)
            if state is None:
                raise Wrong(f"{node.name}: {log} is at {at}, where its owner never was")
            found = {(row.table, row.key): (row.number, row.values) for row in node.replica.log_rows(log)}
            wanted = {k: row for k, row in state.items() if row[1] is not None or row[0] > origin.floor}
            if found != wanted:
                differ = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
                first = differ[0]
                raise Wrong(
                    f"{node.name}: {log} at {at}, floor {origin.floor}: {first} is {found.get(first)}, and was "
                    f"{wanted.get(first)} there"
                )
            self.trace.update(repr((self.now_ms, node.name, log, at)).encode())

    def _check_stamps(self, node: Node, versions: Iterable[Version]) -> None:
        for version in versions:
            for change in version.changes:
                if change.table == "names" and change.values and hlc.ahead(change.values["stamp"], node.host.now_ms()):
                    shown = node.replica.rows(
                        "select 1 from names_rows where worker = ? and id = ? and stamp = ?",
                        (version.owner, change.key, change.values["stamp"]),
                    )
                    if shown:
                        raise Wrong(f"{node.name}: took the stamp of {change}, which is too far ahead")

    def _check_win(self, node: Node, version: Version) -> None:
        """A merged row that was written here wins over all that was known here."""
        for change in version.changes:
            if change.table != "names" or change.values is None:
                continue
            if hlc.ahead(change.values["stamp"], node.host.now_ms()):
                continue
            shown = node.replica.rows("select stamp from names where id = ?", (change.key,))
            wanted = [] if change.values.get("deleted") else [(change.values["stamp"],)]
            if shown != wanted:
                raise Wrong(f"{node.name}: wrote {change} and reads {shown}")

    def _note_aside(self, node: Node, versions: Iterable[Version]) -> None:
        for version in versions:
            for change in version.changes:
                if change.table == "things" and change.values:
                    before = self.truth.states[version.log].get(Position(version.epoch, version.number - 1), {})
                    _, was = before.get(("things", change.key), (0, None))
                    if change.values["color"] == 3:
                        self.paths["a row was put in quarantine"] += 1
                    elif was and was["color"] == 3:
                        self.paths["a row in quarantine was replaced by a good one"] += 1
                if change.table == "extras" and change.values and node.old:
                    self.paths["a row of an unknown table was kept"] += 1

    def finish(self) -> Report:
        self.report.faults = {name: self.faults[name] for name in FAULTS}
        self.report.paths = {name: self.paths[name] for name in PATHS}
        self.report.digest = self.trace.hexdigest()
        for node in self.nodes.values():
            if node.up:
                node.kill()
            node.close_disks()
        return self.report
