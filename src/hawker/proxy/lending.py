"""What a program may know that carries requests past this proxy without asking for each.

It is lent machines: so many *places* of each, which it fills as it likes, and it says how many are filled. It gives
them back before a machine is stopped, and when requests wait here, which were there before those still to come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from hawker.proxy.base import Address, ServicePort


class Lent(msgspec.Struct, frozen=True):
    """A machine that takes so many requests at a time at this address."""

    address: Address
    places: int


class Offer(msgspec.Struct, frozen=True):
    """What a public port of an app is, and its machines by id that take requests now."""

    service: ServicePort
    machines: Mapping[str, Lent]


class Lender(Protocol):
    """Who lends. `changed` is called with an app's name when what it lends of it may be different; `withdraw` with a
    machine that is to get no more requests, False when some are still under way. Both are set by who is lent to."""

    changed: Callable[[str], None]
    withdraw: Callable[[str], Awaitable[bool]] | None

    def offer(self, app: str, port: int) -> Offer | None:
        """None: the app does not serve this port."""
        ...

    def filled(self, app: str, port: int, machine: str, places: int, now: int, moved: bool) -> None:
        """It may fill `places` from now on, and has filled `now`; `moved`: there were requests since the last time.
        To be said in the same turn of the loop as the offer was made, for places that it did not have before."""
        ...

    def refused(self, app: str, port: int, machine: str) -> None:
        """A machine takes no connection."""
        ...
