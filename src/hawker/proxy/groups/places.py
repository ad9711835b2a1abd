"""A machine's place in a group of those that serve the same public ports, and the leases that requests have of it."""

from __future__ import annotations

from typing import Protocol

from hawker.core.routing import Pool, Seat
from hawker.proxy.base import Address, Failure, Header
from hawker.proxy.groups.rooms import Room


class Keeper(Protocol):
    """Who is told what happens to requests at a machine: its door, or what stands for a door far away."""

    @property
    def closing(self) -> bool:
        """A stop is under way that cannot be taken back."""
        ...

    def failed(self, place: Place, how: Failure) -> None: ...

    def answered(self, place: Place) -> None:
        """A request has ended there without a failure."""
        ...

    def heard(self, place: Place, load: bytes) -> None: ...


class Place:
    """One machine in one group. It outlives the seat, which is made anew when the groups of an app change.

    `address` is that of `addresses` which took a connection last. Until `crowded_until` its proxy takes no request that
    would have to wait."""

    __slots__ = (
        *("address", "addresses", "crowded_until", "headers", "keeper", "machine", "pool", "region", "room", "seat"),
    )

    def __init__(
        self,
        pool: Pool,
        seat: Seat,
        room: Room,
        keeper: Keeper,
        addresses: tuple[Address, ...],
        headers: tuple[Header, ...] = (),
    ) -> None:
        self.pool = pool
        self.seat = seat
        self.room = room
        self.keeper = keeper
        self.addresses = addresses
        self.address = addresses[0]
        self.headers = headers
        self.crowded_until = 0.0
        self.machine = seat.machine
        self.region = seat.region

    def reach(self, keeper: Keeper, addresses: tuple[Address, ...], headers: tuple[Header, ...]) -> None:
        """From now on it is reached like this."""
        self.keeper, self.headers = keeper, headers
        if addresses != self.addresses:
            self.addresses, self.address = addresses, addresses[0]

    def enter(self) -> None:
        self.pool.enter(self.seat)

    def leave(self) -> None:
        """A request has gone, or has given up: there may be room for another."""
        self.pool.leave(self.seat)
        if self.room.queues:
            self.room.one(self.machine)


class PlaceLease:
    """`hawker.proxy.base.Lease`: counted as in flight by whoever made it."""

    __slots__ = ("_ended", "_place", "address", "headers", "machine", "phases", "region")

    def __init__(self, place: Place, port: Header, phases: dict[str, float]) -> None:
        """`port` is the public one, as a proxy is told of it."""
        self._place = place
        self._ended = False
        self.address = place.address
        self.headers = (*place.headers, port) if place.headers else ()
        self.machine = place.machine
        self.region = place.region
        self.phases = phases

    @property
    def load(self) -> bytes:
        seat = self._place.seat
        return b"%d/%d/%d" % (seat.in_flight, seat.soft, seat.row.hard)

    @property
    def others(self) -> int:
        place = self._place
        return place.room.idle(place.machine) if place.seat.full else 0

    def heard(self, load: bytes) -> None:
        self._place.keeper.heard(self._place, load)

    def release(self) -> None:
        if not self._ended:
            self._ended = True
            self._place.keeper.answered(self._place)
            self._place.leave()

    def failed(self, how: Failure) -> None:
        if not self._ended:
            self._ended = True
            self._place.keeper.failed(self._place, how)
            self._place.leave()
