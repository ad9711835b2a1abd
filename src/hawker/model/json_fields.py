"""Each function reads one field of decoded JSON, or raises `Invalid`, naming the field, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hawker.errors import Invalid


def objects(field: str, value: Any) -> list[dict[str, Any]]:
    """A list of objects; an absent or empty value reads as an empty one."""
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Invalid(field, value, "give a list of objects")
    return value


def check_object(field: str, value: Any, example: str) -> dict[str, Any]:
    """An object; an absent one reads as an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Invalid(field, value, f"give an object such as {example}")
    return value


def check_flag(field: str, value: Any, default: bool = False) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Invalid(field, value, "give true or false")
    return value


def check_int(field: str, value: Any, least: int, most: int, remedy: str) -> int:
    """A whole number from `least` to `most`. JSON's `true` is none, though Python counts it as 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Invalid(field, value, remedy)
    return value


def check_choice(field: str, value: Any, *choices: str) -> Any:
    """One of a few words."""
    if value not in choices:
        raise Invalid(field, value, f"use {any_of(choices)}")
    return value


def any_of(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def check_port(field: str, value: Any) -> int:
    return check_int(field, value, 1, 65535, "give a port from 1 to 65535")


def check_strings(field: str, value: Any) -> tuple[str, ...]:
    """A list of strings; an absent or empty value reads as an empty one."""
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise Invalid(field, value, "give a list of strings")
    return tuple(value)


def string_map(field: str, value: Any, *, names: bool = False) -> dict[str, str]:
    """A map of strings. With `names`, its keys must be usable as names of environment variables."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Invalid(field, value, "give an object whose values are strings")
    for key, text in value.items():
        if not isinstance(text, str) or (names and "\0" in text):
            raise Invalid(f"{field}.{key}", text, "give a string")
        if names and (not key or "=" in key or "\0" in key):
            raise Invalid(f"{field}.{key}", text, "a name has at least one character and neither '=' nor NUL")
    return dict(value)
