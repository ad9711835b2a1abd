"""The clients for people and programs: declared calls over HTTP, typed in both directions.

    with Client("http://127.0.0.1:4280", token) as client:
        machine = client.send(CreateMachine("web", config={"image": "nginx"}, region="mad", wait=True))
        client.send(StopMachine("web", machine.id))
        with client.stream(FollowLogs("web", machine.id, follow=True)) as lines:
            for line in lines:
                print(line.message)

`AsyncClient` is the same with `await` and `async`. The calls are in `hawker.model.calls`; the server checks them. The
clients share all but the waiting: the one that blocks is on the standard library's `http.client`, whose import costs a
command line 20 ms, the one that awaits on httpx2, which costs 90. Both are imported at the first call. A connection is
kept between calls. A call that may be repeated is, once, when a connection closes before a byte of its answer. Agents
talk to each other through `client/connection.py`.
"""

from __future__ import annotations

import select
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

import hawker
from hawker.client.answering import ApiError, api_error, authorization, parts_of, read_reply
from hawker.errors import Invalid, Unreachable
from hawker.model.op import Declared, Request, StreamRequest
from hawker.model.request_codec import encode

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

    import httpx2

__all__ = ["ApiError", "AsyncClient", "Client", "Stream"]

BODY_BYTES_MAX = 256 << 20
"""A listing of ten thousand machines is about 30 MiB."""
_PIECE_BYTES = 64 << 10
_KEEP_ALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
R = TypeVar("R")


class _Asked(NamedTuple):
    """A call on its way. `target` has the endpoint's own path before it; `repeats`: it may be sent again."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes | None
    limit_s: float
    repeats: bool

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Market:
    """What both clients know of the market, how they ask it, and what they say of what goes wrong.

    `endpoint` is `http://host:port` or `https://...`, with or without `/v1`. `timeout_s` bounds connecting and each
    wait for the next bytes of an answer, in the place of what a call's declaration says.
    """

    def __init__(self, endpoint: str, token: str, *, timeout_s: float | None = None, user_agent: str = "") -> None:
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
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._prefix = urlsplit(self.endpoint).path
        self._timeout_s = timeout_s
        self._headers = {
            "accept": "application/json",
            "accept-encoding": "identity",
            "authorization": authorization(token),
            "user-agent": user_agent or f"hawker/{hawker.__version__}",
        }
        self.answer_headers: Mapping[str, str] = {}
        """The headers of the last call's answer, by lower-case names. They say how long the server took and which
        workers were silent."""

    def is_on_this_host(self) -> bool:
        """Whether the endpoint is a loopback address."""
        return self._host in ("localhost", "::1") or self._host.startswith("127.")

    def _asked(self, request: Declared[Any], timeout_s: float | None) -> _Asked:
        op = request.op
        method, target, headers, body = encode(request)
        empty = b"" if method in ("POST", "PUT", "PATCH") else None
        repeats = op.idempotent or method in ("GET", "HEAD")
        limit_s = timeout_s or self._timeout_s or op.deadline_s
        return _Asked(method, self._prefix + target, {**self._headers, **headers}, body or empty, limit_s, repeats)

    def _refusal(self, asked: _Asked, status: int, reason: str, raw: bytes) -> ApiError:
        return api_error(status, reason, self.answer_headers, raw, asked.method, asked.path)

    def _take(self, asked: _Asked, body: bytearray, piece: bytes) -> None:
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise Unreachable(f"{self.endpoint} answered {asked} with more than {BODY_BYTES_MAX} bytes")

    # --- what went wrong ---------------------------------------------------------------------------------------------

    def _unconnected(self, error: BaseException, limit_s: float, *, late: bool) -> NoReturn:
        cause = _cause(error)
        if late:
            raise Unreachable(f"{self.endpoint} did not take a connection within {limit_s:g} s") from error
        if isinstance(cause, ConnectionRefusedError):
            hint = "is the market up? hawker dev starts one on this machine"
            raise Unreachable(f"{self.endpoint} takes no connections", hint=hint) from error
        if isinstance(cause, UnicodeError):
            raise Invalid("endpoint", self.endpoint, "its host is neither a name nor an address") from None
        # Names that do not resolve and certificates that do not verify are among the rest.
        raise Unreachable(f"{self.endpoint} cannot be reached: {_reason(error)}") from error

    def _unanswered(self, error: BaseException, asked: _Asked, *, late: bool) -> NoReturn:
        if late:
            raise Unreachable(f"{self.endpoint} gave no answer to {asked} within {asked.limit_s:g} s") from error
        if isinstance(_cause(error), ConnectionError) or "disconnected" in str(error):
            raise _Closed(f"{self.endpoint} closed the connection before it answered {asked}") from error
        raise Unreachable(f"{self.endpoint} gave a broken answer to {asked} ({_reason(error)})") from error

    def _broken_off(self, error: BaseException, asked: _Asked, *, late: bool = False) -> NoReturn:
        why = "nothing more came in time" if late else _reason(error)
        raise Unreachable(f"{self.endpoint} broke off its answer to {asked} ({why})") from error


class _Closed(Unreachable):
    """The connection closed before a byte of the answer."""


class Client(_Market):
    """One market, seen through one of its brokers; for one thread at a time. Raises `Unreachable` when there is no
    whole answer, `ApiError` when it is a refusal."""

    _kept: HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connection. The next call opens another."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def send(self, request: Request[R], *, timeout_s: float | None = None) -> R:
        """The reply to a call."""
        asked = self._asked(request, timeout_s)
        try:
            raw = self._whole(asked)
        except _Closed:
            if not asked.repeats:
                raise
            raw = self._whole(asked)
        return read_reply(request, raw)

    def stream(self, request: StreamRequest[R], *, timeout_s: float | None = None) -> Stream[R]:
        """A streamed answer, part by part, over a connection of its own. Refusals are raised here, before the first
        part. `timeout_s` is for the head; a stream that is quiet for longer than its declaration says counts as broken
        off."""
        asked = self._asked(request, timeout_s)
        connection = self._connect(asked.limit_s)
        try:
            response = self._ask(connection, asked)
            if not 200 <= response.status < 300:
                raise self._refusal(asked, response.status, response.reason, self._read(response, asked))
            if connection.sock is not None:  # None: the answer ends with the connection, and `response` holds it
                connection.sock.settimeout(request.op.quiet_s)
                connection.sock.setsockopt(*_KEEP_ALIVE)
        except BaseException:
            connection.close()
            raise
        return Stream(connection, self._pieces(response, asked), request)

    def _whole(self, asked: _Asked) -> bytes:
        """The answer, over the kept connection or a new one. A connection on which anything went wrong is closed, also
        on Ctrl-C: the answer may still come."""
        try:
            connection = self._kept = self._usable(asked.limit_s) or self._connect(asked.limit_s)
            response = self._ask(connection, asked)
            raw = self._read(response, asked)
        except BaseException:
            self.close()
            raise
        if response.will_close:
            self.close()
        if not 200 <= response.status < 300:
            raise self._refusal(asked, response.status, response.reason, raw)
        return raw

    def _usable(self, limit_s: float) -> HTTPConnection | None:
        """The kept connection, unless its server has closed it meanwhile."""
        if self._kept is None or self._kept.sock is None:
            return None
        poll = select.poll()  # not select(): it fails for descriptors above 1023
        poll.register(self._kept.sock, select.POLLIN)
        if poll.poll(0):  # nothing was asked: the end of the connection, or bytes that belong to nobody
            self.close()
            return None
        self._kept.timeout = limit_s
        self._kept.sock.settimeout(limit_s)
        return self._kept

    def _connect(self, limit_s: float) -> HTTPConnection:
        import http.client

        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=limit_s)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            self._unconnected(error, limit_s, late=isinstance(error, TimeoutError))
        return connection

    def _ask(self, connection: HTTPConnection, asked: _Asked) -> HTTPResponse:
        from http.client import HTTPException

        try:
            connection.request(asked.method, asked.target, asked.body, asked.headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            self._unanswered(error, asked, late=isinstance(error, TimeoutError))
        self.answer_headers = {name.lower(): value for name, value in response.getheaders()}
        return response

    def _read(self, response: HTTPResponse, asked: _Asked) -> bytes:
        body = bytearray()
        for piece in self._pieces(response, asked):
            self._take(asked, body, piece)
        return bytes(body)

    def _pieces(self, response: HTTPResponse, asked: _Asked) -> Iterator[bytes]:
        from http.client import HTTPException

        try:
            while piece := response.read1(_PIECE_BYTES):
                yield piece
        except (OSError, HTTPException, AttributeError) as error:  # the last: closed by another thread meanwhile
            self._broken_off(error, asked, late=isinstance(error, TimeoutError))
        if response.length:  # of a body with a length, what is missing
            self._broken_off(EOFError(f"{response.length} bytes before its end"), asked)
        response.close()  # of what was read to its end; the connection takes the next call


class Stream(Iterator[R]):
    """The parts of a streamed answer as they come. Close it to stop; it closes itself at the end and on an error."""

    def __init__(self, connection: HTTPConnection, pieces: Iterator[bytes], request: StreamRequest[R]) -> None:
        self._connection = connection
        self._parts = self._read(pieces, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __next__(self) -> R:
        return next(self._parts)

    def close(self) -> None:
        self._parts = iter(())
        self._connection.close()

    def wake(self) -> None:
        """Break the answer off from another thread, so that the one that waits for more goes on."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _read(self, pieces: Iterator[bytes], request: StreamRequest[R]) -> Iterator[R]:
        parts = parts_of(request)
        try:
            for piece in pieces:
                yield from parts(piece)
            yield from parts(b"")
        finally:
            self._connection.close()


class AsyncClient(_Market):
    """The client for one event loop. It makes as many calls at a time as you like, and raises what `Client` raises."""

    _http: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections. The next call opens another."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def send(self, request: Request[R], *, timeout_s: float | None = None) -> R:
        """The reply to a call."""
        asked = self._asked(request, timeout_s)
        try:
            raw = await self._whole(asked)
        except _Closed:
            if not asked.repeats:
                raise
            raw = await self._whole(asked)
        return read_reply(request, raw)

    @asynccontextmanager
    async def stream(
        self, request: StreamRequest[R], *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[R]]:
        """A streamed answer, part by part; see `Client.stream`."""
        asked = self._asked(request, timeout_s)
        response = await self._head(asked)
        response.request.extensions["timeout"]["read"] = request.op.quiet_s
        try:
            yield self._parts(asked, response, request)
        finally:
            await response.aclose()

    async def _parts(self, asked: _Asked, response: httpx2.Response, request: StreamRequest[R]) -> AsyncIterator[R]:
        parts = parts_of(request)
        with self._reading(asked):
            async for piece in response.aiter_raw():
                for part in parts(piece):
                    yield part
            for part in parts(b""):
                yield part

    async def _whole(self, asked: _Asked) -> bytes:
        response = await self._head(asked)
        try:
            return await self._body(asked, response)
        finally:
            await response.aclose()

    async def _head(self, asked: _Asked) -> httpx2.Response:
        import httpx2

        if self._http is None:
            # Only TLS needs certificates, which take a while to load. A proxy of the environment never gets a token.
            transport = httpx2.AsyncHTTPTransport(
                verify=_certificates() if self._secure else False, trust_env=False, socket_options=[_KEEP_ALIVE]
            )
            self._http = httpx2.AsyncClient(transport=transport, trust_env=False)
        limits = httpx2.Timeout(asked.limit_s).as_dict()
        url = self.endpoint.removesuffix(self._prefix) + asked.target
        try:
            sent = httpx2.Request(
                asked.method, url, headers=asked.headers, content=asked.body, extensions={"timeout": limits}
            )
            response = await self._http.send(sent, stream=True)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.InvalidURL, UnicodeError) as error:
            self._unconnected(error, asked.limit_s, late=isinstance(error, httpx2.ConnectTimeout))
        except httpx2.HTTPError as error:
            self._unanswered(error, asked, late=isinstance(error, httpx2.TimeoutException))
        self.answer_headers = response.headers
        if not response.is_success:
            try:
                raw = await self._body(asked, response)
            finally:
                await response.aclose()
            raise self._refusal(asked, response.status_code, response.reason_phrase, raw)
        return response

    async def _body(self, asked: _Asked, response: httpx2.Response) -> bytes:
        body = bytearray()
        with self._reading(asked):
            async for piece in response.aiter_raw():
                self._take(asked, body, piece)
        return bytes(body)

    @contextmanager
    def _reading(self, asked: _Asked) -> Iterator[None]:
        import httpx2

        try:
            yield
        except httpx2.HTTPError as error:
            self._broken_off(error, asked, late=isinstance(error, httpx2.TimeoutException))


def _certificates() -> Any:
    import ssl

    return ssl.create_default_context()


def _cause(error: BaseException) -> BaseException:
    """The error that the system gave, at the bottom of those that wrap it."""
    below = error.__cause__ or error.__context__
    return _cause(below) if below is not None else error


def _reason(error: BaseException) -> str:
    found = _cause(error)
    return (found.strerror if isinstance(found, OSError) else None) or str(error) or type(error).__name__
