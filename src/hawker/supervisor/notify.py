"""Being told when a file is written to: inotify(7), which Python's library has no call for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable

from hawker.supervisor.loop import Loop

_IN_MODIFY = 2
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Writes:
    """Calls for each file that is watched, after it was written to."""

    def __init__(self, loop: Loop) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._calls: dict[int, Callable[[], None]] = {}
        loop.watch(self._fd, self._ready)

    def watch(self, path: str, call: Callable[[], None]) -> int:
        """Gives a number for `forget`. Raises OSError."""
        watch = _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY))
        self._calls[watch] = call
        return watch

    def forget(self, watch: int) -> None:
        """A file that was removed is forgotten by the kernel itself."""
        self._calls.pop(watch, None)
        _libc.inotify_rm_watch(self._fd, watch)

    def _ready(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 65536)
            at = 0
            while at < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if call := self._calls.get(watch):
                    call()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"inotify: {os.strerror(number)}")
    return result
