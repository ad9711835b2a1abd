"""Bounds how many frames of HTTP/2 a client may send by which this end has to work and nothing is asked for.

Each such frame is a strike. Strikes are forgiven with time, and for answers that were taken; too many end the
connection with `ENHANCE_YOUR_CALM`. The library tells nothing of some kinds, or answers them first, so this code looks
at frames one by one before the library has them: what is in excess is not worked through to the end of what was read.
"""

from __future__ import annotations

from collections.abc import Callable

from h2.exceptions import DenialOfServiceError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import (
    AltSvcFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from hawker.proxy.embedded.settings import Settings

TOO_MUCH = "it sent too much that asks for nothing"
_UPDATES_AT_FIRST = 64
_UPDATES_MOST = 10_000
_BYTES_PER_UPDATE = 512
_SMALL = 64
"""From so many bytes on a frame's data is no strike: it costs the client as much as us."""


class Strikes:
    """The strikes of one connection."""

    __slots__ = ("_at", "_count", "_now", "_settings")

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._count = 0.0
        self._at = now()

    def add(self, weight: float = 1.0) -> bool:
        """Count a strike. Returns whether it is one too many."""
        now = self._now()
        self._count = max(0.0, self._count - (now - self._at) * self._settings.h2_strikes_per_s) + weight
        self._at = now
        return self._count > self._settings.h2_strikes

    def pardon(self) -> None:
        if self._count >= 1.0:
            self._count -= 1.0


class Frames(FrameBuffer):
    """The frames that a client sends, as the library reads them. `is_over` says of a stream that it was begun, and is
    closed. `sent` tells how many updates of windows may follow."""

    def __init__(self, strikes: Strikes, is_over: Callable[[int], bool]) -> None:
        super().__init__(server=True)
        self._strikes = strikes
        self._is_over = is_over
        self._updates = _UPDATES_AT_FIRST
        self._last: Frame | None = None

    def sent(self, size: int) -> None:
        """So much of an answer was sent: some clients acknowledge every small piece of it, for the stream and for the
        connection."""
        self._updates = min(self._updates + 2 + size // _BYTES_PER_UPDATE, _UPDATES_MOST)

    def __next__(self) -> Frame:
        """Read the next frame. Raises `DenialOfServiceError`."""
        frame = super().__next__()
        if frame is not self._last:  # the library calls this itself
            self._last = frame
            if self._asks_nothing(frame) and self._strikes.add():
                raise DenialOfServiceError(TOO_MUCH)
        return frame

    def _asks_nothing(self, frame: Frame) -> bool:
        """Events tell of pings, settings, priorities, resets and of empty data on streams under way; the rest is
        counted here."""
        if isinstance(frame, WindowUpdateFrame):
            if self._updates:
                self._updates -= 1
                return False
            return True
        if isinstance(frame, PingFrame | SettingsFrame):
            return "ACK" in frame.flags
        if isinstance(frame, GoAwayFrame | AltSvcFrame):
            return True
        if isinstance(frame, DataFrame):
            return len(frame.data) < _SMALL and self._is_over(frame.stream_id)
        if isinstance(frame, RstStreamFrame | HeadersFrame) and self._is_over(frame.stream_id):
            return True
        if isinstance(frame, HeadersFrame):
            self.sent(0)  # some clients open each stream's window
        return False
