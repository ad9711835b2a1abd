"""What a data plane is: it listens where users and other proxies connect, and carries their bytes to machines.

It asks `hawker.proxy.base.Router` where each request goes. `hawker.proxy.planes` chooses one by name.
"""

from __future__ import annotations

from typing import Protocol

from hawker.core.metrics import Collector
from hawker.proxy.base import Address
from hawker.proxy.embedded.counters import Counters


class DataPlane(Protocol):
    """`counters` count the requests that Hawker's own code has read. The `listen` methods return the address that they
    listen at, port 0 asks for any port, and they raise `OSError` when the address cannot be had."""

    counters: Counters

    def collectors(self) -> tuple[Collector, ...]:
        """All metrics, those of `counters` among them."""
        ...

    async def listen(self, host: str, port: int, *, public: int) -> Address:
        """Serve users at this address as the public port `public`, which apps share."""
        ...

    async def listen_own(self, host: str, port: int, *, public: int) -> Address:
        """Serve users as a public port that one app has to itself."""
        ...

    async def listen_backhaul(self, host: str, port: int) -> Address:
        """Serve other proxies of the cluster."""
        ...

    def stop(self, address: Address) -> None:
        """Take no more connections at this address. Those that are open stay."""
        ...

    async def retire(self) -> None:
        """Another process takes the listening sockets over: end the connections that there are within the settings'
        `drain_s`, and serve new ones meanwhile. `close` comes after it."""
        ...

    async def close(self) -> None:
        """Take no more connections, finish what is in flight within the settings' `drain_s`, then cut the rest."""
        ...
