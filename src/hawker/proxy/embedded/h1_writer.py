"""Writes answers to a client that speaks HTTP/1: heads, framing, bodies. An answer's head and what is there of its body
go out in one write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from hawker.proxy.base import Header
from hawker.proxy.embedded.bodies import last_chunk
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.heads import ABSENT
from hawker.proxy.embedded.settings import Settings

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class H1Writer:
    """The half of a connection that writes. `_keep`: it serves further requests; `_minor` belongs to the request's
    version, `_exchange` gives the answer."""

    __slots__ = ("_chunked", "_exchange", "_keep", "_minor", "_out", "_settings", "_transport", "served")

    _settings: Settings
    _transport: asyncio.Transport
    _exchange: Exchange | None
    _minor: int
    _keep: bool
    _chunked: bool
    _out: list[bytes]
    served: int

    def interim(self, status: int, headers: Sequence[Header]) -> None:
        if self._minor:
            self._write_head(status, b"", headers)

    def answer(self, status: int, reason: bytes, headers: list[Header], length: int) -> None:
        self.answer_lines(status, reason, (b"\r\n".join(map(b": ".join, headers)),), length)

    def answer_lines(self, status: int, reason: bytes, lines: Sequence[bytes], length: int) -> None:
        head = b"HTTP/1.1 200 OK\r\n"
        if status != 200 or reason != b"OK":
            head = b"HTTP/1.1 %d %b\r\n" % (status, reason or _REASONS.get(status, b""))
        exchange = self._exchange
        if exchange is not None and exchange.sending:
            self._keep = False  # the answer is early: the rest of this request could not be told from the next one
        if self._settings.requests_per_connection and self.served + 1 >= self._settings.requests_per_connection:
            self._keep = False
        framing = b"\r\n\r\n"
        if length < 0 and length != ABSENT:
            if self._minor:
                self._chunked = True
                framing = b"\r\ntransfer-encoding: chunked\r\n\r\n"
            else:
                self._keep = False  # the body ends with the connection
        if not self._keep:
            framing = b"\r\nconnection: close" + framing
        elif not self._minor:
            framing = b"\r\nconnection: keep-alive" + framing
        self._out += (head, *lines, framing)

    def data(self, data: bytes) -> None:
        if self._chunked:
            self._out += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._out.append(data)

    def flush(self) -> None:
        out = self._out
        if out:
            self._out = []
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _write_head(self, status: int, reason: bytes, headers: Sequence[Header]) -> None:
        """Write a head that no body follows."""
        head = b"HTTP/1.1 %d %b\r\n" % (status, reason or _REASONS.get(status, b""))
        self._transport.write(head + b"".join([b"%b: %b\r\n" % field for field in headers]) + b"\r\n")

    def _write_end(self, trailers: Sequence[Header]) -> None:
        """Write all that is left of the answer."""
        out = self._out
        if self._chunked:
            self._chunked = False
            out.append(last_chunk(trailers))
        self._out = []
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))
