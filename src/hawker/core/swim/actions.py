"""What the core asks of its shell."""

from __future__ import annotations

import msgspec

from hawker.core.swim.members import Member, Status


class Send(msgspec.Struct, frozen=True, gc=False):
    """Seal this packet and send it."""

    to: tuple[str, int]
    payload: bytes


class StreamProbe(msgspec.Struct, frozen=True):
    """Reach this member over a stream, and tell `on_stream_probe` before `deadline`."""

    member: Member
    probe_id: int
    deadline: float


class PushPull(msgspec.Struct, frozen=True):
    """Exchange tables with this member: `push_pull_ask` to it, its answer to `push_pull_done`."""

    member: Member


class Changed(msgspec.Struct, frozen=True):
    """The belief about a member changed. `before` is None for a new member, `after` for a forgotten one. If both are
    alike, the name has a new life or other particulars."""

    name: str
    before: Status | None
    after: Status | None
    member: Member


class Conflict(msgspec.Struct, frozen=True):
    """Two live members hold one name. The one born later is believed."""

    ours: Member
    theirs: Member


class Noted(msgspec.Struct, frozen=True):
    """A live member's note, as it came with a packet."""

    name: str
    note: bytes


Action = Send | StreamProbe | PushPull | Changed | Conflict | Noted
