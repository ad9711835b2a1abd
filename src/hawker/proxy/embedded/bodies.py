"""Chunked bodies: decoded by llhttp, cut exactly where they end, with their framing bounded."""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from hawker.proxy.base import Header
from hawker.proxy.embedded.heads import BadHead, read_trailers

_HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"\r\n\r\n"
_FRAMED = 9
"""Bytes on the wire per byte of data at most, beside the slack: a chunk of one byte takes six."""


def chunk(data: bytes) -> bytes:
    """Not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def last_chunk(trailers: Sequence[Header]) -> bytes:
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in trailers])


class Chunks:
    """Decodes one body: `feed` what comes, take `pieces` away, until `done`; then `trailers` are there.

    llhttp does not say where in its input a message ended, and would read on into the next one. But every chunked body
    ends in an empty line, so it is given its input in pieces that end at one.
    """

    __slots__ = ("_begun", "_data", "_parser", "_raw", "_slack", "_tail", "_wire", "done", "pieces", "trailers")

    def __init__(self, framing_bytes: int) -> None:
        self.pieces: list[bytes] = []
        self.trailers: Sequence[Header] = ()
        self.done = False
        self._raw: list[Header] = []
        self._slack = framing_bytes
        self._wire = 0
        self._data = 0
        self._tail = b""
        self._begun = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes) -> bytes:
        """Returns what follows the body. Raises `BadHead`."""
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
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadHead(f"the chunked body is malformed ({error})") from None
        if self._wire > self._slack + _FRAMED * self._data:
            raise BadHead("the chunked body is mostly framing")

    # --- httptools callbacks -----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            self._raw.append((name.lower(), value.strip()))

    def on_body(self, data: bytes) -> None:
        self._data += len(data)
        self.pieces.append(data)

    def on_message_complete(self) -> None:
        self.done = True
        if self._raw:
            self.trailers = read_trailers(self._raw)
