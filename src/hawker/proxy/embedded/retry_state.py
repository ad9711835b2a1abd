"""Keeps how one request looks for its machine: what it wishes, what was tried, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hawker.core.replay_cache import Key
from hawker.core.retrying import may_retry
from hawker.core.tracing import Mark
from hawker.proxy.base import ANY, Failure, Header, Refused, Wishes
from hawker.proxy.embedded import refusals

NOTHING: Mapping[str, float] = MappingProxyType({})


class RetryState:
    """Made when the first machine did not take a request at once, or when the request says more than which app it is
    for. `deadline` is of the loop's clock. `app`: another app that it was handed on to, until that one's route is
    found. `added` are fields for the machine. `remembered`: the keys by which this way was remembered."""

    __slots__ = (
        *("added", "app", "deadline", "fresh", "how", "marks", "phases", "problem", "remembered", "sent_tries"),
        *("timed", "tried", "tries", "wishes"),
    )

    def __init__(self, deadline: float, wishes: Wishes = ANY, *, app: str = "", timed: bool = False) -> None:
        self.deadline = deadline
        self.wishes = wishes
        self.app = app
        self.timed = timed
        self.added: list[Header] = []
        self.remembered: list[Key] = []
        self.tried: set[str] = set()
        self.tries = 0
        self.sent_tries = 0
        self.fresh = False
        """Whether the next try needs a new connection."""
        self.how: Failure = "refused"
        self.problem = ""
        self.phases: dict[str, float] = {}
        self.marks: list[Mark] = []

    def spent(self, phase: str, seconds: float, now: float, within: Mapping[str, float] = NOTHING) -> None:
        """A phase is over, for the timing and the trace. `within`: what it was made of."""
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.marks.append(Mark(phase, now - seconds, now, within))

    @property
    def waited(self) -> bool:
        """Whether the request was not simply taken."""
        return self.tries > 0 or any(mark.within for mark in self.marks)

    def failed(
        self, method: bytes, how: Failure, problem: str, *, sent: int, whole: bool, most: int, sent_most: int
    ) -> bool:
        """A machine did not take it; `sent` machines have got something. Returns whether another one may be tried."""
        if how != "crowded" or not self.sent_tries:  # it says more that a machine got something of the request
            self.how, self.problem = how, problem
        self.tries += 1
        self.sent_tries += sent
        return self.tries < most and may_retry(
            method,
            how,
            sent=sent > 0,
            whole=whole,
            tries=self.tries,
            sent_tries=self.sent_tries,
            sent_most=sent_most,
        )

    def outcome(self) -> Refused:
        """What to tell the client when no other machine is tried."""
        status, code, _ = refusals.OF_FAILURES[self.how]
        problem = f"no answer from a machine of this app: {self.problem}"
        return Refused(status, code, problem, retry_after_s=1 if self.how == "crowded" else 0)

    def given_up(self, refusal: Refused) -> Refused:
        """What to tell the client when there is no other machine: what the last one did says more than that there is
        none."""
        if refusal.status != 503 or not self.tries:
            return refusal
        outcome = self.outcome()
        outcome.retry_after_s = refusal.retry_after_s
        return outcome

    def timing(self, at: str, of_lease: dict[str, float], first_byte_s: float) -> bytes:
        """The field Server-Timing (W3C), in milliseconds: what looking up, waiting and connecting took, and all of
        it."""
        phases = self.phases | of_lease | {"first-byte": first_byte_s}
        return ", ".join(f"{at}-{name};dur={seconds * 1000:.3f}" for name, seconds in phases.items()).encode()
