"""What packets of membership carry besides: how far the sender's own logs go, and a hash of all that the sender has.

A node that has missed an owner's last version finds out with the owner's next packet. A node that lacks anything at all
finds out with the next packet of anybody, and compares digests with the sender. So a replica is about a second behind
at most, whatever was lost, and a region that changes all the time costs each member one comparison a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from random import Random

import msgspec

from hawker.catalog.gossip.packets import UNREADABLE
from hawker.catalog.gossip.replica import Replica
from hawker.model.catalog import TIERS, LogId, Position

HASH_BYTES = 4
REFRESH_S = 0.1
"""How old our own hash may be. Computing it takes a fifth of a millisecond with 200 logs."""
COMPARE_S = 1.0


class Note(msgspec.Struct, frozen=True, array_like=True):
    """At most 40 bytes. `region` and `everywhere` are the ends of the sender's own logs of the two tiers."""

    region: Position
    everywhere: Position
    all: bytes = b""


class Notes:
    """One node's notes. `send` takes each new note. `heard` is called with what a member says of its own logs,
    `differs` with the name of a member that does not have what we have."""

    def __init__(
        self,
        me: str,
        replica: Replica,
        rng: Random,
        send: Callable[[bytes], None],
        heard: Callable[[str, LogId, Position], None],
        differs: Callable[[str], None],
    ) -> None:
        self._me = me
        self._replica = replica
        self._rng = rng
        self._send = send
        self._heard = heard
        self._differs = differs
        self._all = b""
        self._compared_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        replica.on_applied.append(self._changed)

    def close(self) -> None:
        self._replica.on_applied.remove(self._changed)
        if self._timer:
            self._timer.cancel()

    def write(self) -> None:
        """Write our note as of now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        whole = b"".join(self._replica.digest(tier) for tier in TIERS)
        self._all = blake2b(whole, digest_size=HASH_BYTES).digest()
        region, everywhere = (self._replica.position(LogId(self._me, tier)) for tier in TIERS)
        self._send(_encode(Note(region, everywhere, self._all)))

    def read(self, name: str, note: bytes) -> None:
        """Read a live member's note."""
        try:
            read = _decode(note)
        except UNREADABLE:
            return  # it is of a later version of Hawker, or no note at all
        self._heard(name, LogId(name, "region"), read.region)
        self._heard(name, LogId(name, "global"), read.everywhere)
        now = asyncio.get_running_loop().time()
        if read.all != self._all and now >= self._compared_at + COMPARE_S:
            self._compared_at = now + self._rng.uniform(-0.2, 0.2) * COMPARE_S
            self._differs(name)

    def _changed(self, tables: tuple[str, ...]) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REFRESH_S, self.write)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode
