"""The PROXY protocol, versions 1 and 2: what a load balancer says of a connection before the connection's own bytes.

    found = read_preface(held)                  # None: more is to come
    told, size = found                          # from where to where; the connection's own bytes begin at `size`

HAProxy's `doc/proxy-protocol.txt` is the specification. Never guessed: who is to send it sends it always, and what
comes from others is not looked at for it.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import Literal

import msgspec

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_V1 = b"PROXY "
_V1_MOST = 107
"""Bytes of the longest line of version 1 (section 2.1)."""
_V2_MOST = 4096
"""How much is read of what follows the fixed part of version 2: addresses take 36 bytes, and what else may be there is
skipped."""
_FAMILIES = {0x11: 4, 0x21: 16}
"""TCP over IPv4 and IPv6 -> bytes of an address."""


class BadPreface(Exception):
    """The connection does not begin as it must."""


class Way(msgspec.Struct, frozen=True):
    """Where a connection comes from, and where it was made to: addresses in letters, and ports."""

    source: tuple[str, int]
    target: tuple[str, int]


def read_preface(data: bytes) -> tuple[Way | None, int] | None:
    """What it says, and its length. No way is told by a load balancer that looks whether we are there, and of what it
    does not know. None: not all of it is there. Raises `BadPreface`."""
    if data[:12] == SIGNATURE[: len(data)]:
        return _version_2(data)
    if data[:6] == _V1[: len(data)]:
        return _version_1(data)
    raise BadPreface("it does not begin with the PROXY protocol")


def write_preface(version: Literal["v1", "v2"], way: Way) -> bytes:
    """Both addresses of a family, mapped ones as IPv4."""
    (source, source_port), (target, target_port) = way.source, way.target
    one, two = (ipaddress.ip_address(text.partition("%")[0]) for text in (source, target))
    if one.version == 6 and one.ipv4_mapped is not None and two.version == 6 and two.ipv4_mapped is not None:
        one, two = one.ipv4_mapped, two.ipv4_mapped
    if one.version != two.version:  # a load balancer may speak of users in IPv6 and come in IPv4
        one, two = (_as_6(address) for address in (one, two))
    if version == "v1":
        return f"PROXY TCP{one.version} {one} {two} {source_port} {target_port}\r\n".encode()
    addresses = one.packed + two.packed + struct.pack("!HH", source_port, target_port)
    family = 0x11 if one.version == 4 else 0x21
    return SIGNATURE + struct.pack("!BBH", 0x21, family, len(addresses)) + addresses


def _version_1(data: bytes) -> tuple[Way | None, int] | None:
    end = data.find(b"\r\n", 0, _V1_MOST)
    if end < 0:
        if len(data) >= _V1_MOST:
            raise BadPreface("its first line is too long")
        return None
    words = data[:end].decode("latin-1").split(" ")
    if words[1] == "UNKNOWN":
        return None, end + 2
    try:
        _, kind, source, target, *ports = words
        numbers = [int(port) for port in ports if port.isascii() and port.isdigit()]
        addresses = [ipaddress.ip_address(text) for text in (source, target)]
    except ValueError:
        raise BadPreface("its first line has no two addresses") from None
    if len(ports) != 2 or len(numbers) != 2 or max(numbers) > 65535:
        raise BadPreface("its first line has no two ports")
    if kind not in ("TCP4", "TCP6") or any(f"TCP{address.version}" != kind for address in addresses):
        raise BadPreface("its first line has addresses of another kind than it says")
    return Way((source, numbers[0]), (target, numbers[1])), end + 2


def _version_2(data: bytes) -> tuple[Way | None, int] | None:
    if len(data) < 16:
        return None
    begun, family, length = struct.unpack_from("!BBH", data, 12)
    if begun not in (0x20, 0x21):
        raise BadPreface("its version or command is not known")
    if length > _V2_MOST:
        raise BadPreface("it says more than belongs there")
    end = 16 + length
    if len(data) < end:
        return None
    size = _FAMILIES.get(family, 0)
    if begun == 0x20 or not size:  # LOCAL; or a way that is none of TCP over IP
        return None, end
    if length < 2 * size + 4:
        raise BadPreface("its addresses are not all there")
    one, two = data[16 : 16 + size], data[16 + size : 16 + 2 * size]
    ports = struct.unpack_from("!HH", data, 16 + 2 * size)
    return Way((str(ipaddress.ip_address(one)), ports[0]), (str(ipaddress.ip_address(two)), ports[1])), end


def _as_6(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv6Address:
    return address if address.version == 6 else ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
