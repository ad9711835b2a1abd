"""Connections of the simulated network: two ends, and a pipe for each direction.

A pipe carries segments in order. What was written in one round of the loop is one segment. A segment that is lost
comes after a retransmission time-out that doubles; while a link is cut it is tried again and again, and after
`GIVE_UP_S` the sender's system ends the connection.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hawker.sim.platform.links import Links
from hawker.sim.platform.processes import Process, Station

RTO_S = 0.2
RTO_S_MAX = 5.0
GIVE_UP_S = 60.0
PROBE_S = 0.5
HIGH_WATER = 64 << 10
READ_BYTES_MAX = 256 << 10  # as much as asyncio reads at once

CONNECT, DATA, FIN, RESET = b"C", b"D", b"F", b"R"


class _Segment(NamedTuple):
    kind: bytes
    data: bytes
    at_s: float
    call: Callable[[], None] | None


class Pipe:
    """One direction of a connection. `end` is the reading end, once it is there; `sender` the writing one."""

    def __init__(self, net: Links, source: Station, to: Station) -> None:
        self.end: StreamEnd | None = None
        self.sender: StreamEnd | None = None
        self.broken = False
        self._net = net
        self._source = source
        self._to = to
        self._link = net.link(source, to)
        self._written: list[tuple[bytes, bytes, Callable[[], None] | None]] = []
        self._flying: deque[_Segment] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck_since: float | None = None
        self._guard_s = 0.0
        self._guarding = False
        self._unheard_since: float | None = None

    def guard(self, seconds: float) -> None:
        """Look whether the other host is there, and give up when there is no sign of it for so long: the time-outs that
        a program sets for a connection (TCP_USER_TIMEOUT with SO_KEEPALIVE). 0: no more."""
        self._guard_s = seconds
        self._unheard_since = None
        if seconds and not self._guarding:
            self._guarding = True
            self._net.later(PROBE_S, self._probe)

    def _probe(self) -> None:
        if not self._guard_s or self.broken or self.sender is None or self.sender.gone:
            self._guarding = False
            return
        now = self._net.loop.time()
        if self._to.up and not self._link.cut and not self._net.link(self._to, self._source).cut:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = now
        elif now - self._unheard_since >= self._guard_s:
            self._guarding = False
            self._give_up()
            return
        self._net.later(PROBE_S, self._probe)

    def send(self, kind: bytes, call: Callable[[], None] | None = None, data: bytes = b"") -> None:
        if self.broken:
            return
        if not self._written:
            self._net.soon(self._launch)
        self._written.append((kind, data, call))

    def _launch(self) -> None:
        """Put everything that was written in this round on its way."""
        written, self._written = self._written, []
        delay_s, rto_s = self._link.delay_s(), RTO_S
        while not self._link.cut and self._link.loses() and delay_s < GIVE_UP_S:
            delay_s += rto_s
            rto_s *= 2
        at_s = max(self._net.loop.time() + delay_s, self._flying[-1].at_s if self._flying else 0.0)
        data = b"".join(data for kind, data, _ in written if kind == DATA)
        for kind, _, call in written:
            if kind == DATA:
                if data:
                    self._flying.append(_Segment(DATA, data, at_s, None))
                data = b""
            else:
                self._flying.append(_Segment(kind, b"", at_s, call))
        if self._timer is None and self._flying:
            self._timer = self._net.later(delay_s, self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        now = self._net.loop.time()
        if self.broken or not self._flying:
            return
        if self._link.cut or not self._to.up or not self._source.up:
            self._stuck_since = now if self._stuck_since is None else self._stuck_since
            if now - self._stuck_since > GIVE_UP_S or not self._source.up:
                self._give_up()
                return
            self._timer = self._net.later(min(max(RTO_S, now - self._stuck_since), RTO_S_MAX), self._arrive)
            return
        self._stuck_since = None
        while self._flying and self._flying[0].at_s <= now and not self.broken:
            self._deliver(self._flying.popleft())
        if self._flying and not self.broken:
            self._timer = self._net.later(self._flying[0].at_s - now, self._arrive)

    def _deliver(self, segment: _Segment) -> None:
        if segment.call:
            segment.call()
            return
        if segment.data and self._net.on_stream(self._source, self._to, segment.data):
            if self.end:
                self.end.lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            self._refuse()
            return
        self._net.record.note(
            "stream", self._to.name, b"%b %b %b" % (self._source.name.encode(), segment.kind, segment.data)
        )
        if self.end is None or self.end.gone:
            if segment.kind != RESET:
                self._refuse()
            return
        self.end.arrived(segment.kind, segment.data)

    def _refuse(self) -> None:
        """Nobody has this connection any more: say so to whoever still writes into it."""
        self.broken = True
        if self.sender and not self.sender.gone:
            sender = self.sender
            self._net.travel(self._to, self._source, lambda: sender.arrived(RESET, b""))

    def _give_up(self) -> None:
        self.broken = True
        if self.sender and not self.sender.gone:
            self.sender.lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def consumed(self, count: int) -> None:
        """The reader has taken bytes: the writer may go on."""
        if self.sender:
            self.sender.acknowledged(count)


class Listener:
    """A program that takes connections on a port."""

    def __init__(
        self, net: Links, process: Process, station: Station, factory: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self.process = process
        self._net = net
        self._station = station
        self._factory = factory
        self._context = contextvars.copy_context()

    def accept(self, there: Pipe, back: Pipe, here: tuple[str, int], client: tuple[str, int]) -> None:
        """A client's connection is complete; the program hears of it when it runs."""
        if self.process.dead:
            return
        end = StreamEnd(
            self._net, self.process, self._station, out=back, into=there, here=here, there=client, context=self._context
        )
        self._net.loop.call_soon(lambda: end.begin(self._factory()), context=self._context)


class StreamEnd(asyncio.Transport):
    """One end of a connection, as a transport for its protocol. `gone`: the system has forgotten it."""

    def __init__(
        self,
        net: Links,
        process: Process,
        station: Station,
        *,
        out: Pipe,
        into: Pipe,
        here: tuple[str, int],
        there: tuple[str, int],
        context: contextvars.Context | None = None,
    ) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.process = process
        self.gone = False
        self._net = net
        self._loop = net.loop
        self._station = station
        self._out = out
        self._into = into
        self._context = context or contextvars.copy_context()
        self._protocol: asyncio.Protocol | None = None
        self._buffer: deque[bytes] = deque()  # arrived and not read yet
        self._eof = False  # the other side has ended its direction
        self._reading = True
        self._scheduled = False
        self._pending = 0  # written and not read by the other side yet
        self._high, self._low = HIGH_WATER, HIGH_WATER // 4
        self._writing_paused = False
        self._closing = False
        self._eof_sent = False
        out.sender = self
        into.end = self
        station.ends[self] = None

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol
        if self.gone:
            return
        protocol.connection_made(self)
        self._schedule()

    # --- called by the network ---------------------------------------------------------------------------------------

    def arrived(self, kind: bytes, data: bytes) -> None:
        if self.gone:
            return
        if kind == RESET:
            self.lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            return
        if self._closing and kind == DATA:
            self._forget()
            self._out.send(RESET)
            return
        if kind == FIN:
            self._eof = True
        else:
            self._buffer.append(data)
        self._schedule()

    def acknowledged(self, count: int) -> None:
        self._pending -= count
        if self._writing_paused and self._pending <= self._low and not self.gone:
            self._writing_paused = False
            if self._protocol:
                self._loop.call_soon(self._protocol.resume_writing, context=self._context)

    def lose(self, error: OSError | None) -> None:
        """The connection is over, whatever was on its way."""
        if self.gone:
            return
        already = self._closing
        self._forget()
        if self._protocol and not already:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def guard(self, seconds: float) -> None:
        self._out.guard(seconds)

    @property
    def has_come(self) -> bool:
        """Whether something has arrived that the program has not read."""
        return bool(self._buffer) or self._eof

    def unread_by(self, process: Process) -> bool:
        """Whether bytes wait here for this process."""
        return self.process is process and bool(self._buffer)

    def orphan(self, *, silently: bool) -> None:
        """The program has died."""
        unread = bool(self._buffer)
        self._forget()
        if silently:
            self._out.broken = True
        elif not self._eof_sent:
            self._out.send(RESET if unread else FIN)

    def _forget(self) -> None:
        self.gone = True
        self._buffer.clear()
        self._station.ends.pop(self, None)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if (
            not self._scheduled
            and self._reading
            and not self._closing
            and self._protocol
            and (self._buffer or self._eof)
        ):
            self._scheduled = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._scheduled = False
        if self._closing or self.gone or not self._reading:
            return
        assert self._protocol is not None
        if self._buffer:
            data = self._take()
            self._into.consumed(len(data))
            self._protocol.data_received(data)
            self._schedule()
        elif self._eof and not self._protocol.eof_received():
            self.close()

    def _take(self) -> bytes:
        if len(self._buffer) == 1:
            return self._buffer.popleft()
        parts, size = [], 0
        while self._buffer and size < READ_BYTES_MAX:
            parts.append(self._buffer.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._schedule()

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    # --- writing -----------------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if not data or self._closing or self.gone or self.process.dead:
            return
        if self._eof_sent:
            raise RuntimeError("Cannot call write() after write_eof()")
        raw = bytes(data)
        self._pending += len(raw)
        self._out.send(DATA, data=raw)
        if self._pending > self._high and not self._writing_paused and self._protocol:
            self._writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not (self._eof_sent or self._closing or self.gone or self.process.dead):
            self._eof_sent = True
            self._out.send(FIN)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._pending

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    # --- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closing or self.process.dead:
            return
        self._closing = True
        if not self._eof_sent:
            self._eof_sent = True
            self._out.send(RESET if self._buffer else FIN)
        self._buffer.clear()
        self._loop.call_soon(self._closed, context=self._context)

    abort = close
    """The system sends what it was given either way."""

    def _closed(self) -> None:
        if not self.gone:
            self._forget()
        if self._protocol:
            self._protocol.connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol
