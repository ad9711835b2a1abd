"""How long something has left whose end was written down before a restart: a backoff, a lease, a reservation.

Its end is a time by the clock of the process that wrote it, and the clock may have been set since. One that was set
back would make it last for as long as the clock had been ahead, so nothing ever has more left than it was given.

Within one process this is asked once: what waits goes on by the loop's clock, which nobody sets, and what is compared
again and again counts by `hawker.host.Host.steady_ms`.
"""

from __future__ import annotations


def left_ms(until_ms: int, length_ms: int, now_ms: int) -> int:
    """What is left of `length_ms` that ends at `until_ms`: none once that has come, and never more than all of it."""
    return max(0, min(until_ms - now_ms, length_ms))
