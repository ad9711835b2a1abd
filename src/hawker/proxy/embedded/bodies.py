"""Decodes chunked bodies by llhttp, cut exactly where they end, with their framing and their trailers bounded."""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from hawker.proxy.base import Header
from hawker.proxy.embedded.heads import BadHead, read_trailers
from hawker.proxy.embedded.settings import Settings

_HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"\r\n\r\n"
_FRAMED = 9
"""Bytes on the wire per byte of data at most, beside the slack: a chunk of one byte takes six."""


def chunk(data: bytes) -> bytes:
    """One chunk of data that is not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def last_chunk(trailers: Sequence[Header]) -> bytes:
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in trailers])


class Chunks:
    """Decodes one body: `feed` what comes, take `pieces` away, until `done`; then `trailers` are there.

    llhttp does not say where in its input a message ended, and would read on into the next one. But every chunked body
    ends in an empty line, so it is given its input in pieces that end at one.
    """

    __slots__ = (
        *("_begun", "_data", "_limits", "_parser", "_raw", "_raw_bytes", "_since", "_tail", "_trailing", "_wire"),
        *("done", "pieces", "trailers"),
    )

    def __init__(self, limits: Settings) -> None:
        self.pieces: list[bytes] = []
        self.trailers: Sequence[Header] = ()
        self.done = False
        self._limits = limits
        self._raw: list[Header] = []
        self._raw_bytes = 0  # bytes of complete trailers
        self._wire = 0
        self._data = 0
        self._trailing = False  # no data came since the last chunk's size
        self._since = 0  # bytes of the inputs after the one with that size
        self._tail = b""
        self._begun = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> bytes:
        """Decode more of the body. Returns what follows the body. Raises `BadHead`."""
        start = 0
        if self._tail:
            across = (self._tail + data[:3]).find(_END)
            if across >= 0:
                start = across + 4 - len(self._tail)
                self._feed(memoryview(data)[:start])
        end = start
        while not self.done:
            found = data.find(_END, end)
            if found < 0:
                if start < len(data):
                    self._feed(memoryview(data)[start:] if start else data)
                self._tail = (self._tail + data)[-3:] if len(data) < 3 else data[-3:]
                return b""
            self._feed(memoryview(data)[start : found + 4])
            start = found + 4
            end = found + 2  # the next empty line may share this one's end
        return data[start:]

    def _feed(self, data: bytes | memoryview) -> None:
        self._wire += len(data)
        self._since += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadHead(f"the chunked body is malformed ({error})") from None
        limits = self._limits
        if self._trailing:
            if max(self._raw_bytes, self._since) > limits.head_bytes:
                raise BadHead(f"its trailers are longer than {limits.head_bytes} bytes")
            if len(self._raw) > limits.fields:
                raise BadHead(f"it has more than {limits.fields} trailers")
        # How much of it is one more trailer, which is not complete, is not known yet.
        framing = self._wire - self._raw_bytes
        if (self.done or not self._trailing) and framing > limits.framing_bytes + _FRAMED * self._data:
            raise BadHead("the chunked body is mostly framing")
        if self.done and self._raw:
            self.trailers = read_trailers(self._raw)

    # --- httptools callbacks -----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_chunk_header(self) -> None:
        self._trailing = True
        self._since = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            self._raw.append((name, value.strip()))
            self._raw_bytes += len(name) + len(value) + 4

    def on_body(self, data: bytes) -> None:
        self._trailing = False
        self._since = 0
        self._data += len(data)
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.done = True
