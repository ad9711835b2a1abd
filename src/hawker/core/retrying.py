"""Whether a request may be sent again after a machine did not answer it: RFC 9110, section 9.2.2.

If no byte of a request went out, it may go to another machine, whatever it asks for. If any did, the machine may have
acted on it: then it is repeated only if its method is idempotent, and not often, since the request itself may be what
breaks machines. In any case all of its body must still be at hand.
"""

from __future__ import annotations

from typing import Literal

Failure = Literal["refused", "reset", "timeout", "elsewhere", "crowded", "unhealthy"]
"""Why a machine did not take a request: nobody listens there (RFC 9293 reset of a SYN), the connection broke before the
first byte of an answer, nothing came in time, its worker's proxy says that it is not there, or that as many requests
wait there as may, an answer that is none."""

TRIES_MOST = 90
"""The number of tries that Fly documents for its proxy."""
SENT_MOST = 3
"""The most machines that one request is sent to, because a request that breaks a machine or makes it hang must not take
the whole app with it."""

SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS", b"TRACE"))
IDEMPOTENT = SAFE | {b"PUT", b"DELETE"}


def may_retry(
    method: bytes, how: Failure, *, sent: bool, whole: bool, tries: int, sent_tries: int, sent_most: int = SENT_MOST
) -> bool:
    """Whether a request may be made again after a failure. `sent`: any byte of the request may have reached a machine;
    `whole`: what was sent is kept, to be sent again. `tries` and `sent_tries` count this one: all, and those in which
    something was sent.

    A worker's proxy that says "elsewhere" or "crowded" has passed nothing on. If it adds how its try failed, that is
    the failure.
    """
    if not whole or tries >= TRIES_MOST:
        return False
    if not sent or how in ("refused", "elsewhere", "crowded"):
        return True
    return method in IDEMPOTENT and sent_tries < sent_most
