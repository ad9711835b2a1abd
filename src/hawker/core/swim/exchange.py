"""Push-pull: two members compare whole tables, so that a rumour that missed one of them is not missed for ever.

First a digest, and those held suspect; where digests differ, the digest of each part of the table; then both sides'
members of the parts that differ. It takes one or two asks of one side to the other.
"""

from __future__ import annotations

from hawker.core.swim import wire
from hawker.core.swim.beliefs import Beliefs
from hawker.core.swim.members import View


def ask(beliefs: Beliefs) -> bytes:
    return wire.encode(wire.Summary(beliefs.me, beliefs.incarnation, _digest(beliefs), beliefs.suspects()))


def answer(beliefs: Beliefs, now: float, body: bytes) -> bytes:
    """The answer to a request. Raises ValueError for a malformed `body`."""
    asked = wire.decode_ask(body)
    name = beliefs.me.name
    if isinstance(asked, wire.Entries):
        views = beliefs.entries_in(asked.parts)
        beliefs.merge(now, asked.sender, asked.entries)
        return _entries(name, [], views)
    beliefs.alive(now, asked.member, asked.incarnation)
    beliefs.hear(now, asked.suspects)
    if asked.digest == _digest(beliefs):
        return wire.encode(wire.Same(name, beliefs.suspects()))
    return wire.encode(wire.Parts(name, beliefs.suspects(), beliefs.table.packed_digests()))


def done(beliefs: Beliefs, now: float, body: bytes) -> bytes | None:
    """The next request, or None if there is none. Raises ValueError for a malformed `body`."""
    answered = wire.decode_answer(body)
    if isinstance(answered, wire.Entries):
        beliefs.merge(now, answered.sender, answered.entries)
        return None
    beliefs.hear(now, answered.suspects)
    if isinstance(answered, wire.Same):
        return None
    ours, theirs = beliefs.table.packed_digests(), answered.digests
    parts = [at // 8 for at in range(0, len(ours), 8) if ours[at : at + 8] != theirs[at : at + 8]]
    return _entries(beliefs.me.name, parts, beliefs.entries_in(parts)) if parts else None


def _digest(beliefs: Beliefs) -> bytes:
    return beliefs.table.digest().to_bytes(8, "big")


def _entries(sender: str, parts: list[int], views: list[View]) -> bytes:
    entries = [wire.Entry(view.member, view.status, view.incarnation) for view in views[: wire.MEMBERS_MAX]]
    return wire.encode(wire.Entries(sender, parts, entries))
