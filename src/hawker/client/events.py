"""Server-sent events out of a streamed answer (HTML standard, section 9.2), for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hawker.client.closing import Closing
from hawker.client.lines import Lines
from hawker.errors import Unreachable


class Event(msgspec.Struct, frozen=True):
    """`data` is decoded JSON. `id`: where to go on from, None when the event is no such place; "": there is none any
    more."""

    name: str
    data: Any
    id: str | None = None


class Events(Iterator[Event], Closing):
    """The events of an answer as they come; comments are left out. `last_id` is where to go on from."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.last_id = ""

    def __next__(self) -> Event:
        name, id = "message", None
        data: list[bytes] = []
        for line in self._lines:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            match field:
                case b"event":
                    name = value.decode(errors="replace")
                case b"data":
                    data.append(value)
                case b"id":
                    id = value.decode(errors="replace")
                case b"" if not line and data:
                    if id is not None:
                        self.last_id = id
                    return Event(name, _decoded(b"\n".join(data)), id)
        raise StopIteration

    def close(self) -> None:
        self._lines.close()


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreachable(
            f"an event of the answer is not JSON: {data[:80]!r}", hint="is the endpoint a market's?"
        ) from error
