"""Who is in the group: a member's identity, what is believed of it, and the table of these beliefs.

An identity is (name, born): `born` is when that life of the member began, in Unix ms. A higher `born` of the same name
replaces the older life, whatever was believed of it.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from random import Random

BORN_MAX = 2**53
INCARNATION_MAX = 2**48
BUCKETS = 256
"""The table's digest has so many parts, so that two tables that differ in a few members exchange only those."""

Name = Annotated[str, Meta(min_length=1, max_length=63)]
Born = Annotated[int, Meta(ge=0, le=BORN_MAX)]
Incarnation = Annotated[int, Meta(ge=0, le=INCARNATION_MAX)]


class Status(enum.IntEnum):
    """`left` is a death that the member itself announced: final for that life."""

    alive = 0
    suspect = 1
    dead = 2
    left = 3

    @property
    def live(self) -> bool:
        """Whether the member counts as live, so that it is probed and asked for help."""
        return self < Status.dead


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself. `host`, `port`: where its packets go. `meta` is opaque here."""

    name: Name
    born: Born
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=0, le=65535)]
    region: Annotated[str, Meta(max_length=63)] = ""
    roles: Annotated[tuple[Annotated[str, Meta(max_length=31)], ...], Meta(max_length=8)] = ()
    meta: Annotated[str, Meta(max_length=128)] = ""
    protocol: Annotated[int, Meta(ge=0, le=65535)] = 1

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)


class View(msgspec.Struct, frozen=True, array_like=True):
    """What is believed of a member. `since` is when `status` became what it is, in the core's seconds."""

    member: Member
    status: Status
    incarnation: Incarnation
    since: float = 0.0


def bucket_of(name: str) -> int:
    return zlib.crc32(name.encode()) % BUCKETS


def fingerprint(view: View) -> int:
    """A hash of 64 bits over (name, born, incarnation) of a live member, 0 for any other.

    Suspicion is left out: it differs from holder to holder and ends by itself. So are the dead: holders forget them at
    different times.
    """
    if not view.status.live:
        return 0
    member = view.member
    text = f"{member.born}/{view.incarnation}/{member.name}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Known:
    """A table that many members begin with and none changes: a simulation of 10,000 members needs one, not 10,000."""

    __slots__ = ("digests", "live", "names", "views")

    def __init__(self, views: Iterable[View] = ()) -> None:
        self.views = {view.member.name: view for view in views}
        self.names = tuple(self.views)
        self.live = sum(view.status.live for view in self.views.values())
        self.digests = [0] * BUCKETS
        for name, view in self.views.items():
            self.digests[bucket_of(name)] ^= fingerprint(view)


class Table(Mapping[str, View]):
    """The beliefs of one member, by name: those that differ from `known`, laid over it. It counts live members and
    keeps digests."""

    __slots__ = ("_known", "_own", "_size", "digests", "live")

    def __init__(self, known: Known) -> None:
        self._known = known.views
        self._own: dict[str, View | None] = {}  # None: in `known`, but forgotten here
        self._size = len(known.views)
        self.live = known.live
        self.digests = list(known.digests)

    def get(self, name: str, default: View | None = None) -> View | None:  # type: ignore[override]
        own = self._own
        found = own[name] if name in own else self._known.get(name)
        return default if found is None else found

    def put(self, view: View) -> View | None:
        """Returns what was believed before."""
        name = view.member.name
        before = self.get(name)
        self._own[name] = view
        self._account(name, before, view)
        return before

    def forget(self, name: str) -> View | None:
        before = self.get(name)
        if before is None:
            return None
        if name in self._known:
            self._own[name] = None
        else:
            del self._own[name]
        self._account(name, before, None)
        return before

    def digest(self) -> int:
        """A hash of 64 bits over all parts of the digest, in their order."""
        return int.from_bytes(blake2b(self.packed_digests(), digest_size=8).digest(), "big")

    def packed_digests(self) -> bytes:
        return b"".join(part.to_bytes(8, "big") for part in self.digests)

    def _account(self, name: str, before: View | None, after: View | None) -> None:
        self._size += (after is not None) - (before is not None)
        self.live += (after is not None and after.status.live) - (before is not None and before.status.live)
        change = (fingerprint(before) if before else 0) ^ (fingerprint(after) if after else 0)
        if change:
            self.digests[bucket_of(name)] ^= change

    def __getitem__(self, name: str) -> View:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        own = self._own
        for name in self._known:
            if name not in own or own[name] is not None:
                yield name
        for name in own:
            if name not in self._known:
                yield name

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None


class Order:
    """Names in a random order, each drawn once a round; a newcomer joins at a random place among those still to come.

    The shuffle is done as names are drawn, and only places that changed are kept beside the shared list.
    """

    __slots__ = ("_base", "_drawn", "_moved", "_size")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.begin(names)

    def begin(self, names: tuple[str, ...]) -> None:
        """A new round."""
        self._base = names
        self._moved: dict[int, str] = {}
        self._size = len(names)
        self._drawn = 0

    def add(self, name: str) -> None:
        """Draw a place: all places that were not drawn yet are equally likely."""
        self._moved[self._size] = name
        self._size += 1

    def draw(self, rng: Random) -> str | None:
        """The next name, or None if the round is over."""
        drawn = self._drawn
        if drawn >= self._size:
            return None
        place = drawn + int(rng.random() * (self._size - drawn))
        name = self._at(place)
        if place != drawn:
            self._moved[place] = self._at(drawn)
            self._moved[drawn] = name
        self._drawn = drawn + 1
        return name

    def some(self, rng: Random, tries: int) -> Iterator[str]:
        """Names at random. With many names there may be repeats; with a few each comes once."""
        if self._size <= tries:
            places = list(range(self._size))
            rng.shuffle(places)
            return (self._at(place) for place in places)
        size = self._size
        return islice((self._at(int(rng.random() * size)) for _ in range(tries)), tries)

    def _at(self, place: int) -> str:
        name = self._moved.get(place)
        return self._base[place] if name is None else name
