"""A reply whose body is read while it comes, for as long as the peer sends: logs followed live.

Each stream has a connection of its own, outside the pool: it may last for hours. A reader that falls behind makes the
peer wait, through TCP, once `BUFFER_BYTES_MAX` are held here. After the head no time limit holds, since silence is
right for a log; a reader that wants one puts it around its wait for the next chunk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from hawker.client.wire import PeerUnreachable, Wire

BUFFER_BYTES_MAX = 256 << 10
"""asyncio reads so much at once."""


class Stream(NamedTuple):
    """Head of a streamed reply, and its body in pieces of no particular size. `chunks` can be read once; it raises
    `PeerUnreachable` when the body breaks off."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class StreamConnection(Wire, AsyncIterator[bytes]):
    """A connection for one streamed request, and the iterator over its body."""

    def __init__(self, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(peer, loop)
        self._opened: asyncio.Future[Stream] = loop.create_future()
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self._paused = False
        self._over = False
        self._error: PeerUnreachable | None = None
        self._news: asyncio.Future[None] | None = None  # what the reader waits for

    def open(self, request: str, data: bytes, timeout_s: float, deadline: float) -> asyncio.Future[Stream]:
        """Write the request. The future is the head of the reply."""
        self._begin(request, data, timeout_s, deadline)
        return self._opened

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._news = self._loop.create_future()
            await self._news
        chunk = self._chunks.popleft()
        self._held_bytes -= len(chunk)
        if self._paused and self._held_bytes <= BUFFER_BYTES_MAX // 2 and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return chunk

    def give_up(self) -> None:
        """Nobody reads any more: close the connection, whatever is still to come."""
        self.abort()
        if self._opened.done() and not self._opened.cancelled():
            self._opened.exception()  # it may have failed as its caller was cancelled: asyncio would complain

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        self._body_bytes += len(data)
        self._held_bytes += len(data)
        self._chunks.append(data)
        if self._held_bytes > BUFFER_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _head(self) -> None:
        self._disarm()
        if not self._opened.done():
            self._opened.set_result(Stream(self._status, self._headers, self))

    def _end(self, *, reusable: bool) -> None:
        self._finish()
        self._over = True
        self._close()
        self._wake()

    def _fail(self, error: PeerUnreachable) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
        elif not self._opened.cancelled():
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
