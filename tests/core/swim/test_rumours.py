"""What is told next, and how often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.swim.rumours import SMALLEST, Rumours


def taken(rumours: Rumours, room: int = 1_000, most: int = 64, limit: int = 3) -> list[bytes]:
    return [bytes(raw) for raw in rumours.take(room, most, limit)]


def text(name: str) -> bytes:
    return name.encode() * SMALLEST


def test_the_least_sent_goes_first_and_among_equals_the_oldest() -> None:
    rumours = Rumours()
    rumours.put("a", text("a"))
    rumours.put("b", text("b"))
    assert taken(rumours, most=1) == [text("a")]
    rumours.put("c", text("c"))
    assert taken(rumours, most=2) == [text("b"), text("c")]
    assert taken(rumours) == [text("a"), text("b"), text("c")]


def test_a_newer_rumour_about_a_member_takes_the_older_ones_place_and_starts_from_nothing() -> None:
    rumours = Rumours()
    rumours.put("a", text("a"))
    assert taken(rumours, limit=2) == [text("a")]
    rumours.put("a", text("A"))
    assert [taken(rumours, limit=2) for _ in range(3)] == [[text("A")], [text("A")], []]
    assert len(rumours) == 0


def test_what_does_not_fit_waits_and_what_is_smaller_goes_before_it() -> None:
    rumours = Rumours()
    rumours.put("long", b"l" * 30)
    rumours.put("short", b"s" * 10)
    assert taken(rumours, room=20) == [b"s" * 10]
    assert taken(rumours, room=35) == [b"l" * 30]


@given(
    st.lists(st.integers(SMALLEST, 60), min_size=1, max_size=30),
    st.integers(60, 300),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_each_is_sent_as_often_as_the_limit_says_and_no_packet_is_overfull(
    sizes: list[int], room: int, most: int, limit: int
) -> None:
    rumours = Rumours()
    for n, size in enumerate(sizes):
        rumours.put(str(n), n.to_bytes(2, "big").ljust(size, b"."))
    sent: list[bytes] = []
    while packet := taken(rumours, room, most, limit):
        assert len(packet) <= most
        assert sum(map(len, packet)) <= room
        assert len(set(packet)) == len(packet)
        sent += packet
    assert len(rumours) == 0
    assert sorted(sent) == sorted(
        n.to_bytes(2, "big").ljust(size, b".") for n, size in enumerate(sizes) for _ in range(limit)
    )
