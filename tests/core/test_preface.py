"""The PROXY protocol as HAProxy's specification has it."""

from __future__ import annotations

import struct
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.preface import SIGNATURE, BadPreface, Way, read_preface, write_preface

FOUR = Way(("203.0.113.7", 4711), ("192.0.2.1", 443))
SIX = Way(("2001:db8::7", 4711), ("2001:db8::1", 443))
LONGEST = b"PROXY UNKNOWN" + b" ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff" * 2 + b" 65535 65535\r\n"


def version_2(begun: int, family: int, rest: bytes) -> bytes:
    return SIGNATURE + struct.pack("!BBH", begun, family, len(rest)) + rest


@pytest.mark.parametrize("way", [FOUR, SIX])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_what_one_proxy_writes_another_reads_however_it_is_cut(version: Literal["v1", "v2"], way: Way) -> None:
    data = write_preface(version, way)
    for cut in range(1, len(data)):
        assert read_preface(data[:cut]) is None
    assert read_preface(data + b"GET / HTTP/1.1") == (way, len(data))


def test_addresses_of_two_families_are_told_in_the_larger() -> None:
    mixed = Way(SIX.source, FOUR.target)
    assert read_preface(write_preface("v2", mixed)) == (Way(SIX.source, ("::ffff:c000:201", 443)), 52)
    mapped = Way(("::ffff:203.0.113.7", 4711), ("::ffff:192.0.2.1", 443))
    assert write_preface("v1", mapped) == b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 443\r\n"


@pytest.mark.parametrize(
    "data",
    [b"PROXY UNKNOWN\r\n", LONGEST, version_2(0x20, 0, b""), version_2(0x21, 0, b"x" * 12), version_2(0x21, 0x31, b"")],
)
def test_a_load_balancer_may_come_for_itself(data: bytes) -> None:
    assert read_preface(data) == (None, len(data))


def test_what_follows_the_addresses_is_skipped() -> None:
    data = write_preface("v2", FOUR)
    more = version_2(0x21, 0x11, data[16:] + b"\x04\x00\x01x")
    assert read_preface(more + b"rest") == (FOUR, len(more))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"PROXY TCP4 203.0.113.7\r\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 4711\r\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 65536\r\n",
        b"PROXY TCP4 203.0.113.7 192.0.2.1 -1 443\r\n",
        b"PROXY TCP4 2001:db8::7 2001:db8::1 4711 443\r\n",
        b"PROXY TCP4 nobody 192.0.2.1 4711 443\r\n",
        b"PROXY UNIX a b 1 2\r\n",
        b"PROXY TCP4 " + b"1" * 107,
        version_2(0x11, 0x11, b"x" * 12),
        version_2(0x21, 0x11, b"x" * 8),
        SIGNATURE + b"\x21\x11\xff\xff",
    ],
)
def test_what_is_not_as_it_must_be_is_refused(data: bytes) -> None:
    with pytest.raises(BadPreface):
        read_preface(data)


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda rest: SIGNATURE + rest)))
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    try:
        found = read_preface(data or b"P")
    except BadPreface:
        return
    assert found is None or 0 < found[1] <= len(data)
