"""The one error that the confined process and those who start it share."""

from __future__ import annotations


class LayerRefused(Exception):
    """A layer that must not be used. `reason` is a sentence that names the entry; nothing of the layer is left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def shown(name: bytes) -> str:
    """A name of unknown origin, fit for a sentence: one line, at most 120 characters."""
    text = name.decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text[:240])
    return f"'{text}'" if len(text) <= 120 else f"'{text[:80]}...{text[-37:]}'"
