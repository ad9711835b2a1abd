"""When a worker is taken for gone, so that what stands by for its machines is started.

Two signs must come together: nobody has heard of the worker for a while, and probes of it fail. The while is shorter if
membership has declared it dead, because then others have probed it, too. A worker that ends in order, as for an
upgrade, has left; its machines may still run, so the long while counts for it.

    outage = Outage(now)
    outage.heard(now, stood) / outage.failed()
    if outage.gone(now, dead=..., after_s=15.0): ...

Times are seconds of the caller's clock. Several look at one worker, each at its own moments: what another has started
for the present outage already is known by when that was started, compared with what was known before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FAILED_LEAST = 3
"""So many probes must fail in a row, because one lost packet is no outage."""
DEAD_PART = 1 / 3
"""This part of the time is enough when membership has declared the worker dead."""
NONE_STOOD: Mapping[str, int] = MappingProxyType({})


class Outage:
    """What is known of one worker. `told` is for the caller: whether it has acted on the present outage. `ever`: it was
    heard of since this was made, so that an outage is one that began since then. `stood`: of the standbys at rest when
    it was heard of last, when they had been started for it, in milliseconds, by machine."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.failures = 0
        self.told = False
        self.ever = False
        self.stood = NONE_STOOD

    def heard(self, now: float, stood: Mapping[str, int] = NONE_STOOD) -> None:
        """The worker took a connection or answered, so any outage is over."""
        self.heard_at = now
        self.failures = 0
        self.told = False
        self.ever = True
        self.stood = stood

    def failed(self) -> None:
        self.failures += 1

    def gone(self, now: float, *, dead: bool, after_s: float) -> bool:
        wait_s = after_s * DEAD_PART if dead else after_s
        return self.failures >= FAILED_LEAST and now - self.heard_at >= wait_s

    def stood_up(self, machine: str, at_ms: int, began_ms: int) -> bool:
        """Whether a standby that was started last at `at_ms`, for this worker, was so in the present outage. `began_ms`
        is when the worker began last: all that there is to go by if it was never heard of."""
        return at_ms > (self.stood.get(machine, 0) if self.ever else began_ms)
