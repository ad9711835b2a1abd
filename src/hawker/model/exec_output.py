"""What a command wrote, in JSON: as text, which it mostly is, and as its bytes where it is none."""

from __future__ import annotations

import base64
import codecs


def as_text(name: str, data: bytes, *, cut: bool = False) -> dict[str, str]:
    """The field `name` with the text, and `<name>_base64` where that is not all of it. With `cut` the end may be half a
    character, which is left out."""
    try:
        return {name: codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)}
    except UnicodeDecodeError:
        return {name: data.decode(errors="replace"), f"{name}_base64": base64.b64encode(data).decode()}
