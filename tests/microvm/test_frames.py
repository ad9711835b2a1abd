"""Frames between daemon and guest: what is sent arrives, and nothing that was cut off does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.worker.drivers.microvm import frames
from hawker.worker.drivers.microvm.frames import Decoder, Frame

FRAMES = st.lists(
    st.tuples(st.sampled_from("hsgxizkcnqproeaw"), st.integers(0, 2**32 - 1), st.binary(max_size=200)), max_size=6
)
# Bytes that mean something to the stream, more often than chance would have them.
AWKWARD = st.lists(st.sampled_from([b"\xc0", b"\xdb", b"\xdc", b"\xdd", b"\0", b"a"]), max_size=40).map(b"".join)


def fed(data: bytes, cut: int) -> list[Frame]:
    decoder = Decoder()
    return [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])]


@given(FRAMES, st.integers(0, 500))
def test_frames_arrive_however_the_stream_is_cut(sent: list[Frame], cut: int) -> None:
    assert fed(b"".join(frames.encode(*frame) for frame in sent), cut) == sent


@given(AWKWARD)
def test_every_byte_can_be_sent(payload: bytes) -> None:
    assert fed(frames.encode("i", 0xC0DBDCDD, payload), 7) == [("i", 0xC0DBDCDD, payload)]


@given(AWKWARD, st.data())
def test_a_frame_that_was_cut_off_is_dropped_and_the_next_session_is_whole(payload: bytes, data: st.DataObject) -> None:
    cut_off = frames.encode("x", 1, payload)
    left = cut_off[: data.draw(st.integers(0, len(cut_off) - 2))]
    assert fed(left + frames.END + frames.encode("h", 1), 3) == [("h", 1, b"")]


@given(st.binary(max_size=300))
def test_noise_is_no_frame_and_does_no_harm(noise: bytes) -> None:
    assert fed(noise + frames.END + frames.encode("h", 9), 1)[-1] == ("h", 9, b"")


def test_a_frame_that_never_ends_is_not_kept() -> None:
    decoder = Decoder()
    for _ in range(40):
        assert list(decoder.feed(b"a" * (1 << 18))) == []
        assert len(decoder._rest) <= 2 * frames.FRAME_MAX
    assert list(decoder.feed(frames.END + frames.encode("h", 1))) == [("h", 1, b"")]


def test_what_is_too_long_for_a_frame_is_said() -> None:
    with pytest.raises(ValueError, match="1048576 bytes"):
        frames.encode("i", 1, bytes(1 << 20))


@given(st.lists(st.binary(max_size=50)))
def test_fields_are_read_as_they_were_written(values: list[bytes]) -> None:
    assert frames.read_fields(frames.fields(values)) == values


@pytest.mark.parametrize("payload", [b"\1", b"\1\0\0\0", b"\xff\xff\xff\xff12"])
def test_fields_that_are_cut_off_are_malformed(payload: bytes) -> None:
    with pytest.raises(frames.Malformed):
        frames.read_fields(payload)
