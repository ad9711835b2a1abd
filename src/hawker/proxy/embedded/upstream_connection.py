"""A connection to a machine, or to its worker's proxy: it carries one request at a time, and reads the answer as it
comes.

The peer is not trusted: its head may leave room for two readings, its answer may be unasked for, or longer than
declared. The first becomes 502; after the others the connection is not used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

from hawker.core.retrying import IDEMPOTENT
from hawker.proxy.base import Address, Failure, Header
from hawker.proxy.embedded.bodies import Chunks, chunk, last_chunk
from hawker.proxy.embedded.deadline import Deadline
from hawker.proxy.embedded.heads import ABSENT, CHUNKED, UNTIL_CLOSE, AnswerHead, BadHead, never_a_head, read_answer
from hawker.proxy.embedded.response_handler import ResponseHandler
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.tunnel import reset
from hawker.sockets import Sockets

GUARDED_BYTES = 16 << 10
"""A request of this size is taken by a machine's kernel at once, whatever the machine does."""
_HEAD = -4
"""What is left to read: the answer's head."""


class Idle(Protocol):
    """Where connections wait for their next request."""

    def put(self, connection: UpstreamConnection) -> None: ...

    def forget(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """`served` counts the answers that it has brought."""

    unseen = False
    """Whether the machine has told that it did nothing with the request, which only HTTP/2 can say."""

    __slots__ = (
        "__weakref__",
        "_chunked",
        "_chunks",
        "_guarded",
        "_handler",
        "_heard",
        "_held",
        "_idle",
        "_idle_s",
        "_interim_bytes",
        "_interims",
        "_keep",
        "_large",
        "_last",
        "_last_method",
        "_last_raw",
        "_left",
        "_method",
        "_paused",
        "_settings",
        "_sockets",
        "address",
        "deadline",
        "served",
        "transport",
        "waiting",
    )

    def __init__(
        self, address: Address, settings: Settings, idle: Idle, loop: asyncio.AbstractEventLoop, sockets: Sockets
    ) -> None:
        self.address = address
        self._sockets = sockets
        self.served = 0
        self.waiting = False
        self.transport: asyncio.Transport
        self._settings = settings
        self._idle = idle
        self.deadline = Deadline(loop, self._late)
        self._handler: ResponseHandler | None = None
        self._method = b""
        self._idle_s = settings.idle_timeout_s
        self._held = b""
        self._left = _HEAD
        self._heard = False
        self._keep = True
        self._interims = self._interim_bytes = 0
        self._chunked = False
        self._chunks: Chunks | None = None
        self._paused = False
        self._guarded = False
        self._large = False  # the request may still lie in the transport's buffer
        self._last: AnswerHead
        self._last_raw = self._last_method = b""

    # --- for the response handler -------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    def quiet(self) -> bool:
        """Whether nothing has come that this loop has not seen yet, such as the machine's end. This asks the system."""
        if self._has_come():
            self.transport.abort()
            return False
        return True

    def _has_come(self) -> bool:
        return self._sockets.has_come(self.transport)

    def asleep(self) -> None:
        """The machine was put to rest: it answers nothing that it has not begun to answer."""
        if self._handler is not None and not self._heard and self.usable and not self._has_come():
            self._break("timeout", "it was put to rest before it answered")

    @property
    def heard(self) -> bool:
        """Whether one byte of the answer has come."""
        return self._heard

    def send(self, handler: ResponseHandler, method: bytes, data: bytes, idle_s: float, chunked: bool) -> None:
        """Write a request's head, and as much of its body as is there. `idle_s` is how long nothing may come. What
        follows of the body is `chunked`."""
        self._handler = handler
        self._method = method
        self._idle_s = idle_s
        self._chunked = chunked
        self._left = _HEAD
        self._heard = False
        self._keep = True
        self._interims = self._interim_bytes = 0
        self._large = len(data) > GUARDED_BYTES
        guarded = method in IDEMPOTENT and len(data) <= GUARDED_BYTES and not handler.sending
        if guarded is not self._guarded:
            self._guard(guarded)
        self.transport.write(data)
        self.deadline.within(idle_s)

    def body(self, data: bytes) -> None:
        """Send more of the request's body."""
        self._large = True
        self.transport.write(chunk(data) if self._chunked else data)
        self.deadline.within(self._idle_s)

    def body_end(self, trailers: Sequence[Header]) -> None:
        if self._chunked:
            self.transport.write(last_chunk(trailers))
            self.deadline.within(self._idle_s)

    def pause(self) -> None:
        """Read no more: nobody takes it."""
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self.deadline.clear()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        self.deadline.within(self._idle_s)

    def hand_over(self, handler: ResponseHandler) -> None:
        """The rest of the answer goes to this handler."""
        self._handler = handler

    def abandon(self) -> None:
        """The response handler is gone, and with it the connection: what else would come has nobody to go to."""
        self._handler = None
        self.transport.abort()

    def close(self) -> None:
        self.transport.close()

    def release(self) -> asyncio.Transport:
        """Give up the transport, for another protocol."""
        self._handler = None
        self.deadline.close()
        if self._guarded:
            self._guard(False)
        return self.transport

    def unanswered_s(self, now: float) -> float:
        """For how long the first byte of an answer has been awaited; 0 where none is."""
        if self._handler is None or self._heard or self._handler.sending:
            return 0.0
        return max(0.0, now - (self.deadline.at - self._idle_s))

    def give_up(self, problem: str, every: bool) -> None:
        """Nobody answers here: break off a request that may be made elsewhere. `every`: break off the others, too."""
        handler = self._handler
        if handler is None or self._heard or not (every or handler.may_go_elsewhere):
            return
        if self.usable and not self._has_come():
            self._break("timeout", problem)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(self._settings.window_bytes)

    def data_received(self, data: bytes) -> None:
        handler = self._handler
        if handler is None:
            self.transport.abort()  # bytes nobody asked for: never the next request's answer
            return
        try:
            if self._left == _HEAD:
                self._heard = True
                self._read_head(data)
            else:
                self._read_body(data)
        except BadHead as bad:
            self._break("unhealthy", f"its answer is not HTTP: {bad.problem}")
            return
        if self._handler is handler:
            handler.flush()
            if not self._paused:
                self.deadline.within(self._idle_s)

    def eof_received(self) -> None:
        """The transport closes itself after this. A body without a length is complete now."""
        if self._handler is not None and self._left == UNTIL_CLOSE:
            self._finish([])

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.forget(self)
        if self._handler is not None and exc is not None:
            self._last_words()
        if self._handler is not None:
            if isinstance(exc, TimeoutError):
                self._break("timeout", f"its host acknowledged nothing for {self._settings.connect_timeout_s:g} s")
            else:
                self._break("reset", "it closed the connection before its answer was complete")
        self.deadline.close()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.stalled(True)

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.stalled(False)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        handler = self._handler
        assert handler is not None
        while True:
            if self._method == self._last_method and data.startswith(self._last_raw):
                head = self._last  # a machine says the same again and again, even with the same Date within a second
                data = data[len(self._last_raw) :]
                break
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > self._settings.head_bytes:
                if len(data) > self._settings.head_bytes:
                    raise BadHead(f"its head is longer than {self._settings.head_bytes} bytes")
                if never_a_head(data, 0):
                    raise BadHead("the head has a bare CR or LF")
                self._held = data
                return
            raw = data[:end]
            head = read_answer(raw, self._settings.fields, self._method)
            data = data[end:]
            if head.status >= 200:
                self._last, self._last_raw, self._last_method = head, raw, self._method
                break
            if head.status == 101:
                self._handler = None
                handler.switched(head, data)
                return
            self._interims += 1
            self._interim_bytes += end
            if self._interims > self._settings.interim_answers or self._interim_bytes > self._settings.head_bytes:
                raise BadHead("it has no end of 1xx answers")
            handler.interim(head)
            if self._handler is not handler:
                return
            if not data:
                return
        self._left = head.length
        self._keep = head.keep_alive
        if head.length == CHUNKED:
            self._chunks = Chunks(self._settings)
        if self._method == b"CONNECT" and head.status < 300:
            self._handler = None
            handler.switched(head, data)
            return
        handler.answer(head)
        if self._handler is not None and (data or head.length in (0, ABSENT)):
            self._read_body(data)

    def _read_body(self, data: bytes) -> None:
        handler = self._handler
        assert handler is not None
        left = self._left
        if left > 0:
            size = len(data)
            if size < left:
                self._left = left - size
                handler.data(data)
                return
            if size > left:
                self._keep = False
                data = data[:left]
            handler.data(data)
            self._finish([])
        elif left == CHUNKED:
            chunks = self._chunks
            assert chunks is not None
            rest = chunks.feed(data)
            if rest:
                self._keep = False
            pieces = chunks.pieces
            if pieces:
                chunks.pieces = []
                for piece in pieces:
                    handler.data(piece)
            if chunks.done and self._handler is handler:
                self._chunks = None
                self._finish(list(chunks.trailers))
        elif left == UNTIL_CLOSE:
            handler.data(data)
        else:
            if data:
                self._keep = False
            self._finish([])

    def _finish(self, trailers: list[Header]) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        self.served += 1
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        # A request that is not all there leaves its rest on the way, which the machine would take for the next one.
        unsent = handler.sending or (self._large and self.transport.get_write_buffer_size() > 0)
        if self._keep and self.usable and not unsent:
            self._left = _HEAD
            self._idle.put(self)
        else:
            self.transport.close() if not handler.sending else self.transport.abort()
            self.deadline.within(self._idle_s)  # so long the machine may take for the rest of the request
        handler.ended(trailers)

    def _last_words(self) -> None:
        """A machine that refuses a body answers and closes while we still write; the failed write ends the transport
        before its answer was read. It still lies in the socket."""
        if data := self._sockets.last_words(self.transport):
            self.data_received(data)

    def _guard(self, guarded: bool) -> None:
        """Have the kernel end the connection, or not, when the machine's host acknowledges nothing, neither the request
        nor, while its answer is awaited, a probe: another machine may take the request long before an answer is
        overdue. This is off while a body is on its way, since a machine that takes nothing for a while looks the same
        to the kernel."""
        self._guarded = guarded
        self._sockets.guard(self.transport, self._settings.connect_timeout_s if guarded else 0.0)

    def _break(self, how: Failure, problem: str) -> None:
        handler, self._handler = self._handler, None
        self.transport.abort()
        if handler is not None:
            handler.broken(how, problem)

    def _late(self) -> None:
        if self.waiting:
            self.transport.close()
        elif self._handler is not None:
            if self._handler.sending and not self._heard:
                self.deadline.within(self._idle_s)  # the machine waits for its request: the client's time-out counts
                return
            self._break("timeout", f"nothing came from it for {self._idle_s:g} s")
        else:
            reset(self.transport)
