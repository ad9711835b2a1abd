"""What a client makes of an answer, whatever brought its bytes: a typed reply, the parts of a stream, or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from hawker.errors import HawkerError, Invalid, Unreachable
from hawker.model.op import EVENTS, NDJSON, Declared, StreamRequest, reply_of

R = TypeVar("R")

LINE_BYTES_MAX = 1 << 20
_QUIET_TEXT_MAX = 500  # of an error that is not in the API's form: enough for a sentence, not for a web page
_MACAROONS = ("fm1r_", "fm1a_", "fm2_")
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)
_HINT = "is the endpoint a market's?"


class ApiError(HawkerError):
    """The API's answer was an error. `message` and `hint` are the server's own.

    `status_code` is the HTTP status, `word` the API's machine-readable one ("insufficient_capacity", ...), "" when the
    answer had none. `request_id` finds the request in the server's logs.
    """

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        word: str = "",
        details: Any = None,
        hint: str = "",
        request_id: str = "",
        method: str = "",
        path: str = "",
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.status_code = status_code
        self.word = word
        self.request_id = request_id
        self.method = method
        self.path = path

    def body(self) -> dict[str, Any]:
        return {**super().body(), "status": self.word or self.code}


def read_reply(request: Declared[R], raw: bytes) -> R:
    """Decode a reply as its declared type. Raises `Unreachable` for an answer that is not this API's."""
    kind = reply_of(type(request))
    if kind is type(None):
        return None  # type: ignore[return-value]  # R is None here
    try:
        reply: R = msgspec.json.decode(raw, type=kind)
    except _UNREADABLE as error:
        what = f"{request.op.method} {request.op.path}"
        raise Unreachable(f"the answer to {what} is not one of this API: {raw[:80]!r} ({error})", hint=_HINT) from error
    return reply


def api_error(status: int, reason: str, headers: Mapping[str, str], raw: bytes, method: str, path: str) -> ApiError:
    """The error in an answer in the API's form, in the older form with `message`, or in plain text."""
    try:
        body = msgspec.json.decode(raw)
    except _UNREADABLE:
        body = None
    if not isinstance(body, dict):
        body = {"error": raw[:_QUIET_TEXT_MAX].decode(errors="replace").strip()}
    message = body.get("error") or body.get("message")
    details = body.get("details")
    hint = ""
    if isinstance(details, dict) and isinstance(details.get("hint"), str):
        hint = details["hint"]
        details = {name: value for name, value in details.items() if name != "hint"} or None
    return ApiError(
        message if isinstance(message, str) else f"{method} {path}: {status} {reason}",
        status_code=status,
        word=body["status"] if isinstance(body.get("status"), str) else "",
        details=details,
        hint=hint,
        request_id=headers.get("fly-request-id", ""),
        method=method,
        path=path,
    )


def authorization(token: str) -> str:
    """The header for a token, which may come with its scheme. Macaroons have a scheme of their own."""
    if not token or not token.isascii() or not token.isprintable():
        raise Invalid("token", "..." if token else "", "give the token as the market printed it")
    if token.startswith(("Bearer ", "FlyV1 ")):
        return token
    return f"FlyV1 {token}" if token.startswith(_MACAROONS) else f"Bearer {token}"


# --- streams ---------------------------------------------------------------------------------------------------------

Parse = Callable[[bytes], list[Any]]
"""Takes the bytes that come next, b"" at the end, and gives the parts that are whole."""


def parts_of(request: StreamRequest[Any]) -> Parse:
    """How a stream's bytes become its parts. Raises `Unreachable` for what is not this API's."""
    media, kind = request.op.media, reply_of(type(request))
    if media == NDJSON:
        decoder = msgspec.json.Decoder(kind)
        lines = Lines()
        return lambda data: [_part(decoder.decode, line) for line in lines.feed(data) if line]
    if media == EVENTS:
        return Events(kind).feed
    return lambda data: [data] if data else []


class Lines:
    """Whole lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if not data:
            last, self._rest = self._rest, b""
            return [last] if last else []
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise Unreachable(f"the answer has a line of more than {LINE_BYTES_MAX} bytes", hint=_HINT)
        return whole


class Events:
    """Server-sent events (HTML standard, section 9.2) as `kind`, whose fields are theirs; `data` is JSON. Comments,
    events that `kind` does not know, and one that has not ended are left out."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._lines = Lines()
        self._fields: dict[str, str] = {}

    def feed(self, data: bytes) -> list[Any]:
        found = []
        for line in self._lines.feed(data) if data else ():
            name, _, value = line.decode(errors="replace").partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in self._fields:
                value = f"{self._fields['data']}\n{value}"
            if name in ("event", "data", "id"):
                self._fields[name] = value
            elif not line:
                fields, self._fields = self._fields, {}
                if "data" in fields:
                    _part(msgspec.json.decode, fields["data"])
                    with suppress(msgspec.ValidationError):
                        found.append(msgspec.convert(fields, self._kind))
        return found


def _part(make: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return make(raw)
    except _UNREADABLE as error:
        raise Unreachable(f"a part of the answer is not one of this API: {raw[:80]!r}", hint=_HINT) from error
