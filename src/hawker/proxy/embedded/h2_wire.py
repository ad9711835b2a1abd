"""A connection of HTTP/2, of a client or to a machine: its frames, both directions' flow control, and floods that end
it.

What is to be sent waits in its stream as long as the peer's windows are shut or the socket is full, and streams that
wait take turns. What came is acknowledged to the peer once it went on, so that whoever sends too fast is stopped by its
own window. The state machine, HPACK and the framing are those of the library h2.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    StreamReset,
    UnknownFrameReceived,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes
from h2.settings import Settings as H2Settings
from hyperframe.frame import GoAwayFrame

from hawker.proxy.base import Header
from hawker.proxy.embedded.h2_floods import TOO_MUCH, Frames, Strikes
from hawker.proxy.embedded.lingering_close import close, part
from hawker.proxy.embedded.settings import Settings

_DEFAULT_WINDOW = 65_535
_WINDOW_MOST = (1 << 31) - 1
_QUANTUM = 16 << 10
"""How many bytes of one stream are sent before it is the next one's turn."""


class _OpenToTheEnd(H2ConnectionStateMachine):
    """A state machine that goes on after a GOAWAY: the library takes it for the end of everything, but it ends only new
    streams (RFC 9113, 6.8)."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        return [] if input_ is ConnectionInputs.RECV_GOAWAY else super().process_input(input_)


class Wire(asyncio.Protocol):
    """`client_side`: this end sends the requests. Subclasses say in `_heeded` which other events they look at."""

    _heeded: ClassVar[dict[type[Event], str]] = {}

    def __init__(self, settings: Settings, now: Callable[[], float], *, client_side: bool) -> None:
        self._settings = settings
        self._now = now
        self.h2 = h2 = H2Connection(
            H2Configuration(
                client_side=client_side,
                header_encoding=None,
                validate_inbound_headers=client_side,
                validate_outbound_headers=False,  # they were read strictly, or are our own
                normalize_outbound_headers=False,
            )
        )
        initial = {
            SettingCodes.MAX_CONCURRENT_STREAMS: settings.h2_streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: settings.head_bytes,
            SettingCodes.INITIAL_WINDOW_SIZE: settings.h2_window_bytes,
            SettingCodes.ENABLE_PUSH: 0,
        }
        if not client_side:
            initial[SettingCodes.ENABLE_CONNECT_PROTOCOL] = 1
            del initial[SettingCodes.ENABLE_PUSH]
        h2.state_machine = _OpenToTheEnd()
        h2.local_settings = H2Settings(client=client_side, initial_values=initial)
        h2.decoder.max_header_list_size = settings.head_bytes
        self.transport: asyncio.Transport
        self.streams: dict[int, Stream] = {}
        self.ended = False
        self.problem = ""
        self.broke_rules = False
        self._waiting: dict[int, Stream] = {}
        self._choked = False
        self._reading = False
        self._carried = False
        self._strikes = Strikes(settings, now)
        self._frames: Frames | None = None
        if not client_side:  # machines are trusted with what they ask for
            h2.incoming_buffer = self._frames = Frames(self._strikes, self._is_over)

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        transport.set_write_buffer_limits(self._settings.window_bytes)
        self.h2.initiate_connection()
        if self._window > _DEFAULT_WINDOW:
            self.h2.increment_flow_control_window(self._window - _DEFAULT_WINDOW)
        self.write()

    def data_received(self, data: bytes) -> None:
        if self.ended:
            return
        self._reading = True
        try:
            for event in self.h2.receive_data(data):
                heed = self._heeded.get(type(event)) or _HEEDED.get(type(event))
                if heed is not None and not self.ended:
                    getattr(self, heed)(event)
        except ProtocolError as error:
            self.broke_rules = True
            self._end(f"it broke the rules of HTTP/2: {error}")  # the library has said goodbye, with the reason
        self._reading = False
        if not self.ended:
            self._pump()
        if self._choked and not self.ended:
            self._bound()

    def eof_received(self) -> bool:
        self._end("it closed the connection")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection broke" if exc else "it closed the connection")

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        if not self.ended:
            self._pump()

    def _bound(self) -> None:
        """Whether the peer lets so much wait to be sent that it must ask for no more. No window holds back heads, nor
        what the library answers: a peer could ask on and on and take nothing."""
        self.write()
        each = self._settings.head_bytes + (_QUANTUM if self.h2.config.client_side else 0)
        if self.transport.get_write_buffer_size() > self._settings.h2_streams * each:
            self._end("it takes nothing of what it asks for")
            self.transport.abort()

    @property
    def _window(self) -> int:
        """The window of the connection. A client shares it among its own requests. A connection to a machine has the
        requests of many clients, and a client who takes nothing must stop nobody else: so all streams may be held up at
        once, and as much again of which the library has not told the machine yet that it was passed on. Each stream's
        own window bounds them."""
        settings = self._settings
        if not self.h2.config.client_side:
            return settings.h2_connection_window_bytes
        return min(2 * settings.h2_streams * settings.h2_window_bytes, _WINDOW_MOST)

    # --- for streams -------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Send what the library has to send; while what came is being read, later and all at once."""
        if not self._reading:
            data = self.h2.data_to_send()
            if data and not self.transport.is_closing():
                self.transport.write(data)

    def send_head(self, stream: Stream, fields: Sequence[Header], *, ended: bool = False) -> None:
        """Send something for a stream, unless the peer has reset it and this end is about to learn that."""
        try:
            self.h2.send_headers(stream.id, fields, end_stream=ended)
        except ProtocolError:
            stream.shut = True

    def wait(self, stream: Stream) -> None:
        """This stream has something to send."""
        self._waiting[stream.id] = stream
        if not self._reading:
            self._pump()

    def taken(self, stream: Stream, count: int) -> None:
        """So much of what came on this stream was passed on."""
        if count and not self.ended:
            self.h2.acknowledge_received_data(count, stream.id)
            self.write()

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        if not self.ended and not stream.shut:
            stream.shut = True
            try:
                self.h2.reset_stream(stream.id, code)
            except ProtocolError:
                return  # it is closed on both sides already
            finally:
                self.forget(stream)
            self.write()

    def forget(self, stream: Stream) -> None:
        """Forget a stream: nothing more is to be sent or heard on it."""
        stream.shut = True
        self._waiting.pop(stream.id, None)
        if self.streams.pop(stream.id, None) is not None:
            self.taken(stream, stream.untaken)
            stream.untaken = 0
            self._one_less()

    def goodbye(self) -> None:
        """Take no more streams. A GOAWAY of the library itself would stop those that are open, too."""
        frame = GoAwayFrame(0)
        frame.last_stream_id = self.h2.highest_inbound_stream_id
        frame.error_code = ErrorCodes.NO_ERROR
        self.write()
        if not self.transport.is_closing():
            self.transport.write(frame.serialize())

    def strike(self) -> None:
        """The client did what costs us more than it, and may therefore do only so often."""
        if self._frames is not None and not self.ended and self._strikes.add():
            self.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._end(TOO_MUCH)

    def pardon(self) -> None:
        """The client has done something useful."""
        self._strikes.pardon()

    def pushed(self, size: int) -> None:
        """So much data was sent."""
        self._carried = True
        if self._frames is not None:
            self._frames.sent(size)

    def _is_over(self, stream_id: int) -> bool:
        stream = self.h2.streams.get(stream_id)
        return stream_id <= self.h2.highest_inbound_stream_id and (stream is None or stream.closed)

    # --- events ------------------------------------------------------------------------------------------------------

    def _data(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        count = event.flow_controlled_length
        if not event.data and event.stream_ended is None:
            self.strike()
        if stream is None:
            if not self.ended:
                self.h2.acknowledge_received_data(count, event.stream_id)
        else:
            stream.moved_at = self._now()
            self._carried |= bool(event.data)
            stream.untaken += count
            stream.came(event.data)
            if not stream.held and not stream.shut:
                stream.untaken = 0
                self.h2.acknowledge_received_data(count, event.stream_id)

    def _stream_reset(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            self.forget(stream)
            stream.gone(event)
        self.strike()

    def _control(self, event: Event) -> None:
        self.strike()

    def _ping(self, event: PingReceived) -> None:
        """A ping has come. One between any two frames with data is free: gRPC measures the path so."""
        if not self._carried:
            self.strike()
        self._carried = False

    def _goaway(self, event: ConnectionTerminated) -> None:
        if event.error_code == ErrorCodes.NO_ERROR:
            self._left_alone(event)
        else:
            self._end(f"it ended the connection ({event.error_code!r})")

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _left_alone(self, event: ConnectionTerminated) -> None:
        """The peer opens no more streams, or takes none. Those that are open go on."""

    def _one_less(self) -> None:
        """A stream is done."""

    def _over(self, problem: str) -> None:
        """The connection is done: each stream was told."""

    def _end(self, problem: str) -> None:
        if self.ended:
            return
        self.ended = True
        self.problem = problem
        self._waiting.clear()
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.shut = True
            stream.gone(None)
        self._over(problem)
        self._reading = False
        self.write()
        if not self.transport.is_closing():
            (close if self.h2.config.client_side else part)(self.transport, self._settings)

    def _pump(self) -> None:
        """Send what waits, a piece of each stream in turn, as far as windows and the socket allow."""
        again = True
        while again and not self._choked and not self.ended:
            again = False
            for stream in list(self._waiting.values()):
                moved, more = stream.push(_QUANTUM)
                if not more:
                    self._waiting.pop(stream.id, None)
                again |= moved and more
            self.write()


class Stream:
    """One stream of a connection. `untaken` bytes came and were not passed on yet; `held`: it shall wait. `shut`:
    nothing may be sent. `moved_at`: when the peer last gave or took something, of the loop's clock. `given` are the
    bytes that the peer took, `given_before` those that it took before `since`, when there was something to be sent for
    the first time."""

    __slots__ = (
        *("_end", "_out", "_trailers", "given", "given_before", "held", "id", "moved_at", "shut", "since", "untaken"),
        "wire",
    )

    def __init__(self, wire: Wire, stream_id: int) -> None:
        self.wire = wire
        self.id = stream_id
        self.held = False
        self.shut = False
        self.untaken = 0
        self.moved_at = self.since = wire._now()
        self.given = self.given_before = 0
        self._out = bytearray()
        self._end = False
        self._trailers: Sequence[Header] = ()

    def came(self, data: bytes) -> None:
        """Data that the peer sent."""
        raise NotImplementedError

    def gone(self, event: StreamReset | None) -> None:
        """The peer reset the stream, or the connection ended."""
        raise NotImplementedError

    def drained(self) -> None:
        """Most of what was to be sent is sent."""

    def sent(self) -> None:
        """All that was to be sent is sent, and the end, too."""

    @property
    def pending(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._out)

    def put(self, data: bytes) -> None:
        if not self.shut:
            if not self._out:
                self.begin_to_wait()
            self._out += data

    def begin_to_wait(self) -> None:
        """Watch from here on how fast the peer takes what is sent."""
        self.since = self.wire._now()
        self.given_before = self.given

    def finish(self, trailers: Sequence[Header]) -> None:
        """End the stream: nothing is sent after this."""
        self._end = True
        self._trailers = trailers

    def go_on(self) -> None:
        """Send on what was held back, and take more of it."""
        self.held = False
        count, self.untaken = self.untaken, 0
        self.wire.taken(self, count)

    def push(self, most: int) -> tuple[bool, bool]:
        """Send up to so many bytes. Returns whether any were sent, and whether there are more."""
        if self.shut:
            return False, False
        h2, out = self.wire.h2, self._out
        moved = False
        try:
            while out and most > 0:
                size = min(h2.local_flow_control_window(self.id), h2.max_outbound_frame_size, len(out), most)
                if size <= 0:
                    return moved, True
                data = bytes(out[:size])
                del out[:size]
                most -= size
                moved = True
                self.given += size
                self.moved_at = self.wire._now()
                self.wire.pushed(size)
                if not out and self._end and not self._trailers:
                    h2.send_data(self.id, data, end_stream=True)
                    self.sent()
                    return True, False
                h2.send_data(self.id, data)
                if len(out) <= _QUANTUM:
                    self.drained()
            if out:
                return True, True
            if self._end:
                if self._trailers:
                    h2.send_headers(self.id, self._trailers, end_stream=True)
                else:
                    h2.send_data(self.id, b"", end_stream=True)
                self.sent()
        except StreamClosedError:
            self.wire.forget(self)
        return moved, False


_HEEDED: dict[type[Any], str] = {
    DataReceived: "_data",
    StreamReset: "_stream_reset",
    PingReceived: "_ping",
    PriorityUpdated: "_control",
    RemoteSettingsChanged: "_control",
    UnknownFrameReceived: "_control",
    ConnectionTerminated: "_goaway",
}
