"""Sees whether the event loop turns, from a thread of its own.

While the loop stands still, this process takes connections and answers nothing: to the kernel it looks healthy, which
is worse than no process at all. After `limit_s` the watchdog writes down the stacks of all threads and calls whoever
restarts the agent. Where not even its thread gets on, because C code keeps the interpreter's lock, a timer of
faulthandler's, which needs no lock, ends the process after three times as long, and the service manager starts it
again.

The watchdog counts looks, not time: in a process that was stopped, or on a host that was asleep or has too much to do,
the looks of its thread come late, too, and that is no stall. The timer counts time: a process that was stopped for as
long as that ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hawker.core.beats import BEAT_S, next_beat

LOOKS = 5
HARD = 3
LAG_S = 60.0
STATUS = 70
"""The process's exit status where it cannot restart: EX_SOFTWARE. The timer of faulthandler ends it with 1."""


class Report:
    """A file in which an agent that ends without a word leaves the stacks of its threads for the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self.file = path.open("ab", buffering=0)

    def take(self) -> str:
        """What the agent before this one has left, "" for nothing. The file is empty then."""
        text = self._path.read_text(errors="replace")
        os.truncate(self._path, 0)
        return text

    def close(self) -> None:
        self.file.close()


class Watchdog:
    """Make it on the running loop; `start` it, then `stop` it. It calls `stalled` in its own thread, which does not
    return."""

    def __init__(self, limit_s: float, report: Report, stalled: Callable[[], NoReturn]) -> None:
        """With `limit_s` 0 it only measures lags."""
        self._limit_s = limit_s
        self._report = report
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._beat_s = limit_s / LOOKS / 2 if limit_s else BEAT_S
        """The loop turns at least this often, since an agent's loop that turns for nothing else would seem to stand
        still."""
        self._turns = 0
        self._lags = [0.0, 0.0]
        self._lags_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._lags_at = self._loop.time()
        self._beat(self._lags_at)
        if self._limit_s:
            self._thread.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def lag_s(self) -> float:
        """The longest time by which the loop was late, within the last minute or two."""
        return max(self._lags)

    def _turn(self, due: float) -> None:
        now = self._loop.time()
        self._turns += 1
        if now - self._lags_at > LAG_S:
            self._lags = [0.0, self._lags[0]]
            self._lags_at = now
        self._lags[0] = max(self._lags[0], now - due)
        self._beat(now)

    def _beat(self, now: float) -> None:
        due = min(next_beat(now), now + self._beat_s)
        self._timer = self._loop.call_at(due, self._turn, due)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        look_s = self._limit_s / LOOKS
        silent, seen = 0, -1
        while True:
            faulthandler.dump_traceback_later(self._limit_s * HARD, exit=True, file=self._report.file)
            if self._ends.wait(look_s):
                return
            if self._turns != seen or _debugged():
                silent, seen = 0, self._turns
            else:
                silent += 1
            if silent >= LOOKS:
                self._begin_anew()

    def _begin_anew(self) -> NoReturn:
        try:
            faulthandler.dump_traceback(self._report.file)
            faulthandler.cancel_dump_traceback_later()
            self._stalled()
        except BaseException as error:
            with suppress(OSError):
                self._report.file.write(f"it cannot begin anew: {error!r}\n".encode())
        finally:
            os._exit(STATUS)


def _debugged() -> bool:
    """Whether a debugger steps through the main thread."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return frame is not None and frame.f_trace is not None
