"""What a TLS client says first: which server it wants and what it would speak (RFC 8446, 4.1.2; RFC 6066, 3; RFC 7301).

Read before the handshake begins, because OpenSSL settles the version before it tells the name, and the name's app says
which versions it takes. Nothing is believed for this: OpenSSL reads the same bytes again, strictly.
"""

from __future__ import annotations

import re

import msgspec

HANDSHAKE = 0x16
"""The type of the record that a connection of TLS begins with."""
MOST = 16 << 10
"""Bytes of a hello; the largest of common clients, with keys for quantum computers to come, have two thousand."""
RECORDS_MOST = 32
"""Records of a hello. Clients send one, or two where it is long. All are read again whenever one more byte comes, so
that thousands of tiny ones, each in a packet of its own, would keep a processor busy for minutes."""

_NAME = re.compile(rb"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_SERVER_NAME, _ALPN, _SUPPORTED_VERSIONS = 0, 16, 43
_CUT = "it is shorter than it says"


class BadHello(Exception):
    """It is none, or too long."""


class ClientHello(msgspec.Struct, frozen=True):
    """`name` in lower case without a last dot, "" when it says none. `newest` is the number of the newest version that
    it speaks, 0x304 for TLS 1.3. `alpn` in the client's order."""

    name: str = ""
    newest: int = 0
    alpn: tuple[bytes, ...] = ()


def read_hello(data: bytes) -> ClientHello | None:
    """`data` is what has come of the connection; None: the rest is still on its way. Raises `BadHello`."""
    hello = _joined(data)
    if hello is None:
        return None
    fields = _Fields(hello)
    newest = fields.number(2)
    fields.take(32)  # random
    fields.vector(1)  # session
    fields.vector(2)  # ciphers
    fields.vector(1)  # compressions
    name, alpn = "", tuple[bytes, ...]()
    if fields.left:
        extensions = _Fields(fields.vector(2))
        while extensions.left:
            kind = extensions.number(2)
            body = extensions.vector(2)
            if kind == _SERVER_NAME:
                name = _name(body)
            elif kind == _SUPPORTED_VERSIONS:
                versions = _Fields(_Fields(body).vector(1))
                found_versions = [0]
                while versions.left:
                    found_versions.append(versions.number(2))
                newest = max(version for version in found_versions if version & 0x0F0F != 0x0A0A)  # RFC 8701
            elif kind == _ALPN:
                protocols = _Fields(_Fields(body).vector(2))
                found = []
                while protocols.left:
                    found.append(protocols.vector(1))
                alpn = tuple(found)
    return ClientHello(name, newest, alpn)


def _joined(data: bytes) -> bytes | None:
    """The hello's body, put together from its records."""
    joined = b""
    start = records = 0
    while True:
        if len(joined) >= 4:
            if joined[0] != 1:
                raise BadHello("the first message is no hello")
            size = int.from_bytes(joined[1:4], "big")
            if size > MOST:
                raise BadHello(f"it has {size} bytes, more than {MOST}")
            if len(joined) >= 4 + size:
                return joined[4 : 4 + size]
        header = data[start : start + 5]
        if header[:1] not in (b"", b"\x16") or header[1:2] not in (b"", b"\x03"):
            raise BadHello("what comes is not TLS")
        if len(header) < 5:
            return None
        size = int.from_bytes(header[3:5], "big")
        if not 0 < size <= 1 << 14:
            raise BadHello("a record has no bytes, or too many")
        records += 1
        if records > RECORDS_MOST:
            raise BadHello(f"it comes in more than {RECORDS_MOST} records")
        joined += data[start + 5 : start + 5 + size]
        if len(data) < start + 5 + size and len(joined) < 4:
            return None
        start += 5 + size


def _name(body: bytes) -> str:
    names = _Fields(_Fields(body).vector(2))
    while names.left:
        kind = names.number(1)
        value = names.vector(2)
        if kind == 0:
            if _NAME.fullmatch(value) is None or len(value) > 254:
                raise BadHello("the server's name is not a name of DNS")
            return value.decode().lower().removesuffix(".")
    return ""


class _Fields:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise BadHello(_CUT)
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Read a field that has its length before it, a number of `size` bytes."""
        return self.take(self.number(size))
