"""Packets and push-pull bodies: MessagePack arrays that begin with the number of their kind.

Whatever comes in is checked by its type here; nothing else looks at bytes. Fields that a later version adds at the end
of an array are ignored, rumours of an unknown kind too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from hawker.core.swim.members import BUCKETS, INCARNATION_MAX, Born, Incarnation, Member, Name, Status, View

NOTE_MAX = 40
RUMOURS_MAX = 64
RUMOUR_BYTES_MAX = 512
MEMBERS_MAX = 65_536
PAYLOAD_MAX = 1_180
"""1,232 bytes pass through a WireGuard tunnel unbroken; sealing takes up to 52."""

Note = Annotated[bytes, Meta(max_length=NOTE_MAX)]
Number = Annotated[int, Meta(ge=0, lt=2**32)]


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    member: Member
    incarnation: Incarnation


class Suspect(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    name: Name
    born: Born
    incarnation: Incarnation
    accuser: Name


class Dead(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """`accuser` is the member itself when it leaves."""

    name: Name
    born: Born
    incarnation: Incarnation
    accuser: Name


Suspects = Annotated[list[Suspect], Meta(max_length=RUMOURS_MAX)]
Rumour = Alive | Suspect | Dead
ToldMany = Annotated[list[Rumour], Meta(max_length=RUMOURS_MAX)]


class Gossip(msgspec.Struct, frozen=True, array_like=True, tag=0):
    sender: Name
    born: Born
    note: Note
    rumours: ToldMany


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A ping, which only `target` answers, with an ack of the same number."""

    sender: Name
    born: Born
    note: Note
    rumours: ToldMany
    number: Number
    target: Name


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=2):
    sender: Name
    born: Born
    note: Note
    rumours: ToldMany
    number: Number


class PingFor(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask a helper to ping `target` and to pass its ack on."""

    sender: Name
    born: Born
    note: Note
    rumours: ToldMany
    number: Number
    target: Name
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=0, le=65535)]


class Nack(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A helper says that it is well and was asked, but has no ack so far."""

    sender: Name
    born: Born
    note: Note
    rumours: ToldMany
    number: Number


Packet = Gossip | Ping | Ack | PingFor | Nack
GOSSIP, PING, ACK, PING_FOR, NACK = range(5)


class Summary(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Open a push-pull: who asks, and the digest of its whole table."""

    member: Member
    incarnation: Incarnation
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    suspects: Suspects


class Same(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tables agree."""

    sender: Name
    suspects: Suspects


class Parts(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The tables differ: this has the digest of each part."""

    sender: Name
    suspects: Suspects
    digests: Annotated[bytes, Meta(min_length=8 * BUCKETS, max_length=8 * BUCKETS)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    member: Member
    status: Status
    incarnation: Incarnation


class Entries(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All entries of these parts. A reply is the answerer's entries of the same parts."""

    sender: Name
    parts: Annotated[list[Annotated[int, Meta(ge=0, lt=BUCKETS)]], Meta(max_length=BUCKETS)]
    entries: Annotated[list[Entry], Meta(max_length=MEMBERS_MAX)]


Ask = Summary | Entries
Answer = Same | Parts | Entries

encode = msgspec.msgpack.Encoder().encode
_decode_packet: Callable[[bytes], Packet] = msgspec.msgpack.Decoder(Packet).decode
_decode_rumour = msgspec.msgpack.Decoder(Rumour).decode
_decode_loose = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_ask: Callable[[bytes], Ask] = msgspec.msgpack.Decoder(Ask).decode
_decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode
_RUMOURS_AT = 4


def decode_packet(payload: bytes) -> tuple[Packet, int]:
    """The packet, and how many of its rumours were ignored because they have no known form.

    Raises msgspec.DecodeError, a ValueError, when the packet itself is not.
    """
    try:
        return _decode_packet(payload), 0
    except msgspec.ValidationError:
        fields = _decode_loose(payload)
        if len(fields) <= _RUMOURS_AT:
            raise
        told = _decode_loose(fields[_RUMOURS_AT])
        good = [raw for raw in told[:RUMOURS_MAX] if _is_rumour(raw)]
        fields[_RUMOURS_AT] = msgspec.Raw(encode(good))
        return _decode_packet(encode(fields)), len(told) - len(good)


def decode_ask(body: bytes) -> Ask:
    """Raises ValueError."""
    try:
        return _decode_ask(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def decode_answer(body: bytes) -> Answer:
    """Raises ValueError."""
    try:
        return _decode_answer(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_member(member: Member) -> None:
    """Raises ValueError when others would not accept it."""
    encoded = encode(Alive(member, INCARNATION_MAX))
    _decode_rumour(encoded)
    if len(encoded) > RUMOUR_BYTES_MAX:
        raise ValueError(f"{member.name}: a member of {len(encoded)} bytes, at most {RUMOUR_BYTES_MAX} fit a packet")


def _is_rumour(raw: msgspec.Raw) -> bool:
    try:
        _decode_rumour(raw)
    except msgspec.DecodeError:
        return False
    return True


def alive(member: Member, incarnation: int) -> bytes:
    return encode(Alive(member, incarnation))


def accusation(view: View, accuser: str) -> bytes:
    """The belief about a member that is not alive, as a rumour."""
    member = view.member
    kind = Suspect if view.status is Status.suspect else Dead
    accuser = member.name if view.status is Status.left else accuser
    return encode(kind(member.name, member.born, view.incarnation, accuser))
