"""Poison: whatever comes from the wire, the replica does not raise, takes nothing that is not valid, and goes on.

`python -m bench.poison` does the same with a million rows.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from bench.poison import NOW_MS, Poisoner, decoded, faults, feed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.catalog.versions import Clock
from tests.kit.tiers import costly

from hawker.catalog.gossip.replica import Replica
from hawker.core.ownerlog import HELD_MS
from hawker.model.catalog import Change, LogId, Origin, Range, Version


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.ms = NOW_MS  # that of the stamps here
    return clock


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_thousands_of_rows_of_which_many_make_no_sense(replica: Replica, clock: Clock, seed: int) -> None:
    seen = feed(replica, Poisoner(seed, replica), 6_000)
    assert seen["messages that do not read"] > 500
    assert seen["rows put aside"] > 500
    assert seen["messages refused"] > 0
    assert seen["versions applied"] > 500
    assert seen["ranges merged"] > 100
    clock.ms += HELD_MS
    replica.recheck()
    assert replica.waiting == 0
    assert faults(replica) == []


def test_a_row_that_slipped_in_would_be_found(replica: Replica) -> None:
    feed(replica, Poisoner(3, replica), 300)
    owner = replica.rows("select owner from _log where tier = 'region' limit 1")[0][0]
    replica._db.execute(
        "insert into services_of (_owner, id, _number, _deleted, ports) values (?, 's', 1, 0, '[1,')", [owner]
    )
    replica._db.execute(
        "insert into machines_of (_owner, id, _number, _deleted, app) values (?, '', ?, 0, 'x')", [owner, 1 << 40]
    )
    assert len(faults(replica)) == 4  # two rows, a number, a column


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
ANY = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
NAMES = st.sampled_from(["app", "cpus", "cordoned", "ports", "stamp", "newer"]) | st.text(max_size=8)
TABLE_NAMES = st.sampled_from(["machines", "services", "capacity", "apps", "nix"]) | st.text(max_size=8)
ROWS = st.tuples(TABLE_NAMES, st.text(max_size=8), st.none() | st.dictionaries(NAMES, ANY, max_size=6))


@given(rows=st.lists(ROWS, max_size=8))
@settings(max_examples=costly(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_rows_of_any_type_are_taken_or_put_aside_and_passed_on_as_they_came(
    replica: Replica, rows: list[tuple[str, str, dict[str, Any] | None]]
) -> None:
    log = LogId("a", "region")
    at = replica.position(log)
    if not at.epoch:
        replica.merge([Range(Origin("a", "region", 7, 0), 0, (), True)])
    number = at.head + 1
    version = Version("a", "region", 7, number, (*(Change(*row) for row in rows), Change("machines", "last", {})))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(version), type=Version)
    assert replica.receive([sent]).applied == [sent]
    kept = {(row.table, row.key): row.values for row in replica.log_rows(log, number - 1)}
    wanted = {(change.table, change.key): change.values for change in sent.changes if change.table != "_floor"}
    assert {name: _plain(values) for name, values in kept.items()} == {
        name: _plain(values) for name, values in wanted.items()
    }


def _plain(values: dict[str, Any] | None) -> str:
    """Comparable, NaN included: None is the same as a column that is missing."""
    if values is None:
        return repr(None)
    return repr(sorted((name, value) for name, value in values.items() if value is not None))


def nested(depth: int) -> bytes:
    """A version with a row that has a list in a list and so on, so many times."""
    return b"\x96\xa1a\xa6region\x07\x01\x91\x93\xa8machines\xa1m\x81\xa5newer" + b"\x91" * depth + b"\xc0\x00"


def test_values_nested_as_deep_as_can_be_read_are_put_aside(replica: Replica) -> None:
    deepest = max(depth for depth in range(1500) if decoded(nested(depth), is_range=False))
    assert decoded(nested(100_000), is_range=False) is None
    for depth in (100, *range(deepest - 40, deepest + 1)):
        replica.merge([Range(Origin("a", "region", 1000 + depth, 0), 0, (), True)])
        message = nested(depth).replace(b"region\x07", b"region" + msgspec.msgpack.encode(1000 + depth))
        version = decoded(message, is_range=False)
        if isinstance(version, Version):
            assert replica.receive([version]).put_aside == 1
            assert len(replica.log_rows(LogId("a", "region"))) == 1
