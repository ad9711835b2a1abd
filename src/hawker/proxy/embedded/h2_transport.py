"""A stream of HTTP/2 as a transport, for tunnels: WebSocket over HTTP/2 (RFC 8441)."""

from __future__ import annotations

import asyncio
from typing import Any

from h2.errors import ErrorCodes

from hawker.proxy.embedded.h2_wire import Stream


class StreamTransport(asyncio.Transport):
    """The stream tells of what happens to it: `came`, `ended`, `lost`, `drained` and `all_sent`."""

    def __init__(self, stream: Stream, window_bytes: int) -> None:
        super().__init__()
        self._stream = stream
        self._window = window_bytes
        self._protocol: asyncio.Protocol | None = None
        self._held = b""
        self._paused = True
        self._closing = self._lost = False
        self._peer_ended = self._told_end = False
        self._own_ended = self._all_sent = False
        self._choked = False

    # --- for the stream ----------------------------------------------------------------------------------------------

    def came(self, data: bytes) -> None:
        if self._closing:
            return
        if self._paused or self._protocol is None:
            self._held += data
            self._stream.held = True
        else:
            self._protocol.data_received(data)

    def ended(self) -> None:
        self._peer_ended = True
        if not self._paused:
            self._tell_end()

    def drained(self) -> None:
        if self._choked and self._protocol is not None:
            self._choked = False
            self._protocol.resume_writing()

    def all_sent(self) -> None:
        self._all_sent = True
        self._perhaps_over()

    def lost(self, error: Exception | None) -> None:
        """The stream is no more."""
        if not self._lost:
            self._lost = self._closing = True
            asyncio.get_running_loop().call_soon(self._tell_lost, error)

    # --- asyncio.Transport -------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Nothing: the socket is not this stream's alone."""
        return default if name == "socket" else self._stream.wire.transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._closing or self._own_ended:
            return
        self._stream.put(bytes(data))
        self._stream.wire.wait(self._stream)
        if self._stream.pending > self._window and not self._choked and self._protocol is not None:
            self._choked = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._own_ended and not self._lost:
            self._own_ended = True
            self._stream.finish(())
            self._stream.wire.wait(self._stream)

    def get_write_buffer_size(self) -> int:
        return self._stream.pending

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._window // 4, self._window

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._closing or self._protocol is None:
            return
        held, self._held = self._held, b""
        if held:
            self._protocol.data_received(held)
        if not self._paused:
            self._stream.go_on()
            if self._peer_ended:
                self._tell_end()

    def close(self) -> None:
        if not self._closing:
            self.write_eof()
            self._closing = True
            self._held = b""
            self._stream.go_on()
            self._perhaps_over()

    def abort(self) -> None:
        if not self._lost:
            self._stream.wire.reset(self._stream, ErrorCodes.CANCEL)
            self.lost(None)

    # --- and their end -----------------------------------------------------------------------------------------------

    def _tell_end(self) -> None:
        if not self._told_end and self._protocol is not None:
            self._told_end = True
            if not self._protocol.eof_received():
                self.close()
            self._perhaps_over()

    def _perhaps_over(self) -> None:
        if self._all_sent and (self._peer_ended or self._closing) and not self._lost:
            if self._peer_ended:
                self._stream.wire.forget(self._stream)
            else:
                self._stream.wire.reset(self._stream, ErrorCodes.NO_ERROR)
            self.lost(None)

    def _tell_lost(self, error: Exception | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)
