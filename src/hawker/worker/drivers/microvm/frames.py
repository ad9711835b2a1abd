"""Frames between the daemon and a guest's init, the host's side of `init/guest_wire.c`.

A frame is `[u32 length of the rest][u8 kind][u32 id][payload]`, little-endian, written as SLIP does (RFC 1055): END
after it, END and ESC inside replaced by two bytes. A frame whose length is not what it says is dropped: it was cut off
when a daemon or a connection ended. Payloads are bytes, or fields, each `[u32 length][bytes]`; numbers in fields are
decimal text. A guest is not trusted: frames longer than `FRAME_MAX` are dropped, and what does not parse is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

END, ESC = b"\xc0", b"\xdb"
_ESC_END, _ESC_ESC = b"\xdb\xdc", b"\xdb\xdd"
FRAME_MAX = 1 << 20
_HEAD = struct.Struct("<IBI")

Frame = tuple[str, int, bytes]
"""Kind, id, payload."""


class Malformed(Exception):
    """A payload that is not what its kind promises."""


def encode(kind: str, number: int, payload: bytes = b"") -> bytes:
    """Raises ValueError for one that is too long for the other side."""
    if len(payload) > FRAME_MAX - _HEAD.size:
        raise ValueError(f"a frame of {len(payload)} bytes, more than {FRAME_MAX - _HEAD.size}")
    raw = _HEAD.pack(len(payload) + 5, ord(kind), number) + payload
    return raw.replace(ESC, _ESC_ESC).replace(END, _ESC_END) + END


def fields(values: Iterable[bytes | str | int]) -> bytes:
    out = []
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode()
        out.append(struct.pack("<I", len(raw)) + raw)
    return b"".join(out)


def read_fields(payload: bytes) -> list[bytes]:
    """Raises `Malformed`."""
    found = []
    at = 0
    while at < len(payload):
        if at + 4 > len(payload):
            raise Malformed("a field is cut off")
        (length,) = struct.unpack_from("<I", payload, at)
        if at + 4 + length > len(payload):
            raise Malformed("a field is longer than its frame")
        found.append(payload[at + 4 : at + 4 + length])
        at += 4 + length
    return found


class Decoder:
    """Frames out of a stream that may begin in the middle of one."""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        *wholes, rest = data.split(END)
        for part in wholes:
            raw, too_long = self._rest + part, self._too_long
            self._rest, self._too_long = b"", False
            if not too_long and (frame := _parse(raw)):
                yield frame
        self._rest += rest
        if len(self._rest) > 2 * FRAME_MAX:
            self._rest, self._too_long = b"", True


def _parse(raw: bytes) -> Frame | None:
    if raw.endswith(ESC):  # cut off between the two bytes that stand for one
        return None
    raw = raw.replace(_ESC_END, END).replace(_ESC_ESC, ESC)
    if len(raw) < _HEAD.size or len(raw) > FRAME_MAX + 4:
        return None
    length, kind, number = _HEAD.unpack_from(raw)
    return (chr(kind), number, raw[_HEAD.size :]) if length == len(raw) - 4 else None
