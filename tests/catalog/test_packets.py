"""Sealed messages: who opens them, who does not, and how keys are changed without a gap."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.catalog.gossip.packets import PACKET_MAX, PAYLOAD_MAX, SEAL_BYTES, NotOurs, Sealer


def sealer(*secrets: str, cluster: str = "fleet", seed: int = 1) -> Sealer:
    return Sealer(cluster, secrets, Random(seed))


@given(payload=st.binary(max_size=PAYLOAD_MAX))
def test_what_one_member_seals_another_opens_and_a_full_packet_passes_everywhere(payload: bytes) -> None:
    message = sealer("secret").seal(payload)
    assert len(message) == len(payload) + SEAL_BYTES <= PACKET_MAX
    assert sealer("secret", seed=2).open(message) == payload


def test_a_payload_cannot_be_read_in_its_message() -> None:
    message = sealer("secret").seal(b"machines")
    assert b"machines" not in message
    assert sealer("secret", seed=2).seal(b"machines") != message


@given(data=st.data(), payload=st.binary(max_size=200))
def test_a_message_changed_anywhere_does_not_open(data: st.DataObject, payload: bytes) -> None:
    message = bytearray(sealer("secret").seal(payload))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(NotOurs):
        sealer("secret").open(bytes(message))


@pytest.mark.parametrize(
    ("other", "why"),
    [(sealer("secret", cluster="another"), "cluster"), (sealer("another"), "unknown key")],
)
def test_strangers_are_told_apart_by_cluster_and_key(other: Sealer, why: str) -> None:
    with pytest.raises(NotOurs) as refused:
        sealer("secret").open(other.seal(b"hello"))
    assert refused.value.why == why


@given(noise=st.binary(max_size=SEAL_BYTES - 1))
def test_what_is_too_short_to_be_sealed_is_refused(noise: bytes) -> None:
    with pytest.raises(NotOurs) as refused:
        sealer("secret").open(noise)
    assert refused.value.why == "short"


def test_keys_are_changed_in_three_steps_and_at_each_every_member_opens_what_every_other_seals() -> None:
    steps = [("old",), ("old", "new"), ("new", "old"), ("new",)]
    for before, after in pairwise(steps):
        for mine, theirs in ((before, after), (after, before)):
            assert sealer(*mine).open(sealer(*theirs, seed=2).seal(b"hello")) == b"hello"
    with pytest.raises(NotOurs):
        sealer("new").open(sealer("old").seal(b"hello"))


def test_a_cluster_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        sealer()
