"""What the results of a health check make of it: passing, warning or critical, and when to look next.

A machine that has just started is `warning` until its first success or the end of its grace period, whichever is
first: what fails before then does not count. After that one success makes it `passing` and one failure `critical`, as
the Machines API has it: that has no thresholds. Until the first success it is looked at again and again, soon first and
then ever later, so that a machine that is ready after a tenth of a second is not seen to be only an interval later.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from hawker.model.checks import Check

Status = Literal["passing", "warning", "critical"]

FIRST_S = 0.05
GROWTH = 1.5
"""While a machine has never passed, each delay is half as long again: it is seen ready at most 1.5 times as late."""
JITTER = 0.05
"""The random part of a delay, by which checks that began together drift apart."""
RELEARN_S = 5.0
"""A restarted worker spreads the first checks of machines that passed before over this time."""
WAITING = "waiting for the first result"


class Outcome(msgspec.Struct, frozen=True):
    """The result of one check. `output` is a short text for people."""

    good: bool
    output: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A check of one instance. `changed_ms` is when `status` became what it is; `looks` counts those without a success
    so far, or -1 after the first one."""

    status: Status = "warning"
    output: str = WAITING
    changed_ms: int = 0
    looks: int = 0

    @property
    def had_success(self) -> bool:
        return self.looks < 0


def fresh(now_ms: int) -> Health:
    """The health of an instance that has just started."""
    return Health(changed_ms=now_ms)


def resumed(status: Status, output: str, changed_ms: int) -> Health:
    """The health that a restarted worker last recorded. A check that did not pass is made soon, as after a start."""
    return Health(status=status, output=output, changed_ms=changed_ms, looks=-1 if status == "passing" else 0)


def after(health: Health, outcome: Outcome, check: Check, *, age_s: float, now_ms: int) -> Health:
    """The health after one check of an instance that started `age_s` ago."""
    status: Status = "critical"
    if outcome.good:
        status = "passing"
    elif health.status == "warning" and age_s < check.grace_s:
        status = "warning"
    looks = -1 if outcome.good or health.had_success else health.looks + 1
    changed_ms = health.changed_ms if status == health.status else max(now_ms, health.changed_ms)
    return replace(health, status=status, output=outcome.output, looks=looks, changed_ms=changed_ms)


def delay_s(health: Health, check: Check, draw: float) -> float:
    """The seconds from the beginning of one check to that of the next. `draw` is random, from 0 to 1."""
    delay = check.interval_s
    if not health.had_success:
        # The exponent is bounded, since the power is a float; 40 is more than the longest interval needs.
        delay = min(delay, FIRST_S * GROWTH ** min(health.looks, 40))
    return delay * (1 + JITTER * (2 * draw - 1))


def first_delay_s(health: Health, check: Check, draw: float) -> float:
    """The seconds until the first check, counted from the start of the machine or of the worker."""
    if health.had_success:
        return min(check.interval_s, RELEARN_S) * draw
    return min(check.interval_s, FIRST_S) * draw
