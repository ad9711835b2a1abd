"""What a worker does by itself when a program ends: the restart policy, the only decision of its kind.

Pure: from the policy, how the program ended and how often it has been restarted, to a verdict with a reason that is
kept in the machine's events. Delays grow exponentially and are forgotten once the program has run well for a while.
"""

from __future__ import annotations

import msgspec

from hawker.model.config import Restart

BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 60.0
HEALTHY_AFTER_S = 300.0  # a program that ran this long starts again with a clean slate (the window upstream documents)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. `status` follows the shell: exit code, 128 + signal, -1 when nobody saw it."""

    status: int
    oom_killed: bool
    ran_s: float
    restarts: int  # restarts in a row before this ending


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`again`: start once more after `delay_s`, and count `restarts` from now on. `rule` is the cause that is
    recorded."""

    again: bool
    delay_s: float
    restarts: int
    rule: str


def decide(policy: Restart, ending: Ending) -> Verdict:
    """The verdict. "on-failure" counts an ending by the kernel for want of memory as a failure, whatever its status."""
    failed = ending.status != 0 or ending.oom_killed
    so_far = 0 if ending.ran_s >= HEALTHY_AFTER_S else ending.restarts
    how = "out of memory" if ending.oom_killed else f"exit status {ending.status}"
    if policy.policy == "no":
        return Verdict(again=False, delay_s=0.0, restarts=so_far, rule=f"restart policy no: {how}")
    if policy.policy == "on-failure" and not failed:
        return Verdict(again=False, delay_s=0.0, restarts=so_far, rule=f"restart policy on-failure: {how}")
    if policy.policy == "on-failure" and so_far >= policy.max_retries:
        rule = f"restart policy on-failure: {how}, {so_far} of {policy.max_retries} retries used"
        return Verdict(again=False, delay_s=0.0, restarts=so_far, rule=rule)
    rule = f"restart policy {policy.policy}: {how}, restart {so_far + 1}"
    return Verdict(again=True, delay_s=backoff_s(so_far), restarts=so_far + 1, rule=rule)


def backoff_s(restarts: int) -> float:
    """0.5 s, then doubled each time, at most a minute."""
    return min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(restarts, 32))
