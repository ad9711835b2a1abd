"""What drivers ask of a host's network. `hawker.network.manager.Manager` is the real one.

A container's interface is one end of a veth pair that was moved into its network namespace, a microVM's is a tap. Both
end with the process that has them: a host whose agent was killed is left without interfaces of machines that are gone.
Filters and ports are put right by `reconcile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's interface has. `address6` is its private address; `address4` a private one that only its host
    knows, for connections out. Prefix lengths are 128 and 32; everything goes by `gateway6`, `gateway4`, whose hardware
    address is `gateway_mac`."""

    interface: str  # on the host
    mac: str
    address6: str
    gateway6: str
    address4: str
    gateway4: str
    gateway_mac: str
    resolver: str  # where name service answers, an IPv6 address
    mtu: int = 1500


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's network. `number` is its app's network, `publish` lists (protocol, internal port, host port)."""

    machine: str
    number: int
    address: str
    publish: tuple[tuple[str, int, int], ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator says of a worker's network. Networks are CIDRs of either family.

    Machines reach the internet, but no private network of the host's surroundings: `allowed` are exceptions, `denied`
    what they must not reach besides. `publish_on` are the host's addresses that published ports answer on, empty: all
    it has, loopback too. `pool4` is where machines' IPv4 addresses come from, known to their host only. `resolvers` are
    asked for names that are not private, empty: those of the host. `connections` a machine may have begun at once, and
    as many taken: 0 for any number, None for an eighth of what the host's kernel keeps.
    """

    publish_on: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    pool4: str = "100.64.0.0/10"
    resolvers: tuple[str, ...] = ()
    mtu: int = 1500
    connections: int | None = None


class HostNetwork(Protocol):
    """A host's network as drivers see it. Every call may be repeated. `own` is the worker's own address in it: what
    machines ask at `Attachment.resolver` arrives there."""

    @property
    def own(self) -> str: ...

    def plan(self, wanted: Wanted) -> Attachment:
        """The names and addresses a machine gets: the same from the first call until `detach`, also before it is
        attached, and after a restart of the agent as long as it is. After `detach` the IPv4 address may be another."""

    def holder(self, protocol: str, port: int) -> str:
        """Which program of the host has a port, as a sentence; "" for none. No machine's port is published there,
        because the program would be cut off, and attaching such a machine again is refused."""

    async def attach_namespace(self, wanted: Wanted, pid: int) -> Attachment:
        """Give the network namespace of a process (made, not yet running its program) its interface `eth0`, configured,
        and its loopback. Raises `NetworkError`; nothing is left then."""

    async def attach_tap(self, wanted: Wanted) -> Attachment:
        """Configure the host's side of the tap `interface`, once its owner has made it. The guest configures its
        own."""

    async def detach(self, machine: str) -> None:
        """Remove filters, routes, ports, and the interface where it is still there. Unknown machine: success."""

    async def reconcile(self, machines: Mapping[str, Wanted]) -> None:
        """Make filters, routes and ports what these machines need and remove those of all others. A machine whose
        interface is gone is not attached any more; to attach it again is its driver's business."""


class NetworkError(Exception):
    """The host's network could not be changed; the text says what the kernel refused."""


class AddressTaken(NetworkError):
    """Another worker of this host gave `address` to a machine of its own meanwhile."""

    def __init__(self, device: str, address: str) -> None:
        super().__init__(f"{device}: this host has a route to {address} already")
        self.address = address
