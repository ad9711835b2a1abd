"""One HTTP/1.1 connection as bytes go over it: what is read is parsed, bounded and timed; what breaks is named.

`Wire` is the `asyncio.Protocol` that both kinds of connection share: it feeds httptools' parser, keeps one deadline
and turns every way a connection can end into `PeerUnreachable`. `client/connection.py` builds request and reply on it,
`client/stream.py` a body read as it comes. Nothing here knows the pool.

Rules of the wire: one request at a time, so bytes that nobody asked for end the connection; interim answers (status
1xx) are passed over; a body without a length ends with the connection. No redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import httptools

from hawker.client.deadline import EXTENSIONS_MOST, extension_s
from hawker.errors import Unreachable

HEAD_BYTES_MAX = 64 << 10
"""The head of a reply may have so many bytes. nginx and Go allow 8 KiB and 1 MiB; agents send under 1 KiB."""
FRAMING_PER_BODY_BYTE = 8
"""What chunks may add: a chunk of one byte takes six. More is an endless extension or trailer, kept in memory."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class PeerUnreachable(Unreachable):
    """No answer, or a broken one. `sent` says whether bytes of the request may have reached the peer.

    With `sent` false nothing happened and the request may be made again anywhere; otherwise its outcome is in doubt.
    """

    def __init__(self, peer: str, problem: str, *, sent: bool) -> None:
        doubt = "whether it acted is not known" if sent else "nothing was sent"
        super().__init__(f"{peer} {problem}; {doubt}", details={"peer": peer, "sent": sent})
        self.peer = peer
        self.sent = sent


class Stale(PeerUnreachable):
    """A connection that had served before was closed by the peer without one byte of reply, as idle ones are."""


class Wire(asyncio.Protocol):
    """The common part. A subclass says what to do with the head (`_head`), the body (`on_body`) and the end (`_end`,
    `_fail`)."""

    def __init__(self, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.gone: asyncio.Future[None] = loop.create_future()  # done when the transport is closed
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._request = ""  # method and target of the request under way, for errors; "" when there is none
        self._sent = False
        self._replies = 0
        self._status = 0
        self._headers: dict[str, str] = {}
        self._wire_bytes = 0  # of the reply, as received
        self._body_bytes = 0  # of the reply, without head and framing
        self._body_bytes_max = math.inf
        self._head_done = False
        self._complete = False
        self._keep_alive = False
        self._surplus = False  # something follows the reply
        self._deadline: float | None = None
        self._timeout_s = 0.0
        self._extensions = 0  # how many times the deadline was extended
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether a request can be sent: the peer has not closed, as far as this loop has seen."""
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close at once. A request under way fails as in doubt."""
        self._break("was given up")

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # asyncio has set TCP_NODELAY
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if not self._request or self._parser is None:
            self._close()  # bytes nobody asked for: at best a stale reply, never the next one
            return
        self._wire_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._break(f"answered {self._request} with something that is not HTTP/1.1 ({error})")
                return
            self._surplus = True
        if self._body_bytes > self._body_bytes_max:
            self._break(f"answered {self._request} with a body of more than {self._body_bytes_max} bytes")
        elif self._complete:
            self._end(reusable=self._keep_alive and not self._surplus)
        elif self._wire_bytes > HEAD_BYTES_MAX + FRAMING_PER_BODY_BYTE * self._body_bytes:
            self._break(f"answered {self._request} with a head or framing of more than {HEAD_BYTES_MAX} bytes")

    def eof_received(self) -> None:
        """The transport closes itself after this. A body without a length is complete now."""
        if self._request and self._head_done and not self._complete and self._ends_with_connection():
            self._complete = True
            self._end(reusable=False)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = f" ({exc})" if exc else ""
        if not self._request:
            pass
        elif self._wire_bytes:
            self._break(f"broke off its answer to {self._request} after {self._wire_bytes} bytes{reason}")
        else:
            self._break(f"closed the connection before it answered {self._request}{reason}", stale=self._replies > 0)
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport = None
        self._parser = None  # parser and protocol hold each other
        if not self.gone.done():
            self.gone.set_result(None)

    # --- httptools callbacks -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._surplus:
            return
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._head_done = True
            self._head()

    def on_body(self, data: bytes) -> None:
        """Part of the body, or of what follows the reply: `_complete` tells them apart. Must not raise."""
        raise NotImplementedError

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._status >= 200:
            self._keep_alive = self._parser.should_keep_alive()
            self._complete = True
        else:
            self._headers = {}

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _head(self) -> None:
        """The head of the reply is there. Called inside the parser: must not raise."""

    def _end(self, *, reusable: bool) -> None:
        """The reply is complete."""
        raise NotImplementedError

    def _fail(self, error: PeerUnreachable) -> None:
        """The reply will not come. Called once per request."""
        raise NotImplementedError

    def _begin(self, request: str, data: bytes, timeout_s: float, deadline: float) -> None:
        """Write a request and start its time-out. `deadline` is on the loop's clock."""
        self._request = request
        self._headers = {}
        self._wire_bytes = self._body_bytes = 0
        self._head_done = self._complete = self._surplus = False
        self._timeout_s = timeout_s
        self._extensions = 0
        if self._transport is None or self._transport.is_closing():
            self._sent = False
            self._break(f"closed the connection before {request} was written", stale=self._replies > 0)
            return
        self._transport.write(data)
        # A transport tries to send at once, and closes when the system refuses: then not a byte has left.
        self._sent = not self._transport.is_closing()
        self._arm(deadline)

    def _finish(self) -> None:
        """Forget the request: its reply was handed over."""
        self._request = ""
        self._replies += 1
        self._deadline = None

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _break(self, problem: str, *, stale: bool = False) -> None:
        """Close the connection and fail the request under way, if there is one."""
        self._close()
        self._disarm()
        if self._request:
            self._request = ""
            self._fail((Stale if stale else PeerUnreachable)(self.peer, problem, sent=self._sent))

    def _ends_with_connection(self) -> bool:
        return "content-length" not in self._headers and "chunked" not in self._headers.get("transfer-encoding", "")

    # --- the deadline ------------------------------------------------------------------------------------------------
    # One timer per connection, moved only when it fires: a timer per request would cost two operations on the loop's
    # heap for something that almost never happens.

    def _arm(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._tick)
        elif self._timer.when() > deadline:
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._tick)

    def _disarm(self) -> None:
        self._deadline = None

    def _tick(self) -> None:
        fired, self._timer = self._timer, None
        if self._deadline is None or fired is None:
            return
        if self._deadline > fired.when():  # a later request has moved it
            self._arm(self._deadline)
        elif self._extensions < EXTENSIONS_MOST and (
            more := extension_s(self._loop.time() - self._deadline, self._timeout_s)
        ):
            self._extensions += 1
            self._arm(self._loop.time() + more)
        else:
            part = "only part of its" if self._wire_bytes else "no"
            self._break(f"gave {part} answer to {self._request} within {self._timeout_s:g} s")
