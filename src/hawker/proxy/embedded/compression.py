"""Compresses answers with gzip, where the public port asks for it and client, app and kind of answer allow it."""

from __future__ import annotations

import re
import zlib

from hawker.proxy.base import Header
from hawker.proxy.embedded.heads import CHUNKED, UNTIL_CLOSE, AnswerHead, RequestHead

BYTES_LEAST = 512
"""The least length of a body that is compressed: smaller ones fit a packet anyway."""
LEVEL = 1
"""Compressing takes time from all other requests; higher levels take several times as much for a tenth less."""

_TYPES = frozenset(
    f"application/{kind}".encode()
    for kind in ("javascript", "json", "ld+json", "manifest+json", "wasm", "xhtml+xml", "xml", "rss+xml", "atom+xml")
) | {b"image/svg+xml", b"font/ttf", b"font/otf"}
_NOTHING = re.compile(rb"\s*q\s*=\s*0(?:\.0*)?\s*")
_STREAMED = b"text/event-stream"


class Gzip:
    """Compresses one body."""

    __slots__ = ("_deflate",)

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(LEVEL, wbits=31)

    def add(self, data: bytes) -> bytes:
        return self._deflate.compress(data)

    def pause(self) -> bytes:
        """Give out all that was added so far, for a client that has to see it now."""
        return self._deflate.flush(zlib.Z_SYNC_FLUSH)

    def end(self) -> bytes:
        return self._deflate.flush()


def compressible(request: RequestHead, head: AnswerHead) -> bool:
    """Whether compressing this answer pays, and is allowed (RFC 9110 8.4, RFC 9111 5.2.2.6)."""
    if request.method == b"HEAD" or head.status in (204, 206, 304) or not (head.length >= BYTES_LEAST or _open(head)):
        return False
    kind = b""
    fixed = False
    for name, value in head.headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
        elif name in (b"content-encoding", b"content-range"):
            return False
        elif name == b"cache-control":
            fixed = fixed or b"no-transform" in value.lower()
    if fixed or kind == _STREAMED or not (kind in _TYPES or kind.startswith(b"text/")):
        return False
    return any(name == b"accept-encoding" and _takes_gzip(value) for name, value in request.headers)


def compressed(fields: list[Header]) -> list[Header]:
    """The fields of the same answer compressed: another length, and no longer the same bytes as its ETag says."""
    passed: list[Header] = []
    vary = b"accept-encoding"
    for name, value in fields:
        if name == b"vary":
            vary = value + b", " + vary
        elif name == b"etag" and not value.startswith(b"W/"):
            passed.append((name, b"W/" + value))
        elif name not in (b"content-length", b"accept-ranges", b"content-md5", b"content-digest", b"digest"):
            passed.append((name, value))
    return [*passed, (b"content-encoding", b"gzip"), (b"vary", vary)]


def _open(head: AnswerHead) -> bool:
    return head.length in (CHUNKED, UNTIL_CLOSE)


def _takes_gzip(value: bytes) -> bool:
    """Whether Accept-Encoding allows gzip (RFC 9110 12.5.3)."""
    for part in value.lower().split(b","):
        coding, _, weight = part.strip().partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            return _NOTHING.fullmatch(weight) is None
    return False
