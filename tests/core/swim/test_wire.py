"""Packets: what goes into one, and what may come in."""

from __future__ import annotations

import contextlib
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.swim.group import known, member

from hawker.core.swim import LAN, PAYLOAD_MAX, Known, Member, Send, Status, Swim, View
from hawker.core.swim.wire import NOTE_MAX, Alive, Dead, Gossip, Ping, PingFor, Rumour, decode_packet, encode

SOURCE = ("a.sim", 7946)


def node(me: Member | None = None, table: Known | None = None) -> Swim:
    swim = Swim(me or member("me"), LAN, Random(1), known=table or known("me", "a", "b"))
    swim.start(0.0)
    return swim


def sent(swim: Swim) -> list[bytes]:
    return [action.payload for action in swim.take() if isinstance(action, Send)]


NAME = st.text(min_size=1, max_size=8)
RUMOURS = st.lists(
    st.builds(Alive, st.builds(member, NAME, st.integers(0, 2**53)), st.integers(0, 2**48))
    | st.builds(Dead, NAME, st.integers(0, 2**53), st.integers(0, 2**48), NAME),
    max_size=5,
)
PACKETS = st.builds(Gossip, NAME, st.integers(0, 9), st.binary(max_size=NOTE_MAX), RUMOURS) | st.builds(
    Ping, NAME, st.integers(0, 9), st.binary(max_size=NOTE_MAX), RUMOURS, st.integers(0, 2**32 - 1), NAME
)


@given(PACKETS)
def test_a_packet_comes_out_as_it_went_in(packet: Ping | Gossip) -> None:
    assert decode_packet(encode(packet)) == (packet, 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_put_aside_or_understood(payload: bytes) -> None:
    swim = node()
    swim.on_packet(1.0, SOURCE, payload)
    with contextlib.suppress(ValueError):
        swim.push_pull_answer(1.0, payload)
    with contextlib.suppress(ValueError):
        swim.push_pull_done(1.0, payload)


@given(PACKETS, st.data())
def test_damaged_packets_are_put_aside_or_understood(packet: Ping | Gossip, data: st.DataObject) -> None:
    payload = bytearray(encode(packet))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    swim = node()
    swim.on_packet(1.0, SOURCE, bytes(payload))
    swim.on_packet(1.0, SOURCE, bytes(payload[:cut]))
    assert swim.members["me"].status is Status.alive


def test_what_is_no_packet_is_counted() -> None:
    swim = node()
    for payload in (b"", b"\xc1", b"\x91" * 5_000, encode((9, "a", 1, b"", [])), encode((0, "", 1, b"", []))):
        swim.on_packet(1.0, SOURCE, payload)
    assert swim.counts.malformed == 5
    assert swim.take() == []


def test_a_rumour_of_unknown_form_does_not_keep_the_others_from_being_heard() -> None:
    swim = node()
    rumours = [(7, "of the future"), Alive(member("new"), 0), (1, "broken"), (2, "", 0, 0, "a")]
    swim.on_packet(1.0, SOURCE, encode((0, "a", 1_000, b"", rumours)))
    assert "new" in swim.members
    assert (swim.counts.malformed, swim.counts.strange) == (0, 3)


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    swim = node()
    told = [(*msgspec.to_builtins(Alive(member("new"), 3)), "more")]
    swim.on_packet(1.0, SOURCE, encode((1, "a", 1_000, b"", told, 5, "me", "more", {"and": "more"})))
    assert swim.members["new"].incarnation == 3
    assert len(sent(swim)) == 1


def test_no_packet_is_longer_than_a_payload_may_be_and_a_full_queue_fills_it() -> None:
    long = [Member(f"{n:063}", 2**53, "h" * 150, 65_535, "r" * 63, ("role",), "", 65_535) for n in range(50)]
    swim = node(long[0], Known(View(one, Status.alive, 2**48 - 1) for one in long[:40]))
    swim.set_note(b"n" * NOTE_MAX)
    for one in long[1:]:
        swim.beliefs.alive(1.0, one, 2**48)
    for one in long[1:5]:
        swim.beliefs.suspect(1.0, one.name, one.born, 2**48, long[9].name)
    now, sizes = 1.0, []
    for _ in range(300):
        now = max(now, swim.due())
        swim.tick(now)
        ask = PingFor(long[3].name, 2**53, b"", [], 2**32 - 1, long[7].name, "h" * 150, 65_535)
        swim.on_packet(now, long[3].address, encode(ask))
        swim.on_packet(now, long[3].address, encode(Ping(long[3].name, 2**53, b"", [], 2**32 - 1, long[0].name)))
        sizes += [len(payload) for payload in sent(swim)]
    assert PAYLOAD_MAX - 330 < max(sizes) <= PAYLOAD_MAX


@pytest.mark.parametrize(
    "me",
    [
        Member("", 1, "h", 1),
        Member("n" * 64, 1, "h", 1),
        Member("n", -1, "h", 1),
        Member("n", 1, "", 1),
        Member("n", 1, "h", 65_536),
        Member("n", 1, "h", 1, meta="m" * 129),
        Member("n", 1, "h" * 250, 1, meta="m" * 128, region="ä" * 63),
    ],
)
def test_a_member_that_others_would_not_accept_cannot_begin(me: Member) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # msgspec says what is wrong
        Swim(me, LAN, Random(1))


def test_a_note_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="41 bytes: at most 40"):
        node().set_note(b"n" * 41)


def test_kinds_of_rumours_are_told_apart() -> None:
    rumour = msgspec.msgpack.decode(encode(Dead("x", 1, 2, "x")), type=Rumour)
    assert rumour == Dead("x", 1, 2, "x")
