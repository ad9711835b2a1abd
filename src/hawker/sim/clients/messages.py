"""HTTP/1.1 as users and machines' programs of a simulation read it."""

from __future__ import annotations


def message(came: bytes) -> tuple[list[str], dict[str, str], int, bytes] | None:
    """The lines of a request's or an answer's head, its fields by lower-case name, the length of its body, and what
    came after the head. None: the head is not whole yet."""
    head, ends, rest = came.partition(b"\r\n\r\n")
    if not ends:
        return None
    lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:])
    return lines, fields, int(fields.get("content-length", 0)), rest
