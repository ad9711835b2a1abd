"""Poison for the catalog: a million rows of which many make no sense, into one replica.

    python -m bench.poison [--quick] [--rows 1000000] [--seed 1]

Valid versions and ranges, rows of random types, and messages with bytes changed, put in or left out, all as they would
be decoded from the wire. It ends with an error when the replica raises, when a row that its table's checks refuse is in
a table, when a view does not read, or when the logs do not go on afterwards as if nothing had been.
`tests/catalog/test_poison.py` runs some thousands.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from bench.command import Table as Rows
from bench.command import options, told
from hawker.catalog.gossip.replica import Replica
from hawker.catalog.tables.layout import Layout
from hawker.catalog.tables.schema import TABLES, Table
from hawker.core import hlc, ownerlog
from hawker.host import Host
from hawker.model.catalog import Change, LogId, Numbered, Origin, Range, Tier, Values, Version

NOW_MS = 1_763_000_000_000
OWNERS = tuple(f"worker-{n}" for n in range(8))
Message = Version | Range
_encode = msgspec.msgpack.Encoder().encode
_decode_version = msgspec.msgpack.Decoder(Version).decode
_decode_range = msgspec.msgpack.Decoder(Range).decode

_NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
    0.0,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "web",
    "\0",
    "'; drop table machines_of; --",
    "\U0010ffff",
    "x" * 4096,
    "x" * 4097,
    b"",
    b"\xff\x00",
    [],
    {},
    [[[[]]]],
    {"a": {"b": None}},
    "[]",
    "{}",
    "[1,",
    "[" * 300 + "]" * 300,
    '{"a": "' + "x" * 300 + '"}',
    msgspec.msgpack.Ext(5, b"ext"),
)


class Poisoner:
    """Messages as bytes, drawn from a seed. `next_number` gives where a log goes on."""

    def __init__(self, seed: int, replica: Replica) -> None:
        self.rng = random.Random(seed)
        self._replica = replica
        self._layouts = [Layout(table) for table in TABLES]

    def draw(self) -> tuple[bytes, bool]:
        """A message, and whether it is a range."""
        is_range = self.rng.random() < 0.1
        message = _encode(self._range() if is_range else self._version())
        return (self._mutated(message) if self.rng.random() < 0.3 else message), is_range

    def _log(self) -> tuple[LogId, Origin]:
        tier: Tier = self.rng.choice(("region", "global"))
        log = LogId(self.rng.choice(OWNERS), tier)
        return log, self._replica.origin(log) or Origin(*log, 1 << 40, 0)

    def _version(self) -> Version:
        log, at = self._log()
        ahead = self.rng.choice((1, 1, 1, 1, 1, 1, 2, 5, 0))
        changes = tuple(Change(*self._row(log.tier)) for _ in range(self.rng.randrange(1, 4)))
        floor = self.rng.choice((max(0, at.head - 50), 1 << 41)) if self.rng.random() < 0.05 else 0
        return Version(log.owner, log.tier, at.epoch, max(1, at.head + ahead), changes, floor)

    def _range(self) -> Range:
        log, at = self._log()
        snapshot = not at.head or self.rng.random() < 0.2
        epoch = at.epoch + (self.rng.randrange(1, 1 << 30) if snapshot else 0)
        head = at.head + self.rng.randrange(1, 6)
        low = 0 if snapshot else at.head
        rows = tuple(
            Numbered(self.rng.randrange(low + 1, head + 1), *self._row(log.tier)) for _ in range(self.rng.randrange(8))
        )
        return Range(Origin(log.owner, log.tier, epoch, head), low, rows, snapshot)

    def _row(self, tier: Tier) -> tuple[str, str, Values | None]:
        rng = self.rng
        layout = rng.choice([each for each in self._layouts if each.tier == tier or rng.random() < 0.05])
        key = rng.choice(("", "k" * 257, "a\0b")) if rng.random() < 0.02 else f"k{rng.randrange(2000)}"
        if rng.random() < 0.1:
            return layout.name, key, None
        values: Values = {name: self._good(layout.table, name) for name in layout.names if rng.random() < 0.8}
        if rng.random() < 0.4:
            for _ in range(rng.randrange(1, 4)):
                name = rng.choice((*layout.names, "newer", "_owner", "x" * 300, "a\0b"))
                values[name] = rng.choice(_NASTY)
        name = rng.choice(("", "nix", "machines_of", "_aside", "x" * 300)) if rng.random() < 0.03 else layout.name
        return name, key, values

    def _good(self, table: Table, name: str) -> Any:
        hint = str(table.columns.__annotations__[name])
        if name == "stamp":
            return hlc.stamp(NOW_MS + self.rng.choice((-5_000, 0, 400, 5_000)))
        if "Text" in hint:
            return self.rng.choice(("web", "ord", ""))
        if "Flag" in hint:
            return self.rng.random() < 0.5
        if "Json" in hint:
            return "[]" if "List" in hint else "{}"
        return self.rng.randrange(1 << 20)

    def _mutated(self, message: bytes) -> bytes:
        rng, raw = self.rng, bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw)) if raw else 0
            match rng.randrange(4):
                case 0 if raw:
                    raw[at] ^= 1 << rng.randrange(8)
                case 1 if raw:
                    raw[at] = rng.randrange(256)
                case 2:
                    raw[at:at] = rng.randbytes(rng.randrange(1, 5))
                case _:
                    del raw[at : at + rng.randrange(1, 5)]
        return bytes(raw)


def decoded(message: bytes, is_range: bool) -> Message | None:
    """What the wire would hand on. None: it does not read, and goes no further."""
    try:
        return _decode_range(message) if is_range else _decode_version(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def feed(replica: Replica, poisoner: Poisoner, rows: int) -> Counter[str]:
    """Messages with so many rows, in batches as they would arrive. Counts what became of them."""
    seen: Counter[str] = Counter()
    while seen["rows"] < rows:
        versions: list[Version] = []
        ranges: list[Range] = []
        for _ in range(poisoner.rng.randrange(1, 20)):
            message, is_range = poisoner.draw()
            seen["messages"] += 1
            match decoded(message, is_range):
                case None:
                    seen["messages that do not read"] += 1
                case Range() as given:
                    seen["rows"] += len(given.rows)
                    ranges.append(given)
                case Version() as version:
                    seen["rows"] += len(version.changes)
                    versions.append(version)
        for outcome in (replica.receive(versions), replica.merge(ranges)):
            seen["versions applied"] += len(outcome.applied)
            seen["ranges merged"] += len(outcome.merged)
            seen["rows put aside"] += outcome.put_aside
            seen["messages refused"] += outcome.refused
        if poisoner.rng.random() < 0.01:
            replica.recheck()
    return seen


def faults(replica: Replica) -> list[str]:
    """Rows in tables that should not be there, views that do not read, logs that do not go on."""
    found: list[str] = []
    for table in TABLES:
        layout = Layout(table)
        for owner in sorted({owner for (owner,) in replica.rows(f"select _owner from {layout.physical}")}):
            head = replica.position(LogId(owner, table.tier)).head
            for key, number, deleted, extra, *columns in replica.rows(layout.read, (owner,)):
                try:
                    if deleted:
                        layout.tombstone(owner, number, key)
                    else:
                        row = layout.row(owner, number, key, layout.values(extra, columns))
                        if row[5:] != tuple(columns):
                            found.append(f"{table.name}: {owner}/{key} reads differently than it is stored")
                except Exception as error:
                    found.append(f"{table.name}: {owner}/{key} is not valid: {error}")
                if not 0 < number <= head:
                    found.append(f"{table.name}: {owner}/{key} has number {number} above its log's {head}")
    for (view,) in replica.rows("select name from sqlite_schema where type = 'view' order by name"):
        replica.rows(f'select * from "{view}"')
    bad = replica.rows("select count(*) from services where not json_valid(ports) or not json_valid(concurrency)")
    if bad != [(0,)]:
        found.append("services: a column is not JSON")
    if replica.rows("pragma integrity_check") != [("ok",)]:
        found.append("SQLite finds the file damaged")
    return found + _stuck(replica)


def _stuck(replica: Replica) -> list[str]:
    """Every log's owner comes with an epoch above what was said of it, and what it has: is that shown, and all gone
    that waited?"""
    found: list[str] = []
    tables: tuple[tuple[Tier, str, str], ...] = (("region", "machines", "app"), ("global", "workers", "region"))
    for tier, table, column in tables:
        for owner, origin in sorted(replica.origins(tier).items()):
            epoch = ownerlog.next_epoch(0, origin.epoch, 0, 0)
            row = Numbered(1, table, owner[:256], {column: "good"})
            replica.merge([Range(Origin(owner, tier, epoch, 1), 0, (row,), True)])
            version = Version(owner, tier, epoch, 2, (Change(table, "last", {column: "good"}),))
            replica.receive([version])
            if replica.position(LogId(owner, tier)) != version.position:
                found.append(f"{owner}/{tier}: does not go on")
            elif [each.key for each in replica.log_rows(LogId(owner, tier))] != [row.key, "last"]:
                found.append(f"{owner}/{tier}: shows something else than its owner has")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    rng = random.Random(given.seed)
    told_rows = Rows()
    with tempfile.TemporaryDirectory() as directory:
        clock = [NOW_MS]
        replica = Replica.open(Path(directory) / "catalog.db", Host(lambda: clock[0] / 1000, rng))
        began = perf_counter()
        seen = feed(replica, Poisoner(given.seed, replica), 2_000 if given.quick else given.rows)
        seen["versions that still wait"] = replica.waiting
        took = perf_counter() - began
        clock[0] += ownerlog.HELD_MS
        replica.recheck()
        seen["versions that still wait after a while"] = replica.waiting
        for name, count in seen.items():
            told_rows.add(name, count, "")
        told_rows.add("rows a second", seen["rows"] / took, "1/s")
        found = faults(replica)
        replica.close()
    told_rows.add("faults", len(found), "", "0")
    for fault in found[:20]:
        print(fault, file=sys.stderr)
    told(told_rows, given)
    return 1 if found or seen["versions that still wait after a while"] else 0


if __name__ == "__main__":
    sys.exit(main())
