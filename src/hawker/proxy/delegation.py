"""What a program may do that carries requests past this proxy without asking about each one.

The proxy delegates machines to it: so many *slots* of each. The program fills them as it likes, and says how many are
filled. It gives them back before a machine is stopped, and when requests wait here, since those came first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from hawker.proxy.base import Address, ServicePort


class DelegatedMachine(msgspec.Struct, frozen=True):
    """A machine that takes so many requests at a time at this address."""

    address: Address
    slots: int


class Delegation(msgspec.Struct, frozen=True):
    """What a public port of an app is, and its machines by id that take requests now."""

    service: ServicePort
    machines: Mapping[str, DelegatedMachine]


class Delegate(Protocol):
    """Who is given machines: a program such as HAProxy, by way of its data plane."""

    def changed(self, app: str) -> None:
        """What is delegated of this app may be different now."""
        ...

    async def withdraw(self, machine: str) -> bool:
        """Give this machine no more requests. False: some are still under way."""
        ...


class Delegator(Protocol):
    """Who decides which machines are delegated."""

    def delegate_to(self, delegate: Delegate | None) -> None:
        """From now on this one is told; None: nobody is."""
        ...

    def delegation(self, app: str, port: int) -> Delegation | None:
        """What is delegated of this app now; None: the app does not serve this port."""
        ...

    def filled(self, app: str, port: int, machine: str, slots: int, now: int, moved: bool) -> None:
        """The delegate may fill `slots` of a machine from now on, and has filled `now`; `moved`: there were requests
        since the last time. A delegate that gets new slots says so in the same turn of the loop in which it asked for
        the delegation."""
        ...

    def refused(self, app: str, port: int, machine: str) -> None:
        """The delegate could not connect to this machine."""
        ...
