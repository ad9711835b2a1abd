"""Packets and bodies that nobody should send, thrown at a real member of the catalog.

Half of them are noise or broken on their way; the others were sealed with the cluster's key, so they reach the
decoders: noise, valid messages with bytes changed, cut off or repeated, and messages that read well and say nonsense.
Afterwards the member must work, and its replica must hold nothing but what its owner said.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from hawker.catalog.base import Site
from hawker.catalog.gossip import rumours
from hawker.catalog.gossip.exchange import Sealed
from hawker.catalog.gossip.joining import Join, JoinAsk
from hawker.catalog.gossip.membership import KIND as SWIM
from hawker.catalog.gossip.membership import ExchangeMembers
from hawker.catalog.gossip.node import Node
from hawker.catalog.gossip.packets import UNREADABLE, Sealer
from hawker.catalog.gossip.replication import CompareDigests, DigestAsk, FetchAsk, FetchLogs
from hawker.catalog.gossip.rumours import KIND
from hawker.client.wire import PeerUnreachable
from hawker.core.swim.members import Member, Status
from hawker.core.swim.settings import LAN
from hawker.core.swim.swim import Swim
from hawker.host import Host
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.server import serve
from hawker.model.catalog import Change, LogId, Numbered, Origin, Position, Range, Version
from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process
from hawker.sim.platform.record import Record
from hawker.telemetry import Metrics

CLUSTER, TOKEN, PORT = "fuzz", "token", 4281
HONEST = LogId("ord-2", "region")
POISONER = LogId("ord-5", "region")
EPOCH = 7


ODD: tuple[Any, ...] = (
    *(None, -1, 0, 2**63 - 1, 2**63, 2**64 - 1, 1.5, float("nan"), True, "", "x" * 5000, "\0", b"\xff", [], {}),
    [[[[]]]],
    {"a": {"b": [1]}},
)


class Report(msgspec.Struct):
    """`sent` by kind; `refused`: what the member counted, by why; `wrong`: every promise that was broken."""

    sent: dict[str, int]
    refused: dict[str, int]
    wrong: list[str]


class _Stranger:
    """Makes the messages. `rng` decides about everything."""

    def __init__(self, rng: Random, source: tuple[str, int]) -> None:
        self._rng = rng
        self._source = source
        self._sealer = Sealer(CLUSTER, ("secret",), rng)
        self._wrong_key = Sealer(CLUSTER, ("another",), rng)
        self._wrong_cluster = Sealer("another", ("secret",), rng)
        self._swim = Swim(Member("ord-3", 1, *source, "ord"), LAN, rng)
        self._swim.start(0.0)
        self._number = 0
        self._poisoned = 1

    def datagram(self) -> tuple[str, bytes]:
        rng = self._rng
        kind = rng.choice(("noise", "broken", "strange", "sealed noise", "swim", "news", "nonsense", "poison"))
        match kind:
            case "noise":
                return kind, rng.randbytes(rng.randrange(1300))
            case "broken":
                return kind, self._mutated(self._sealer.seal(self._news()))
            case "strange":
                return kind, rng.choice((self._wrong_key, self._wrong_cluster)).seal(self._news())
            case "sealed noise":
                return kind, self._sealer.seal(rng.choice((SWIM, KIND, b"x", b"")) + rng.randbytes(rng.randrange(200)))
            case "swim":
                return kind, self._sealer.seal(SWIM + self._mutated(self._membership()))
            case "news":
                return kind, self._sealer.seal(KIND + self._mutated(self._news()[1:]))
            case "poison":
                poison = self._poison()
                self._poisoned += _reads(poison)
                return kind, self._sealer.seal(KIND + poison)
            case _:
                return kind, self._sealer.seal(KIND + _encode([self._nonsense() for _ in range(rng.randrange(1, 4))]))

    def body(self) -> tuple[type[Sealed[Any]], bytes]:
        """A call and what is posted with it, before sealing."""
        rng = self._rng
        valid: dict[type[Sealed[Any]], Any] = {
            CompareDigests: DigestAsk("region", rng.randbytes(rng.choice((0, 10, 2048)))),
            FetchLogs: FetchAsk(((HONEST, Position(rng.choice((0, EPOCH)), rng.randrange(5))),)),
            Join: JoinAsk("ord", self._swim.me, 0),
            ExchangeMembers: rng.randbytes(30),
        }
        call = rng.choice(list(valid))
        whole = _encode(valid[call])
        return call, rng.choice((whole, self._mutated(whole), rng.randbytes(rng.randrange(100))))

    def _poison(self) -> bytes:
        """A version in its place whose row makes no sense."""
        rng = self._rng
        values = {rng.choice(("state", "generation", "app", "x", "_owner")): rng.choice(ODD)}
        key = rng.choice(("k", "", "x" * 300, "\0", "d8d7c6b5a49382"))
        table = rng.choice(("machines", "machines", "workers", "sqlite_master", "_log", "", "x"))
        return _encode([[*POISONER, EPOCH, self._poisoned + 1, [[table, key, values]], 0]])

    def honest(self) -> Version:
        """The next version of the one owner that says nothing wrong."""
        self._number += 1
        row = Change("machines", "d8d7c6b5a49382", {"app": "web", "state": "started", "generation": self._number})
        return Version(HONEST.owner, HONEST.tier, EPOCH, self._number, (row,))

    def sealed(self, payload: bytes) -> bytes:
        return self._sealer.seal(payload)

    def _news(self) -> bytes:
        return KIND + _encode([Version("ord-4", "region", 3, self._rng.randrange(1, 9), (_machine("a"),))])

    def _nonsense(self) -> Any:
        rng = self._rng
        values: Any = rng.choice((None, {}, {"app": rng.choice(ODD)}, {rng.choice(("state", "x", "_owner")): 2**63}))
        table = rng.choice(("machines", "workers", "sqlite_master", "_log", "", "x"))
        change = (table, rng.choice(("k", *ODD)), values)
        return [
            rng.choice(("ord-4", "ord-1", "", "x" * 300, 5)),
            rng.choice(("region", "global", "region", "nowhere")),
            rng.choice((0, 3, 3, 2**62, -1)),
            rng.choice((1, 2, 2**62, -5, "x")),
            rng.choice(([change], [change, change], [], None)),
            rng.choice((0, 1, 2**62)),
        ]

    def _membership(self) -> bytes:
        swim = self._swim
        now = self._rng.random() * 1000
        swim.join(now, [(Member(f"ghost-{self._rng.randrange(9)}", 1, *self._source, "ord"), 0, Status.alive)])
        swim.tick(swim.due())
        sends = [action.payload for action in swim.take() if hasattr(action, "payload")]
        return self._rng.choice(sends) if sends else b"\x90"

    def _mutated(self, whole: bytes) -> bytes:
        rng = self._rng
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            match rng.randrange(4):
                case 0 if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                case 1:
                    del changed[rng.randrange(len(changed) + 1) :]
                case 2:
                    changed[rng.randrange(len(changed) + 1) : 0] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    changed += changed[: rng.randrange(len(changed) + 1)]
        return bytes(changed[:1200])


async def throw(loop: SimLoop, count: int, seed: int, directory: Path) -> Report:
    """`count` datagrams and a tenth as many bodies, with an honest owner's versions in between."""
    rng = Random(seed)
    net = Net(loop, Record(loop.time), str(seed), ["ord"])
    victim, attacker = net.station("ord-1", "ord"), net.station("ord-3", "ord")
    metrics = Metrics()
    members: list[Node] = []

    async def live() -> None:
        host = Host(lambda: 1_700_000_000 + loop.time(), Random(seed))
        site = Site(
            name="ord-1",
            region="ord",
            host=victim.address,
            port=PORT,
            bind=victim.address,
            cluster=CLUSTER,
            secrets=("secret",),
            token=TOKEN,
            path=directory / "catalog.db",
            machine=host,
            metrics=metrics,
        )
        node = Node(site)
        serving = Serving(host, Tokens({TOKEN: AGENT}), metrics, "ord")
        await serve(serving.app(node.routes()), (victim.address, PORT), host)
        await node.open()
        members.append(node)

    await loop.run_in(Process("ord-1", victim), live())
    node = members[0]
    stranger = _Stranger(rng, (attacker.address, PORT))
    sent: Counter[str] = Counter()
    wrong: list[str] = []

    async def attack() -> None:
        [row] = stranger.honest().changes
        rows = (Numbered(1, row.table, row.key, row.values),)
        node.replica.merge([Range(Origin(*log, EPOCH, 1), 0, rows, True) for log in (HONEST, POISONER)])
        honest = stranger.honest()
        for n in range(count):
            kind, message = stranger.datagram()
            sent[kind] += 1
            node.received((attacker.address, PORT), message)
            if n % 10 == 0:
                call, body = stranger.body()
                sent[f"body to {call.op.path}"] += 1
                try:
                    await node.exchange.ask_bytes((victim.address, PORT), call, body)
                except PeerUnreachable as error:
                    if "status 400" not in str(error):
                        wrong.append(f"{call.op.path}: {error}")
            if n % 100 == 0:
                node.received((attacker.address, PORT), stranger.sealed(KIND + _encode([honest])))
                node.replication.take()
                if node.replica.position(HONEST) != honest.position:
                    wrong.append(f"after {n}: the honest owner stands at {node.replica.position(HONEST)}")
                honest = stranger.honest()

    await loop.run_in(Process("attack", victim), attack())
    await asyncio.sleep(60)  # whatever was set off by it
    wrong += [f"unhandled: {each.message} {each.error!r}" for each in loop.unhandled]
    wrong += _check_rows(node)
    if node.replica.waiting > 8192:
        wrong.append(f"{node.replica.waiting} versions wait")
    sent["rows put aside"] = node.replica.rows("select count(*) from quarantine")[0][0]
    sent["versions of the poisoner applied"] = node.replica.position(POISONER).head
    refused = {
        sample.labels["why"]: int(sample.value)
        for family in metrics.catalog_refused.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    return Report(dict(sent), refused, wrong)


def _check_rows(node: Node) -> list[str]:
    """What readers see is valid: types, lengths, and owners that there could be."""
    wrong = []
    for table in ("workers", "machines", "apps", "capacity", "app_regions"):
        for row in node.replica.rows(f"select * from {table}"):
            if any(isinstance(value, bytes) or (isinstance(value, str) and len(value) > 4096) for value in row):
                wrong.append(f"{table} shows {row}")
    for owner, tier in node.replica.rows("select owner, tier from _log"):
        if not 0 < len(owner) <= 256 or tier not in ("region", "global"):
            wrong.append(f"a log of {owner!r}, {tier!r}")
    found = node.replica.rows("select generation from machines where id = 'd8d7c6b5a49382' and worker = ?", ("ord-2",))
    at = node.replica.position(HONEST).head
    if [generation for (generation,) in found] != [at]:
        wrong.append(f"the honest owner's row shows {found} at {at}")
    return wrong


def _reads(payload: bytes) -> bool:
    try:
        rumours.read(payload)
    except UNREADABLE:
        return False
    return True


def _machine(key: str) -> Change:
    return Change("machines", key, {"app": "web", "state": "started"})


_encode = msgspec.msgpack.Encoder().encode
