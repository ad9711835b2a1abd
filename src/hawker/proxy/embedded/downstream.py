"""What an exchange asks of the client's side, whatever version of HTTP the client speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from hawker.proxy.base import Header


class Downstream(Protocol):
    """The client of one exchange. `answer` comes at most once, after any number of `interim`; `data` follows it, and
    exactly one of `end`, `cut` and `switch` comes last. Nothing is sent before `flush` or the end."""

    def interim(self, status: int, headers: Sequence[Header]) -> None:
        """Send a 1xx answer. A client of HTTP/1.0 does not get it."""
        ...

    def answer(self, status: int, reason: bytes, headers: list[Header], length: int) -> None:
        """The head of the answer. `length` is as in `AnswerHead`; `headers` have nothing of a connection, nor
        Transfer-Encoding."""
        ...

    def answer_lines(self, status: int, reason: bytes, lines: Sequence[bytes], length: int) -> None:
        """The same head, with the fields as lines of HTTP/1.1, in pieces, without the last one's end."""
        ...

    def data(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def end(self, trailers: Sequence[Header]) -> None: ...

    def cut(self) -> None:
        """End the answer so that the client sees that it is not complete."""
        ...

    def switch(self, status: int, reason: bytes, headers: list[Header]) -> tuple[asyncio.Transport, bytes]:
        """Send this head; from here on bytes pass as they come. Returns what carries them on the client's side, and
        those that came already."""
        ...

    def hold(self, held: bool) -> None:
        """Read no more of the request's body, or go on."""
        ...
