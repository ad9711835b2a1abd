"""One thread, one selector, timers. A bug met with one program must not take the parent of all the others down, so
what a callback raises is written to the log and the loop goes on."""

from __future__ import annotations

import contextlib
import heapq
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_TURN_S = 1.0  # the longest sleep: the supervisor looks then whether it is still needed


class Timer:
    """A call that is to come."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """It comes no more, and what it would have needed is held no longer. Harmless after it came."""
        self._call = None

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call:
            call()


class Loop:
    """Callbacks for descriptors get what they are ready for; timers get nothing."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()

    def watch(self, fd: int, call: Callable[[int], None], ready: int = READ) -> None:
        """Call whenever the descriptor is ready. Again with another `ready` changes it."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, ready, call)
        else:
            self._selector.register(fd, ready, call)

    def forget(self, fd: int) -> None:
        """Harmless for one that is not watched. Call before closing it."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def on_child(self, call: Callable[[], None]) -> None:
        """Call after children ended. Signals that would end the supervisor do nothing: it ends by itself."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            # A handler that does nothing, not SIG_IGN: programs inherit what is ignored and could not be stopped.
            signal.signal(number, lambda *_: None)

        def ready(mask: int) -> None:
            with contextlib.suppress(BlockingIOError):
                while os.read(read, 4096):
                    pass
            call()

        self.watch(read, ready)

    def turn(self) -> None:
        """Wait for what comes next, for a second at most, and do it."""
        for key, mask in self._selector.select(self._sleep_s()):
            now = self._selector.get_map().get(key.fd)
            if now and now.data is key.data:  # not taken out by an event before it, nor its number used again
                _guarded(key.data, mask)
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            _guarded(heapq.heappop(self._timers)[2])

    def _sleep_s(self) -> float:
        if not self._timers:
            return _TURN_S
        return max(0.0, min(_TURN_S, self._timers[0][0] - time.monotonic()))


def _guarded(call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception:
        traceback.print_exc()
