"""Requests that go to another region: a proxy there chooses the machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawker.core.routing import Wishes
from hawker.proxy.base import Failure, Header
from hawker.proxy.directory import Worker
from hawker.proxy.trouble import Trouble

if TYPE_CHECKING:
    from hawker.proxy.router import ProxyRouter


class RegionLease:
    """`hawker.proxy.base.Lease` of whatever machine a proxy of another region chooses; `machine` names that proxy's
    worker."""

    __slots__ = ("_answers", "_router", "address", "headers", "machine", "phases", "region")

    def __init__(self, router: ProxyRouter, app: str, worker: Worker, more: tuple[Header, ...]) -> None:
        self._router = router
        self._answers = False
        self.machine = worker.name
        self.region = worker.region
        self.address = worker.host, worker.proxy_port
        self.headers: tuple[Header, ...] = (*router.sites.backhaul(app, ""), *more)
        self.phases: dict[str, float] = {}

    @property
    def load(self) -> bytes:
        return b""

    def heard(self, load: bytes) -> None:
        """Of one of many machines: all that it says is that their proxy is there."""
        self._answers = True

    def release(self) -> None:
        self._router.trouble.pop(self.machine, None)

    def failed(self, how: Failure) -> None:
        if how != "elsewhere" and not self._answers:
            trouble = self._router.trouble.setdefault(self.machine, Trouble(self._router.settings.trouble_s))
            trouble.failed(asyncio.get_running_loop().time())


def wished(wishes: Wishes) -> list[Header]:
    """For the proxy that chooses: a replay's wishes are in no header of the request."""
    found = ((b"fly-force-instance-id", wishes.force_machine), (b"fly-prefer-instance-id", wishes.prefer_machine))
    return [(name, machine.encode("latin-1", "replace")) for name, machine in found if machine]
