"""Ends a client's connection so that what was written arrives, although the client may still send.

A socket that is closed answers what comes after that with a reset, and the system drops what it still has for the
client. So the sending side alone is closed, and what comes is read, until the client ends the connection or has taken
all, and had a moment to see it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import struct
import termios
from contextlib import suppress

from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.tunnel import reset

_LOOKS = 4
"""How often within `linger_s` this code looks how much the client has taken."""


def part(transport: asyncio.Transport, settings: Settings) -> None:
    """End a transport that is open, and whose protocol drops what it reads. Over TLS, which asyncio does not half
    close, TLS itself goes on reading."""
    if transport.can_write_eof():
        transport.write_eof()
        loop = asyncio.get_running_loop()
        _look(transport, settings, loop, math.inf, loop.time())
    else:
        close(transport, settings)


def close(transport: asyncio.Transport, settings: Settings) -> None:
    """Close at once: the peer sends nothing more that matters."""
    transport.close()
    if transport.get_write_buffer_size():  # which the peer may never take
        asyncio.get_running_loop().call_later(settings.idle_timeout_s, transport.abort)


def _look(
    transport: asyncio.Transport, settings: Settings, loop: asyncio.AbstractEventLoop, left: float, moved_at: float
) -> None:
    if transport.is_closing() and not transport.get_write_buffer_size():
        return
    now, still = loop.time(), untaken(transport)
    if still < left:
        moved_at = now
    if now - moved_at < (settings.idle_timeout_s if still else settings.linger_s):
        loop.call_later(settings.linger_s / _LOOKS, _look, transport, settings, loop, still, moved_at)
    elif still:
        reset(transport)  # the system shall not keep what the client does not take, either
    else:
        transport.abort()


def untaken(transport: asyncio.Transport) -> int:
    """Bytes that were written and that the client's host has not acknowledged."""
    size = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):  # it is closed already
            size += struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    return size
