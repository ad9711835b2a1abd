"""What trusted proxies, such as load balancers and CDNs in front of this one, say of a request.

    trusted = Trusted(["10.0.0.0/8"])
    if b"10.0.0.7" in trusted:
        told = trusted.told(b"10.0.0.7", fields)            # told.client, told.proto, told.port, told.host

Who asks is found from the right of `X-Forwarded-For`: each proxy adds there whom it was asked by, so an address counts
as long as whoever added it is trusted, and the first that is not trusted is the user's. What stands to the left of it
is what that user made up. So it is with nginx (`real_ip_recursive`), Caddy (`trusted_proxies_strict`) and Envoy.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hawker.core.forwarding import Field

FORWARDED = b"x-forwarded-"
_KEPT = 4096
"""How many addresses are remembered as trusted or not. There are few load balancers, and many users."""
_HOST = re.compile(rb"[A-Za-z0-9.-]{1,253}(?::\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::\d{1,5})?")
_SCHEMES = {b"http": b"http", b"ws": b"http", b"https": b"https", b"wss": b"https"}
"""Traefik says `wss` of a WebSocket."""
_PORTS = {b"http": 80, b"https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Told(msgspec.Struct, frozen=True):
    """`client` is the user's address. The others are empty, or 0, where nothing is said that makes sense: `proto` is
    `http` or `https`, `host` has its port."""

    client: bytes
    proto: bytes = b""
    port: int = 0
    host: bytes = b""


class Trusted:
    """Addresses and networks. Raises `ValueError` for what is neither."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._last: dict[int, list[int]] = {4: [], 6: []}  # addresses of each network, by version, in order
        self._first: dict[int, list[int]] = {4: [], 6: []}
        for network in _apart(ipaddress.ip_network(text) for text in networks):
            self._first[network.version].append(int(network.network_address))
            self._last[network.version].append(int(network.broadcast_address))
        self._known: dict[bytes, bool] = {}

    def __bool__(self) -> bool:
        return any(self._first.values())

    def __contains__(self, address: bytes) -> bool:
        known = self._known.get(address)
        if known is None:
            found = address_of(address)
            known = found is not None and self._has(found)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[address] = known
        return known

    def _has(self, address: Address) -> bool:
        number = int(address)
        at = bisect_right(self._first[address.version], number) - 1
        return at >= 0 and number <= self._last[address.version][at]

    def told(self, peer: bytes, fields: Iterable[Field]) -> Told:
        """What a request says that came from `peer`, which is trusted."""
        hops: list[bytes] = []
        proto = port = host = b""
        for name, value in fields:
            if name[:12] == FORWARDED:
                if name == b"x-forwarded-for":
                    hops += value.split(b",")
                elif name == b"x-forwarded-proto":
                    proto = value
                elif name == b"x-forwarded-port":
                    port = value
                elif name == b"x-forwarded-host":
                    host = value
        proto = _SCHEMES.get(_last(proto).lower(), b"")
        number = _last(port)
        told_port = int(number) if number.isdigit() and len(number) <= 5 and 0 < int(number) < 65536 else 0
        host = _last(host)
        return Told(
            client=self._client(peer, hops),
            proto=proto,
            port=told_port or _PORTS.get(proto, 0),
            host=host if _HOST.fullmatch(host) else b"",
        )

    def _client(self, peer: bytes, hops: Sequence[bytes]) -> bytes:
        client = peer
        for hop in reversed(hops):
            found = address_of(hop.strip())
            if found is None:  # "unknown", or a pseudonym: nobody can tell whom it hides
                break
            client = str(found).encode()
            if client not in self:
                break
        return client


def _apart(networks: Iterable[Network]) -> Iterator[Network]:
    """The networks in order of their addresses, none within another."""
    every = list(networks)
    yield from ipaddress.collapse_addresses(each for each in every if each.version == 4)
    yield from ipaddress.collapse_addresses(each for each in every if each.version == 6)


def address_of(text: bytes) -> Address | None:
    """An address with or without a port, which some load balancers add; an IPv4 address that is mapped into IPv6 as the
    IPv4 one."""
    host = text.decode("latin-1")
    if host[:1] == "[":
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if found.version == 6 else found


def _last(value: bytes) -> bytes:
    """The last entry of a list, which the trusted proxy wrote that connects to this one."""
    return value.rpartition(b",")[2].strip()
