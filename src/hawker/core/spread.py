"""What a node still has to tell its neighbours about, in which order, and how it fits into packets.

News is spread as in memberlist: everything new is sent to a few random neighbours at each tick, what was sent least
goes first, and after `sends_most` times it is dropped. Packets and their number in a tick are bounded; what finds no
room is told late or not at all, and the exchange of digests repairs that. Items are opaque bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import ceil, log10
from typing import NamedTuple

WAITING_MOST = 4096
"""Items that wait. Beyond it the ones sent most are dropped."""
SENDS_FACTOR = 2
"""A neighbour that misses a version notices with the next one of the same owner and asks for it, so that half of what
membership sends (SWIM paper, section 4.1: 3 log N) is enough."""


def sends_most(members: int) -> int:
    """How often one node sends an item, over all its neighbours."""
    return max(2, SENDS_FACTOR * ceil(log10(members + 1)))


class Item(NamedTuple):
    """`sent` times so far; `order` is the time of its arrival, newest first among equals."""

    sent: int
    order: int
    key: str
    body: bytes


class Spread:
    """Items by key: a newer one of the same key takes the place of the older."""

    def __init__(self, payload_max: int) -> None:
        self._payload_max = payload_max
        self._items: dict[str, Item] = {}
        self._order = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, key: str, body: bytes) -> None:
        """Take up an item. One that fits into no packet is refused with `ValueError`."""
        if len(body) > self._payload_max:
            raise ValueError(f"{key}: {len(body)} bytes do not fit into a packet of {self._payload_max}")
        self._order -= 1
        self._items[key] = Item(0, self._order, key, body)
        if len(self._items) > WAITING_MOST:
            worst = max(self._items.values())
            del self._items[worst.key]
            self.dropped += 1

    def packets(self, count: int, members: int) -> list[Sequence[bytes]]:
        """At most `count` packets' worth of items for one neighbour, least sent first. They count as sent."""
        chosen: list[Sequence[bytes]] = []
        if not self._items:
            return chosen
        limit = sends_most(members)
        packet: list[bytes] = []
        room = self._payload_max
        smallest = min(len(item.body) for item in self._items.values())
        most = count * (self._payload_max // max(1, smallest) + 1)
        for item in nsmallest(most, self._items.values()):
            if len(item.body) > room:
                if len(chosen) + 1 == count:
                    break
                chosen.append(packet)
                packet, room = [], self._payload_max
            packet.append(item.body)
            room -= len(item.body)
            if item.sent + 1 >= limit:
                del self._items[item.key]
            else:
                self._items[item.key] = item._replace(sent=item.sent + 1)
        if packet:
            chosen.append(packet)
        return chosen
