"""The plain HTTP client for people and programs: one call at a time, JSON in and out, errors as the API tells them.

Over the standard library's `http.client`, imported at the first call: a command line that only prints its help pays
nothing. One connection is kept between calls. One that the server closed meanwhile is replaced without a word as long
as the request cannot have been acted on; a GET is also repeated once when the connection closes before a byte of
answer. What comes bit by bit is in `client/lines.py`, the API's calls by name in `client/api.py`; agents talk through
`client/connection.py`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

import hawker
from hawker.client.closing import Closing
from hawker.client.lines import Lines, Pieces, reason
from hawker.errors import HawkerError, Invalid, Unreachable

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

BODY_BYTES_MAX = 256 << 20
"""A listing of ten thousand machines is about 30 MiB."""
_QUIET_TEXT_MAX = 500  # of an error that is not in the API's form: enough for a sentence, not for a web page
_PATH_SAFE = "/%:@!$&'()*+,;=~"  # what is quoted already stays as it is
_MACAROONS = ("fm1r_", "fm1a_", "fm2_")


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


L = TypeVar("L", bound=Lines)


class Transport(Closing):
    """Calls to one endpoint (`http://host:port` or `https://...`, with or without `/v1`). For one thread at a time.

    `timeout_s` bounds connecting and each wait for the next bytes of an answer. Raises `Unreachable` when there is no
    whole answer, `ApiError` when it is not 2xx.
    """

    def __init__(self, endpoint: str, token: str, *, timeout_s: float = 60.0, user_agent: str = "") -> None:
        try:
            parts = urlsplit(endpoint)
        except ValueError as error:
            raise Invalid("endpoint", endpoint, f"write it like http://127.0.0.1:4280: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise Invalid("endpoint", endpoint, "write it like http://127.0.0.1:4280")
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise Invalid("endpoint", endpoint, "its port must be a number from 1 to 65535") from None
        self.endpoint = endpoint.rstrip("/").removesuffix("/v1")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._prefix = urlsplit(self.endpoint).path
        self._timeout_s = timeout_s
        self._headers = {
            "accept": "application/json",
            "authorization": _authorization(token),
            "user-agent": user_agent or f"hawker/{hawker.__version__}",
        }
        self._kept: HTTPConnection | None = None
        self.answer_headers: Mapping[str, str] = {}
        """Of the last call's answer, by lower-case names: how long it took the server, which workers were silent."""

    def close(self) -> None:
        """Close the kept connection. The next call opens another."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def is_on_this_host(self) -> bool:
        """Whether the endpoint is a loopback address."""
        return self._host in ("localhost", "::1") or self._host.startswith("127.")

    def get(self, path: str, *, query: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return self.call("GET", path, query=query, **more)

    def post(self, path: str, *, json: Any = None, query: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return self.call("POST", path, json=json, query=query, **more)

    def put(self, path: str, *, json: Any = None, query: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return self.call("PUT", path, json=json, query=query, **more)

    def patch(self, path: str, *, json: Any = None, query: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return self.call("PATCH", path, json=json, query=query, **more)

    def delete(self, path: str, *, query: Mapping[str, Any] | None = None, **more: Any) -> Any:
        return self.call("DELETE", path, query=query, **more)

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The decoded answer, None when it is empty. `path` begins with /v1; see `path_of` for names of others'.

        Of `query`, None is left out, lists repeat their name and booleans are written true and false. `json` None
        sends no body, `data` sends bytes in its place. `timeout_s` takes the place of the client's for this call.
        """
        what = f"{method} {path}"
        target = self._target(path, query)
        body, kind = _body(json, data)
        sent = {**self._headers, **kind, **(headers or {})}
        response = self._answer(method, target, body, sent, self._timeout_s if timeout_s is None else timeout_s)
        self.answer_headers = {name.lower(): value for name, value in response.getheaders()}
        raw = self._read(response, what)
        if response.will_close:
            self.close()
        if not 200 <= response.status < 300:
            raise _api_error(response, raw, method, path)
        if not raw.strip():
            return None
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreachable(
                f"the answer to {what} is not JSON: {raw[:80]!r}", hint=f"is {self.endpoint} the API of a market?"
            ) from error

    def lines(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        timeout_s: float | None = None,
        quiet_s: float | None = None,
    ) -> Lines:
        """A streamed answer, line by line, over a connection of its own: `logs -f`. With `json` the call is a POST.

        Errors of the call are raised here, before the first line. `timeout_s` is for the head. With `quiet_s` a server
        that sends nothing for so long counts as gone; without, lines may be as far apart as they are, and a server that
        vanished is noticed by TCP keep-alive.
        """
        return self._stream(Lines, path, query, json, timeout_s, quiet_s)

    def pieces(self, path: str, *, timeout_s: float | None = None, quiet_s: float | None = None) -> Pieces:
        """As `lines`, of an answer that has none."""
        return self._stream(Pieces, path, None, None, timeout_s, quiet_s)

    def _stream(
        self,
        kind_of: type[L],
        path: str,
        query: Mapping[str, Any] | None,
        json: Any,
        timeout_s: float | None,
        quiet_s: float | None,
    ) -> L:
        body, kind = _body(json, None)
        method = "GET" if body is None else "POST"
        what = f"{method} {path}"
        connection = self._connect(self._timeout_s if timeout_s is None else timeout_s)
        try:
            response = self._ask(connection, method, self._target(path, query), body, {**self._headers, **kind})
            if not 200 <= response.status < 300:
                raise _api_error(response, self._read(response, what), method, path)
            if connection.sock is not None:  # None: the answer ends with the connection, and `response` holds it
                connection.sock.settimeout(quiet_s)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except BaseException:
            connection.close()
            raise
        return kind_of(connection, response, what)

    # --- one call ----------------------------------------------------------------------------------------------------

    def _answer(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> HTTPResponse:
        """The head of the answer, over the kept connection or a new one. Leaves a connection that failed closed."""
        kept = self._take_kept(timeout_s)
        if kept is not None:
            try:
                return self._ask(kept, method, target, body, headers)
            except _ClosedBeforeAnswer as closed:
                self.close()
                if closed.sent and method not in ("GET", "HEAD"):
                    raise
            except BaseException:
                self.close()  # also on Ctrl-C: the answer may still come
                raise
        self._kept = self._connect(timeout_s)
        try:
            return self._ask(self._kept, method, target, body, headers)
        except BaseException:
            self.close()
            raise

    def _ask(
        self, connection: HTTPConnection, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> HTTPResponse:
        from http.client import HTTPException, RemoteDisconnected

        what = f"{method} {target.partition('?')[0]}"
        sent = False
        try:
            connection.request(method, target, body, dict(headers))
            sent = True  # before this the server cannot have a whole request to act on
            return connection.getresponse()
        except TimeoutError as error:
            raise Unreachable(f"{self.endpoint} gave no answer to {what} within {connection.timeout:g} s") from error
        except (RemoteDisconnected, ConnectionError) as error:
            raise _ClosedBeforeAnswer(
                f"{self.endpoint} closed the connection before it answered {what}", sent
            ) from error
        except (OSError, HTTPException) as error:
            raise Unreachable(f"{self.endpoint} gave a broken answer to {what} ({reason(error)})") from error

    def _read(self, response: HTTPResponse, what: str) -> bytes:
        from http.client import HTTPException

        raw = b""
        try:
            if response.length is None:  # chunks, or up to the end of the connection
                raw = response.read(BODY_BYTES_MAX + 1)
            elif response.length <= BODY_BYTES_MAX:
                raw = response.read()  # unlike a read of so many bytes, this one notices a body that is cut off
        except TimeoutError as error:
            self.close()
            raise Unreachable(f"{self.endpoint} gave only part of its answer to {what} in time") from error
        except (OSError, HTTPException) as error:
            self.close()
            raise Unreachable(f"{self.endpoint} broke off its answer to {what} ({reason(error)})") from error
        except BaseException:
            self.close()
            raise
        if max(len(raw), response.length or 0) > BODY_BYTES_MAX:
            self.close()
            raise Unreachable(f"{self.endpoint} answered {what} with more than {BODY_BYTES_MAX} bytes")
        return raw

    # --- connections -------------------------------------------------------------------------------------------------

    def _take_kept(self, timeout_s: float) -> HTTPConnection | None:
        if self._kept is None or self._kept.sock is None:
            return None
        poll = select.poll()  # not select(): it fails for descriptors above 1023
        poll.register(self._kept.sock, select.POLLIN)
        if poll.poll(0):  # nothing was asked: the end of the connection, or bytes that belong to nobody
            self.close()
            return None
        self._kept.timeout = timeout_s
        self._kept.sock.settimeout(timeout_s)
        return self._kept

    def _connect(self, timeout_s: float) -> HTTPConnection:
        import http.client

        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
        except ConnectionRefusedError as error:
            raise Unreachable(
                f"{self.endpoint} takes no connections",
                hint="is the market up? hawker dev starts one on this machine",
            ) from error
        except TimeoutError as error:
            raise Unreachable(f"{self.endpoint} did not take a connection within {timeout_s:g} s") from error
        except UnicodeError:
            raise Invalid("endpoint", self.endpoint, "its host is neither a name nor an address") from None
        except OSError as error:  # names that do not resolve and certificates that do not verify are among them
            raise Unreachable(f"{self.endpoint} cannot be reached: {reason(error)}") from error
        return connection

    def _target(self, path: str, query: Mapping[str, Any] | None) -> str:
        items = [(name, _text(v)) for name, value in (query or {}).items() for v in _values(value)]
        return f"{self._prefix}{quote(path, safe=_PATH_SAFE)}" + (f"?{urlencode(items)}" if items else "")


class _ClosedBeforeAnswer(Unreachable):
    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


def _body(json: Any, data: bytes | None) -> tuple[bytes | None, dict[str, str]]:
    """A request's bytes and the header that says of what kind they are."""
    if data is not None:
        return data, {"content-type": "application/octet-stream"}
    if json is None:
        return None, {}
    return msgspec.json.encode(json), {"content-type": "application/json"}


def path_of(*parts: str) -> str:
    """`/v1/...` with each part quoted, so that a name with a slash in it stays one part."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _api_error(response: HTTPResponse, raw: bytes, method: str, path: str) -> ApiError:
    """From the API's form of an error, the older one with `message`, or plain text."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
        message if isinstance(message, str) else f"{method} {path}: {response.status} {response.reason}",
        status_code=response.status,
        word=body["status"] if isinstance(body.get("status"), str) else "",
        details=details,
        hint=hint,
        request_id=response.getheader("fly-request-id", ""),
        method=method,
        path=path,
    )


def _authorization(token: str) -> str:
    """The header for a token, which may come with its scheme. Macaroons have a scheme of their own."""
    if not token or not token.isascii() or not token.isprintable():
        raise Invalid("token", "..." if token else "", "give the token as the market printed it")
    if token.startswith(("Bearer ", "FlyV1 ")):
        return token
    return f"FlyV1 {token}" if token.startswith(_MACAROONS) else f"Bearer {token}"


def _values(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
