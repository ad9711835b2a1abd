"""Records of the log: how one is written, and how its checksum is computed.

A record's checksum covers the checksum before it, so a record that was changed, lost or put in between is noticed by
`store.verify`, which names its sequence number.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

CHECKSUM_BYTES = 8
GENESIS = bytes(CHECKSUM_BYTES)

COLUMNS = "seq, at_ms, kind, resource, flow, run, step, attempt, cause, trace, data, writes, checksum"
INSERT = f"insert into log ({COLUMNS}) values (?,?,?,?,?,?,?,?,?,?,?,?,?)"
BYTES = ", ".join(
    name if name in ("seq", "at_ms", "attempt") else f"cast({name} as blob)" for name in COLUMNS.split(", ")
)
"""The columns for checking: text as its bytes, because damaged text may not be UTF-8 any more."""

_encode = msgspec.json.Encoder().encode
_decode_writes = msgspec.json.Decoder(list[tuple[str, str, msgspec.Raw]]).decode


class Record(msgspec.Struct, kw_only=True):
    """One operation. `cause` says who or which local rule asked; it is never empty."""

    kind: str
    resource: str
    cause: str
    flow: str = ""
    run: str = ""
    step: str = ""
    attempt: int = 0
    trace: str = ""
    data: dict[str, Any] = {}
    writes: list[bytes] = []  # each `[table, key, row or null]` as JSON

    def values(self, seq: int, at_ms: int, previous: bytes) -> tuple[Any, ...]:
        """The record's columns, in the order of `COLUMNS`."""
        if not self.cause:
            raise AssertionError(f"log: {self.kind} of {self.resource} without a cause")
        data = _encode(self.data).decode()
        writes = b"[" + b",".join(self.writes) + b"]"
        columns = (
            seq,
            at_ms,
            self.kind,
            self.resource,
            self.flow,
            self.run,
            self.step,
            self.attempt,
            self.cause,
            self.trace,
            data,
            writes,
        )
        return (*columns, checksum(previous, columns))


def write_image(table: str, key: str, body: bytes | None) -> bytes:
    """One entry of `Record.writes`; None is a deletion."""
    return b'["%s",%s,%s]' % (table.encode(), _encode(key), body if body is not None else b"null")


def read_images(writes: bytes) -> list[tuple[str, str, bytes | None]]:
    """The entries of a stored record. Raises `msgspec.DecodeError`."""
    return [(t, k, None if bytes(raw) == b"null" else bytes(raw)) for t, k, raw in _decode_writes(writes)]


def checksum(previous: bytes, columns: tuple[Any, ...]) -> bytes:
    """8 bytes over the previous checksum and every column before it, each led by its length.

    Text and its UTF-8 bytes give the same checksum.
    """
    parts = [previous]
    for value in columns:
        raw = value if isinstance(value, bytes) else str(value).encode()
        parts += (b"%d:" % len(raw), raw)
    return blake2b(b"".join(parts), digest_size=CHECKSUM_BYTES).digest()
