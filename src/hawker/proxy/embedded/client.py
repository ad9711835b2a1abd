"""A client's connection that speaks HTTP/1: requests one after another, each with its exchange, answers in their order.

A request is read only when the one before it was answered; what a client sends ahead waits, at first here and then in
its own socket. A head comes within its time or the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from hawker.proxy.base import Header, Refused
from hawker.proxy.embedded import refusals
from hawker.proxy.embedded.bodies import Chunks
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.exchange import Exchange
from hawker.proxy.embedded.h1_writer import H1Writer
from hawker.proxy.embedded.heads import CHUNKED, BadHead, RequestHead, never_a_head, read_request
from hawker.proxy.embedded.ingress import Ingress
from hawker.proxy.embedded.lingering_close import part
from hawker.proxy.embedded.tunnel import reset

_AWAITED, _BUSY, _LINGER, _CLOSED = -2, -3, -4, -5
"""As what is left to read: the next head; nothing until the answer is out; nothing ever again, but the client's end."""


class ClientConnection(H1Writer, asyncio.Protocol):
    """One for each connection that a listener accepts."""

    __slots__ = (
        "_choked",
        "_chunks",
        "_context",
        "_deadline",
        "_ended",
        "_head_s",
        "_held",
        "_hold",
        "_idle_s",
        "_ingress",
        "_ingress_of",
        "_last",
        "_last_raw",
        "_left",
        "_reading",
        "_searched",
        "_stopped",
    )

    def __init__(self, context: PlaneContext, ingress: Callable[[asyncio.Transport], Ingress]) -> None:
        self._context = context
        self._ingress_of = ingress
        self._ingress: Ingress
        self._settings = context.settings
        self._transport: asyncio.Transport
        self._deadline = Deadline(context.loop, self._late)
        self._exchange: Exchange | None = None
        self._left = _AWAITED
        self._held = b""
        self._searched = 0
        self._chunks: Chunks | None = None
        self._reading = False
        self._stopped = False  # reading from the transport is paused
        self._hold = False  # the machine takes no more of the body
        self._choked = False  # the client takes no more of the answer
        self._ended = False  # the client has closed its sending side
        self._keep = not context.retiring
        self._minor = 1
        self._head_s = context.settings.head_timeout_s
        self._idle_s = context.settings.idle_timeout_s
        self._out: list[bytes] = []
        self._chunked = False
        self._last: RequestHead
        self._last_raw = b""
        self.served = 0

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    def drain(self, *, patiently: bool = False) -> None:
        """Answer what is under way, and close."""
        self._keep = False
        if self._exchange is None and self._left == _AWAITED and not patiently:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        self._ingress = self._ingress_of(transport)
        transport.set_write_buffer_limits(self._settings.window_bytes)
        self._context.came(self, transport, edge=self._ingress.edge)
        self._deadline.within(self._head_s)

    def data_received(self, data: bytes) -> None:
        left = self._left
        if left == _AWAITED and not self._choked:
            self._read(data)
        elif left in (_AWAITED, _BUSY):
            self._held += data
            if len(self._held) > self._settings.window_bytes:
                self._stop()
        elif left > 0 or left == CHUNKED:
            self._deadline.within(self._idle_s)
            try:
                self._held = self._read_body(data)
            except BadHead as bad:
                self._refuse(refusals.of_head(bad.problem, bad.status))

    def eof_received(self) -> bool:
        """The client has closed its sending side. It has left, or still listens: which of both is seen when it is
        written to. Until then it gets the answers to all that it has asked, if they come soon."""
        asked = self._left == _BUSY or (self._left == _AWAITED and self._choked and bool(self._held))
        if not (asked and self._transport.can_write_eof()):
            self._left = _CLOSED
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.gone()
            return False
        self._ended = True
        if not self._held:
            self._keep = False
        self._transport.pause_reading()  # whoever goes on with the connection sees its end by reading on
        self._deadline.within(self._settings.half_closed_s)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._context.left(self)
        self._deadline.close()
        self._left = _CLOSED
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone()

    def pause_writing(self) -> None:
        self._choked = True
        if self._exchange is not None:
            self._exchange.pause()
        if self._left != _LINGER:
            self._deadline.within(self._idle_s)

    def resume_writing(self) -> None:
        self._choked = False
        if self._exchange is not None:
            self._exchange.resume()
            if self._ended:
                self._deadline.within(self._settings.half_closed_s)
            elif self._left == _BUSY:
                self._deadline.clear()
        elif self._left == _AWAITED and self._held:
            self._read(b"")

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Read heads, and bodies that came with them, until a request waits for its answer, or answers for their
        client."""
        if self._held:
            data = self._held + data
            self._held = b""
        self._reading = True
        try:
            while data and self._left == _AWAITED and not self._choked:
                if data == self._last_raw:  # a client asks the same again and again
                    self._searched = 0
                    data = self._begin(self._last, b"")
                    break
                if data[0] == 0x0D:
                    data = self._after_empty_line(data)
                end = data.find(b"\r\n\r\n", self._searched) + 4
                if not 4 <= end <= self._settings.head_bytes:
                    self._wait_for_head(data)
                    break
                self._searched = 0
                raw = data[:end]
                if raw == self._last_raw:
                    head = self._last
                else:
                    head = self._last = read_request(raw, self._settings.fields)
                    self._last_raw = raw
                data = self._begin(head, data[end:])
        except BadHead as bad:
            self._refuse(refusals.of_head(bad.problem, bad.status))
            data = b""
        self._reading = False
        self._held = data
        if self._ended:
            self._said_all()
        elif self._stopped:
            self._go_on()

    def _said_all(self) -> None:
        """The client has closed its sending side: what is left here and not waited for is no whole request."""
        if self._left == _AWAITED and not (self._choked and self._held):
            self._close()
        elif self._left > 0 or self._left == CHUNKED:
            exchange, self._exchange = self._exchange, None
            if exchange is not None:
                exchange.gone()
            self._close()

    def _after_empty_line(self, data: bytes) -> bytes:
        """Skip one empty line before a request, which old clients send (RFC 9112 2.2). Two are refused."""
        if data[:2] == b"\r\n":
            data = data[2:]
        if data[:1] == b"\r" and len(data) > 1:
            raise BadHead("empty lines, or a bare CR, before the request line")
        return data

    def _wait_for_head(self, data: bytes) -> None:
        """Keep a head of which not all is there. Raises `BadHead` when it will never be one."""
        limit = self._settings.head_bytes
        if len(data) > limit:
            raise BadHead(f"its head is longer than {limit} bytes", 431)
        if never_a_head(data, self._searched):
            raise BadHead("the head has a bare CR or LF")
        if not self._searched:
            self._deadline.within(self._head_s)
        self._searched = max(len(data) - 3, 1)

    def _begin(self, head: RequestHead, data: bytes) -> bytes:
        """`data` begins with the request's body. Returns what does not belong to it."""
        self._minor = head.minor
        if not head.keep_alive:
            self._keep = False
        exchange = self._exchange = Exchange(self._context, self, self._ingress, head)
        length = head.length
        if length > 0 or length == CHUNKED:
            self._left = length
            if length == CHUNKED:
                self._chunks = Chunks(self._settings)
            self._deadline.within(self._idle_s)
            if data:
                data = self._read_body(data)
        else:
            self._await_answer()
        if self._ended and not data:
            self._keep = False
        exchange.start()
        return data

    def _await_answer(self) -> None:
        self._left = _BUSY
        if self._ended:
            self._deadline.within(self._settings.half_closed_s)
        else:
            self._deadline.clear()

    def _read_body(self, data: bytes) -> bytes:
        """Read more of the body. Returns what follows it."""
        exchange = self._exchange
        assert exchange is not None
        left = self._left
        if left > 0:
            if len(data) < left:
                self._left = left - len(data)
                exchange.body(data)
                return b""
            exchange.body(data[:left])
            data = data[left:]
            trailers: Sequence[Header] = ()
        else:
            chunks = self._chunks
            assert chunks is not None
            data = chunks.feed(data)
            pieces, chunks.pieces = chunks.pieces, []
            for piece in pieces:
                exchange.body(piece)
            if not chunks.done:
                return b""
            self._chunks = None
            trailers = chunks.trailers
        self._await_answer()
        exchange.body_end(trailers)
        return data

    def _refuse(self, refusal: Refused) -> None:
        """What comes cannot be read as HTTP, or does not come: answer that, and close."""
        self._keep = False
        exchange = self._exchange
        if exchange is not None:
            exchange.refuse(refusal)
        else:
            self._context.counters.unread(refusal.status)
            status, headers, body = self._ingress.refusal(refusal, b"")
            self.answer(status, b"", headers, len(body))
            self.data(body)
            self._left = _LINGER
            self.end(())

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._transport.pause_reading()

    def _go_on(self) -> None:
        if self._stopped and not self._hold and len(self._held) <= self._settings.window_bytes:
            self._stopped = False
            self._transport.resume_reading()

    def _late(self) -> None:
        if self._choked or self._left == _CLOSED:
            reset(self._transport)  # the system shall not keep what the client does not take, either
        elif self._ended:
            self._transport.abort()
        elif self._left == _AWAITED:
            if self._held:
                self._refuse(Refused(408, "PH03", f"the request's head took longer than {self._head_s:g} s"))
            else:
                self._close()
        elif self._left > 0 or self._left == CHUNKED:
            self._refuse(Refused(408, "PH03", f"nothing of the request's body came for {self._idle_s:g} s"))

    def _close(self) -> None:
        self._left = _CLOSED
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._deadline.within(self._idle_s)  # a client that takes no more of it may stay for ever

    # --- the exchange's front ----------------------------------------------------------------------------------------

    def end(self, trailers: Sequence[Header]) -> None:
        self._write_end(trailers)
        exchange, self._exchange = self._exchange, None
        self._hold = False
        self.served += 1
        if self._keep:
            port = None if exchange is None else exchange.port
            if port is not None:
                self._head_s = port.headers_read_timeout_s
                self._idle_s = port.idle_timeout_s
            self._left = _AWAITED
            self._deadline.within(self._settings.half_closed_s if self._ended else self._idle_s)
            if self._stopped and not self._reading:
                self._go_on()  # the machine has answered without taking all of the request
            if self._held and not self._reading and not self._choked:
                self._read(b"")
        elif self._left == _BUSY and not self._held:
            self._close()
        else:
            self._linger()

    def cut(self) -> None:
        self._exchange = None
        self._left = _CLOSED
        self._out = []
        reset(self._transport)

    def switch(self, status: int, reason: bytes, headers: list[Header]) -> tuple[asyncio.Transport, bytes]:
        self._write_head(status, reason, headers)
        self._context.left(self)
        self._deadline.close()
        self._exchange = None
        early, self._held = self._held, b""
        return self._transport, early

    def hold(self, held: bool) -> None:
        self._hold = held
        if held:
            self._stop()
            if not self._choked:
                self._deadline.clear()  # the machine is slow, not the client
        elif self._stopped:
            self._go_on()
            if self._left > 0 or self._left == CHUNKED:
                self._deadline.within(self._idle_s)

    def _linger(self) -> None:
        """Close so that the answer arrives although the client still sends: a socket that is closed answers data with a
        reset, and the client would lose what it has not read yet."""
        self._left = _LINGER
        self._held = b""
        self._deadline.clear()
        if not self._transport.is_closing():
            part(self._transport, self._settings)
            if not self._transport.is_closing():
                self._go_on()
