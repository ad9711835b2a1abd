"""Server-sent events (HTML standard, section 9.2): how they are written, and an answer made of them that never ends.

An event with an id is a place to resume from: a client that reconnects sends the last one it saw. An empty id takes
the place back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": still here\n\n"
SEND_S = 30.0
"""A client that takes nothing for this long is cut off. It may resume."""

_encode = msgspec.json.Encoder().encode


def event(name: str, data: Any, id: str | None = None) -> bytes:
    """One event; its data is JSON, which has no line ends."""
    lead = f"event: {name}\n" if id is None else f"event: {name}\nid: {id}\n"
    return lead.encode() + b"data: " + _encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends what the generator gives, until it ends or the client is gone; closes the generator then."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies pass events on as they come
        super().__init__(events, media_type=MEDIA_TYPE, headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.get_running_loop().create_task(self._send(send), name="events")
        gone = asyncio.get_running_loop().create_task(_gone(receive, sending), name="events gone")
        try:
            await asyncio.gather(sending, return_exceptions=True)
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()
        if not sending.cancelled() and (error := sending.exception()):
            raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._events:
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # left unfinished, so that the server closes the connection


async def _gone(receive: Receive, sending: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    sending.cancel()
