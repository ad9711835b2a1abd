"""What rtnetlink answers with, as values: of each message only what is asked for here. A host may have thousands."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NUMBER = struct.Struct("=I")
_ATTRIBUTE = struct.Struct("=HH")


class Link(NamedTuple):
    """`peer` is the number of the other end of a pair, in that one's namespace. `mode`: how it makes addresses."""

    number: int
    name: str
    flags: int
    mac: str
    peer: int
    mode: int


class Address(NamedTuple):
    link: int
    address: str


class Neighbour(NamedTuple):
    link: int
    state: int
    address: str
    mac: str


class Route(NamedTuple):
    """`length`: bits of the network that `address` begins. `link` 0: by no one link."""

    table: int
    length: int
    address: str
    link: int
    source: str


def link(message: bytes) -> Link:
    _, _, index, flags, _ = _LINK.unpack_from(message, HEADER.size)
    found = _attributes(message[HEADER.size + _LINK.size :])
    own = _attributes(_attributes(found.get(26, b"")).get(socket.AF_INET6, b""))
    name = found[3].rstrip(b"\0").decode()
    return Link(index, name, flags, _mac(found.get(1, b"")), _number(found, 5), own.get(8, b"\0")[0])


def address(message: bytes) -> Address:
    *_, index = _ADDRESS.unpack_from(message, HEADER.size)
    found = _attributes(message[HEADER.size + _ADDRESS.size :])
    return Address(index, _address(found.get(2) or found.get(1, b"")))


def neighbour(message: bytes) -> Neighbour:
    _, index, state, _, _ = _NEIGHBOUR.unpack_from(message, HEADER.size)
    found = _attributes(message[HEADER.size + _NEIGHBOUR.size :])
    return Neighbour(index, state, _address(found.get(1, b"")), _mac(found.get(2, b"")))


def route(message: bytes) -> Route:
    _, length, _, _, table, *_ = _ROUTE.unpack_from(message, HEADER.size)
    found = _attributes(message[HEADER.size + _ROUTE.size :])
    table = _number(found, 15) or table
    return Route(table, length, _address(found.get(1, b"")), _number(found, 4), _address(found.get(7, b"")))


def _attributes(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < 4:
            break
        found[kind & 0x3FFF] = data[at + 4 : at + size]
        at += size + 3 & ~3
    return found


def _number(attributes: dict[int, bytes], kind: int) -> int:
    found = attributes.get(kind)
    return int(_NUMBER.unpack(found)[0]) if found else 0


def _address(data: bytes) -> str:
    """As Python writes it, "" for none."""
    if len(data) == 16:
        return socket.inet_ntop(socket.AF_INET6, data)
    return socket.inet_ntop(socket.AF_INET, data) if len(data) == 4 else ""


def _mac(data: bytes) -> str:
    return data.hex(":")
