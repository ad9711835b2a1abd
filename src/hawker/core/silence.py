"""What a broker remembers of a worker that did not answer, and how long it waits for that worker next time.

A frozen worker takes connections and answers nothing, so it would cost every call that asks all workers a whole
deadline. After one long wait in vain a worker is *silent*. It is still asked, but waited for only briefly, and the
question goes on behind the caller's back; the first answer, to whatever was asked, ends the silence. While such a
question is on its way no other is sent: a frozen worker holds one connection, however many ask.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

SILENT_AFTER_S = 1.0
"""A worker that is merely busy answers within this time. A refused connection takes less and costs nobody anything, so
it is no reason to wait less next time."""
PATIENCE_S = 0.25
"""The time for which an order waits for offers."""


class Silence(msgspec.Struct, frozen=True):
    """One worker: `since_s`, when the wait began that was in vain, None while it answers; `asked`, whether a question
    that nobody waits for is on its way."""

    since_s: float | None = None
    asked: bool = False


ANSWERS = Silence()


def patience_s(silence: Silence, deadline_s: float) -> float:
    """How long to wait for an answer. 0: do not ask."""
    if silence.since_s is None:
        return deadline_s
    return 0.0 if silence.asked else min(PATIENCE_S, deadline_s)


def unanswered(silence: Silence, began_s: float, now_s: float) -> Silence:
    """A call got no answer. What is known of a worker already silent does not change."""
    if silence.since_s is not None or now_s - began_s < SILENT_AFTER_S:
        return silence
    return replace(silence, since_s=began_s)


def asked(silence: Silence, on_its_way: bool) -> Silence:
    """A question that nobody waits for was sent, or has ended."""
    return replace(silence, asked=on_its_way)
