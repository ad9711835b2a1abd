"""Records of the log and their checksums."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hawker.store import log

values = st.text(max_size=6) | st.binary(max_size=6) | st.integers(-(2**63), 2**63 - 1)
columns = st.lists(values, min_size=1, max_size=6).map(tuple)


def fields(columns: tuple[Any, ...]) -> tuple[bytes, ...]:
    return tuple(value if isinstance(value, bytes) else str(value).encode() for value in columns)


@given(columns, columns)
@example(("ab", "c"), ("a", "bc"))
@example(("", "a"), ("a", ""))
@example(("a",), ("a", ""))
@example(("1:a",), ("", "a"))
@example(("1", "1:a"), ("11:a", ""))
def test_equal_checksums_mean_equal_fields(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    same = log.checksum(log.GENESIS, one) == log.checksum(log.GENESIS, other)
    assert same == (fields(one) == fields(other))


@given(st.lists(st.text("1:a", max_size=4), min_size=2, max_size=4), st.data())
def test_moving_a_boundary_between_fields_changes_the_checksum(parts: list[str], data: st.DataObject) -> None:
    """The bytes of all fields together stay as they are; only where one ends and the next begins is another."""
    whole = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=len(parts) - 1, max_size=len(parts) - 1)))
    others = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    same = log.checksum(log.GENESIS, tuple(parts)) == log.checksum(log.GENESIS, tuple(others))
    assert same == (parts == others)


def test_a_checksum_covers_the_one_before_it() -> None:
    assert log.checksum(log.GENESIS, ("a",)) != log.checksum(b"\1" * log.CHECKSUM_BYTES, ("a",))
    assert len(log.checksum(log.GENESIS, ("a",))) == log.CHECKSUM_BYTES


def test_text_and_its_bytes_have_the_same_checksum() -> None:
    assert log.checksum(log.GENESIS, (1, "ä")) == log.checksum(log.GENESIS, (1, "ä".encode()))


@given(st.text(), st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_row_images_survive_being_written_and_read(key: str, row: dict[str, str] | None) -> None:
    body = None if row is None else msgspec.json.encode(row)
    image = log.write_image("lease", key, body)
    assert log.read_images(b"[" + image + b"," + image + b"]") == [("lease", key, body)] * 2


def test_a_record_writes_its_columns_in_their_order() -> None:
    record = log.Record(kind="k", resource="r", cause="c", flow="f", run="u", step="s", attempt=3, data={"a": 1})
    record.writes.append(log.write_image("lease", "m", None))
    values = record.values(7, 99, log.GENESIS)
    named = dict(zip(log.COLUMNS.split(", "), values, strict=True))
    assert named.pop("checksum") == log.checksum(log.GENESIS, values[:-1])
    assert named == {
        "seq": 7,
        "at_ms": 99,
        "kind": "k",
        "resource": "r",
        "flow": "f",
        "run": "u",
        "step": "s",
        "attempt": 3,
        "cause": "c",
        "trace": "",
        "data": '{"a":1}',
        "writes": b'[["lease","m",null]]',
    }


def test_records_do_not_share_their_writes() -> None:
    one, other = (log.Record(kind="k", resource="r", cause="c") for _ in range(2))
    one.writes.append(b"x")
    assert other.writes == []


def test_a_record_without_a_cause_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="log: k of r without a cause"):
        log.Record(kind="k", resource="r", cause="").values(1, 1, log.GENESIS)
