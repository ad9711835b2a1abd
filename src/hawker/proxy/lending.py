"""What a program may know that carries requests past this proxy without asking for each.

It is lent machines: so many *places* of each, which it fills as it likes, and it says how many are filled. It gives
them back before a machine is stopped, and when requests wait here, which were there before those still to come.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class Borrower(Protocol):
    """Who is lent machines."""

    def changed(self, app: str) -> None:
        """What is lent of this app may be different now."""
        ...

    async def withdraw(self, machine: str) -> bool:
        """Give this machine no more requests. False: some are still under way."""
        ...


class Lender(Protocol):
    """Who lends."""

    def lend_to(self, borrower: Borrower | None) -> None:
        """From now on this one is told; None: nobody is."""
        ...

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
