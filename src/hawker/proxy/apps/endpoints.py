"""How a machine is reached in a group of those that serve the same public ports, and the leases that requests hold
there."""

from __future__ import annotations

from typing import Protocol

from hawker.core.routing import Pool, PoolEntry
from hawker.proxy.apps.wait_queue import WaitQueue
from hawker.proxy.base import Address, Failure, Header


class EndpointOwner(Protocol):
    """Who is told what happens to requests at a machine: its door, or the proxy of another worker."""

    @property
    def closing(self) -> bool:
        """A stop is under way that cannot be taken back."""
        ...

    def failed(self, endpoint: Endpoint, how: Failure) -> None: ...

    def answered(self, endpoint: Endpoint) -> None:
        """A request has ended there without a failure."""
        ...

    def heard(self, endpoint: Endpoint, load: bytes) -> None: ...


class Endpoint:
    """One machine in one group. It outlives its pool entry: a change of the app's groups makes a new one.

    `address` is that of `addresses` which took a connection last. Until `crowded_until` its proxy takes no request that
    would have to wait."""

    __slots__ = (
        *("address", "addresses", "crowded_until", "entry", "headers", "machine"),
        *("owner", "pool", "region", "wait_queue"),
    )

    def __init__(
        self,
        pool: Pool,
        entry: PoolEntry,
        wait_queue: WaitQueue,
        owner: EndpointOwner,
        addresses: tuple[Address, ...],
        headers: tuple[Header, ...] = (),
    ) -> None:
        self.pool = pool
        self.entry = entry
        self.wait_queue = wait_queue
        self.owner = owner
        self.addresses = addresses
        self.address = addresses[0]
        self.headers = headers
        self.crowded_until = 0.0
        self.machine = entry.machine
        self.region = entry.region

    def reach(self, owner: EndpointOwner, addresses: tuple[Address, ...], headers: tuple[Header, ...]) -> None:
        """From now on the machine is reached like this."""
        self.owner, self.headers = owner, headers
        if addresses != self.addresses:
            self.addresses, self.address = addresses, addresses[0]

    def enter(self) -> None:
        self.pool.enter(self.entry)

    def leave(self) -> None:
        """A request has ended there, or has given up: there may be room for another."""
        self.pool.leave(self.entry)
        if self.wait_queue.queues:
            self.wait_queue.one(self.machine)


class EndpointLease:
    """A `hawker.proxy.base.Lease`. Whoever makes it has counted it as in flight."""

    __slots__ = ("_ended", "_endpoint", "address", "headers", "machine", "phases", "region")

    def __init__(self, endpoint: Endpoint, port: Header, phases: dict[str, float]) -> None:
        """`port` is the public port, as a field for another proxy."""
        self._endpoint = endpoint
        self._ended = False
        self.address = endpoint.address
        self.headers = (*endpoint.headers, port) if endpoint.headers else ()
        self.machine = endpoint.machine
        self.region = endpoint.region
        self.phases = phases

    @property
    def load(self) -> bytes:
        entry = self._endpoint.entry
        return b"%d/%d/%d" % (entry.in_flight, entry.soft, entry.row.hard)

    @property
    def others(self) -> int:
        endpoint = self._endpoint
        return endpoint.wait_queue.idle(endpoint.machine) if endpoint.entry.full else 0

    def heard(self, load: bytes) -> None:
        self._endpoint.owner.heard(self._endpoint, load)

    def release(self) -> None:
        if not self._ended:
            self._ended = True
            self._endpoint.owner.answered(self._endpoint)
            self._endpoint.leave()

    def failed(self, how: Failure) -> None:
        if not self._ended:
            self._ended = True
            self._endpoint.owner.failed(self._endpoint, how)
            self._endpoint.leave()
