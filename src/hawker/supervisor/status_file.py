"""What a program tells of itself: a file beside its record that it appends to, a JSON object a line.

`{"started": pid}` once what it is for runs, and last how it ended: `{"code"}`, `{"signal"}` or `{"error"}`, perhaps
with `"oom_killed": true`. Root of a virtual machine can write there what it likes, so the file is not trusted: no more
than its last `BYTES_MAX` bytes, and only what has this shape.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Final

STATUS: Final = ".status"
BYTES_MAX: Final = 64 * 1024
_ERROR_CHARACTERS_MAX: Final = 1000
_CODE_MAX, _SIGNAL_MAX = 255, 64


def words(path: str) -> list[dict[str, Any]]:
    """All that it said. What is no JSON object, also one that was cut off, is passed over."""
    found = []
    for line in _read(path).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(said := json.loads(line), dict):
                found.append(said)
    return found


def last_words(path: str) -> dict[str, Any] | None:
    """`code`, `signal`, `oom_killed` and `error` of its end. None when it did not say, or had no time to."""
    return next(filter(None, map(_end, reversed(words(path)))), None)


def _end(said: dict[str, Any]) -> dict[str, Any] | None:
    code, signal, error = said.get("code"), said.get("signal"), said.get("error", "")
    if not (_within(code, 0, _CODE_MAX) and _within(signal, 1, _SIGNAL_MAX) and isinstance(error, str)):
        return None
    if code is None and signal is None and not error:
        return None
    return {
        "code": code,
        "signal": signal,
        "oom_killed": said.get("oom_killed") is True,
        "error": error[:_ERROR_CHARACTERS_MAX],
    }


def _within(number: Any, least: int, most: int) -> bool:
    return number is None or (type(number) is int and least <= number <= most)


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with open(fd, "rb", buffering=0) as file:
        file.seek(max(0, os.fstat(fd).st_size - BYTES_MAX))
        return file.read(BYTES_MAX) or b""
