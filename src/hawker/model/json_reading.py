"""Reading JSON that somebody sent: what is wrong with it is told by field, value and remedy."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from hawker.errors import Invalid

T = TypeVar("T")

LEVELS_MAX = 100
"""So many objects and lists may stand within each other. JSON that nests 1000 deep can be neither read, shown in an
error nor written."""


def check_levels(raw: bytes) -> None:
    """Raises `Invalid` for JSON that nests deeper than `LEVELS_MAX`. Bytes that are no JSON are left to who reads them.

    A configuration is kept in a row, in records of the log and in lists of many: deeper than what was sent.
    """
    if raw.count(b"[") + raw.count(b"{") <= LEVELS_MAX:
        return
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    except RecursionError:
        raise _too_deep(raw) from None
    if _nests_deeper(value, LEVELS_MAX):
        raise _too_deep(raw)


def read_json(raw: bytes, kind: type[T]) -> T:
    """Decode and check JSON. Raises `Invalid` with the path of what is wrong."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".") or "body"
        raise Invalid(field, _at(raw, field), text[0].lower() + text[1:]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid("body", raw[:60].decode(errors="replace"), f"send JSON: {error}") from error
    except RecursionError:
        raise _too_deep(raw) from None


def read_each(raw: bytes, kind: type[T]) -> list[T | Invalid]:
    """A JSON list that many callers share, as a `kind` for each: one that does not read is told so, and the others are
    not concerned. Raises `Invalid` where it is no list."""
    try:
        return [*msgspec.json.decode(raw, type=list[kind])]  # type: ignore[valid-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [_or_error(bytes(each), kind) for each in read_json(raw, list[msgspec.Raw])]


def _or_error(raw: bytes, kind: type[T]) -> T | Invalid:
    try:
        return read_json(raw, kind)
    except Invalid as error:
        return error


def _at(raw: bytes, field: str) -> Any:
    """The value at a plain path, for the error's text; None where the path is not that plain, or the rest no JSON."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def _too_deep(raw: bytes) -> Invalid:
    return Invalid("body", raw[:60].decode(errors="replace"), f"nest at most {LEVELS_MAX} objects and lists")


def _nests_deeper(value: Any, levels: int) -> bool:
    inner = [value]
    for _ in range(levels + 1):
        containers = [v for v in inner if isinstance(v, dict | list)]
        if not containers:
            return False
        inner = [v for each in containers for v in (each.values() if isinstance(each, dict) else each)]
    return True
