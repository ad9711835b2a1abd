"""An answer that is read as it comes, line by line or piece by piece."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from hawker.client.closing import Closing
from hawker.errors import Unreachable

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

LINE_BYTES_MAX = 1 << 20
_PIECE_BYTES = 64 << 10


class Lines(Iterator[bytes], Closing):
    """The lines of a streamed answer as they come, without their ends. Close it to stop; it closes itself at the end
    and on an error. Waits for the next line as long as the server takes."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse, what: str) -> None:
        self._connection = connection
        self._response = response
        self._what = what
        self._rest = b""
        self._lines: list[bytes] = []  # complete ones, the next at the end
        self._ended = False

    def __next__(self) -> bytes:
        while not self._lines:
            if self._ended:
                raise StopIteration
            self._read()
        return self._lines.pop()

    def close(self) -> None:
        self._ended = True
        self._lines.clear()
        self._response.close()
        self._connection.close()

    def _read(self) -> None:
        piece = self._piece()
        if not piece:
            last = [self._rest] if self._rest else []
            self.close()
            self._lines = last
            return
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            self._break(f"has a line of more than {LINE_BYTES_MAX} bytes", None)
        self._lines = whole[::-1]

    def _piece(self) -> bytes:
        """The bytes that come next; none at the end."""
        from http.client import HTTPException

        try:
            piece = self._response.read1(_PIECE_BYTES)
        except (OSError, HTTPException, AttributeError) as error:  # the last: closed by another thread meanwhile
            self._break(f"broke off ({reason(error)})", error)
        if not piece and self._response.length:  # of a body with a length, what is missing
            self._break(f"broke off {self._response.length} bytes before its end", None)
        return piece

    def _break(self, problem: str, cause: BaseException | None) -> NoReturn:
        self.close()
        raise Unreachable(f"the answer to {self._what} {problem}") from cause


class Pieces(Lines):
    """The same for an answer that has no lines: bytes as they come."""

    def _read(self) -> None:
        piece = self._piece()
        if not piece:
            self.close()
            return
        self._lines = [piece]

    def wake(self) -> None:
        """From another thread: whoever waits for more finds the answer broken off."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)


def reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
