"""Frames of HTTP/2 by which a client has this end work and asks for nothing: how many of them it may send.

Each is a strike. Strikes are forgiven with time, and for answers that were taken; too many end the connection with
`ENHANCE_YOUR_CALM`. Of some kinds the library tells nothing, or answers them first, so frames are looked at one by one
before it has them: what is in excess is not worked through to the end of what was read.
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
"""Bytes of a frame's data: a larger one costs the client as much as us."""


class Strikes:
    """Of one connection."""

    __slots__ = ("_at", "_count", "_now", "_settings")

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._count = 0.0
        self._at = now()

    def add(self, weight: float = 1.0) -> bool:
        """Whether it is one too many."""
        now = self._now()
        self._count = max(0.0, self._count - (now - self._at) * self._settings.h2_strikes_per_s) + weight
        self._at = now
        return self._count > self._settings.h2_strikes

    def pardon(self) -> None:
        if self._count >= 1.0:
            self._count -= 1.0


class Frames(FrameBuffer):
    """What a client sends, as the library reads it. `is_over` of a stream: it was begun, and is closed. `sent` tells of
    what updates of windows may follow."""

    def __init__(self, strikes: Strikes, is_over: Callable[[int], bool]) -> None:
        super().__init__(server=True)
        self._strikes = strikes
        self._is_over = is_over
        self._updates = _UPDATES_AT_FIRST
        self._last: Frame | None = None

    def sent(self, size: int) -> None:
        """So much data of an answer: some clients tell at every small piece that they have it, for the stream and for
        the connection."""
        self._updates = min(self._updates + 2 + size // _BYTES_PER_UPDATE, _UPDATES_MOST)

    def __next__(self) -> Frame:
        """Raises `DenialOfServiceError`."""
        frame = super().__next__()
        if frame is not self._last:  # the library's own calls itself
            self._last = frame
            if self._asks_nothing(frame) and self._strikes.add():
                raise DenialOfServiceError(TOO_MUCH)
        return frame

    def _asks_nothing(self, frame: Frame) -> bool:
        """Of pings, settings, priorities, resets and empty data on streams under way the events tell."""
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
