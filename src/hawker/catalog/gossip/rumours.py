"""Tells neighbours what is new: versions in data packets, to a few random neighbours at each tick, the least-told
first.

A version is told by its position alone, as a version without changes, when it does not fit into a packet, or when more
waits than the next packets carry. Whoever lacks it asks, and gets all that is new at once. So what that log had before
is not told any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from random import Random

import msgspec
from msgspec.structs import replace

from hawker.catalog.gossip.packets import PAYLOAD_MAX
from hawker.core.swim.rumours import Rumours
from hawker.core.swim.settings import Settings
from hawker.model.catalog import Version

KIND = b"n"
"""The first byte of a data packet."""
PACKETS_MOST = 2
"""Packets for one neighbour in a tick: at 3 neighbours and 20 ticks a second that makes 150 KB/s."""
ITEM_MAX = PAYLOAD_MAX - len(KIND) - 3  # the list around it
WAITING_MOST = 4096
UNSENT_MOST = 2 * PACKETS_MOST * ITEM_MAX
"""So many bytes may wait that nobody was told yet. Whatever comes after that would arrive later than the answer to a
question for it."""
MUCH = 64
TICK_S = 0.05
"""A quarter of membership's tick: what is passed on reaches a large region in four or five of these."""

Address = tuple[str, int]


class RumourSender:
    """`neighbours` gives the addresses of live neighbours, in a fixed order."""

    def __init__(
        self,
        settings: Settings,
        rng: Random,
        neighbours: Callable[[], Sequence[Address]],
        send: Callable[[Address, bytes], None],
    ) -> None:
        self._settings = settings
        self._rng = rng
        self._neighbours = neighbours
        self._send = send
        self._rumours = Rumours()
        self._numbered: dict[str, dict[str, None]] = {}  # rumours of versions with their rows, by log; some are over
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many rumours wait to be told."""
        return len(self._rumours)

    def close(self) -> None:
        """Tell what waits for the next tick, since perhaps nobody else knows of it, and drop the rest."""
        if self._timer:
            self._timer.cancel()
            self._tick()
        if self._timer:
            self._timer.cancel()

    def tell(self, version: Version, *, ours: bool) -> None:
        """Take up something new. Our own versions go out at once: they were gathered before."""
        key, body = f"{version.tier}/{version.owner}", _encode(version)
        room = UNSENT_MOST - self._rumours.unsent
        if version.changes and len(body) <= min(ITEM_MAX, room) and len(self._rumours) < WAITING_MOST:
            name = f"{key}/{version.number}"
            self._rumours.put(name, body)
            self._numbered.setdefault(key, {})[name] = None
            if len(self._numbered[key]) > WAITING_MOST:
                self._numbered[key] = {each: None for each in self._numbered[key] if each in self._rumours}
        else:
            for name in self._numbered.pop(key, ()):
                self._rumours.drop(name)
            self._rumours.put(key, _encode(replace(version, changes=())))
        self._tick_in(0.0 if ours else TICK_S)

    def _tick_in(self, seconds: float) -> None:
        """Tick in at most so many seconds."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._timer:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        others = self._neighbours()
        fanout = min(len(others), self._settings.gossip_fanout)
        if not fanout:
            return
        # A rumour is told as often as membership tells its own, while there are few, and half as often while there are
        # many: a node that misses a version notices with the next one, or with the next packet of membership, and asks.
        # It is never told to fewer than one tick's neighbours: in a small region those are all there are.
        often = self._settings.retransmits(len(others) + 1)
        limit = max(fanout, often if len(self._rumours) < MUCH else often // 2)
        told = self._rumours.share(fanout, PACKETS_MOST * ITEM_MAX, WAITING_MOST, limit)
        for address, all_items in zip(self._rng.sample(others, fanout), told, strict=True):
            for items in _packed(all_items):
                self._send(address, KIND + _encode(items))
        if len(self._rumours):
            self._tick_in(TICK_S)
        else:
            self._numbered.clear()


def read(payload: bytes) -> list[Version]:
    """The versions of a data packet, without its kind. Raises one of `packets.UNREADABLE`."""
    return _decode(payload)


def _packed(items: list[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    """The items in packets, in their order."""
    packet: list[msgspec.Raw] = []
    room = ITEM_MAX
    for item in items:
        size = len(bytes(item))
        if size > room:
            yield packet
            packet, room = [], ITEM_MAX
        packet.append(item)
        room -= size
    if packet:
        yield packet


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Version]).decode
