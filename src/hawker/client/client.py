"""The clients for people and programs: declared calls over HTTP, typed in both directions.

    with Client("http://127.0.0.1:4280", token) as client:
        machine = client.send(CreateMachine("web", config={"image": "nginx"}, region="mad", wait=True))
        client.send(StopMachine("web", machine.id))
        with client.stream(FollowLogs("web", machine.id, follow=True)) as lines:
            for line in lines:
                print(line.message)

`AsyncClient` is the same with `await` and `async`. The calls are in `hawker.model.calls`; the server checks them. Both
clients go over httpx2, which is imported at the first call: a command line that only prints its help pays nothing.
Connections are kept between calls. A call that may be repeated is, once, when a connection closes before a byte of its
answer. Agents talk to each other through `client/connection.py`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import hawker
from hawker.client.answering import ApiError, api_error, authorization, parts_of, read_reply
from hawker.errors import Invalid, Unreachable
from hawker.model.op import Declared, Request, StreamRequest
from hawker.model.request_codec import encode

if TYPE_CHECKING:
    import httpx2

__all__ = ["ApiError", "AsyncClient", "Client", "Stream"]

BODY_BYTES_MAX = 256 << 20
"""A listing of ten thousand machines is about 30 MiB."""
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
R = TypeVar("R")


class _Market:
    """What both clients know of the market, and how they ask it: all but the waiting.

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
            parts.port  # noqa: B018  # reading it checks it
        except ValueError:
            raise Invalid("endpoint", endpoint, "its port must be a number from 1 to 65535") from None
        self.endpoint = endpoint.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._timeout_s = timeout_s
        self._headers = {
            "accept": "application/json",
            "accept-encoding": "identity",
            "authorization": authorization(token),
            "user-agent": user_agent or f"hawker/{hawker.__version__}",
        }
        self.answer_headers: Mapping[str, str] = {}
        """Of the last call's answer: how long it took the server, which workers were silent."""

    def is_on_this_host(self) -> bool:
        """Whether the endpoint is a loopback address."""
        return self._host in ("localhost", "::1") or self._host.startswith("127.")

    def _transport(self) -> dict[str, Any]:
        """The options of a transport. Only an endpoint with TLS needs certificates, which take a while to load."""
        import ssl

        verify = ssl.create_default_context() if self.endpoint.startswith("https") else False
        return {"verify": verify, "trust_env": False, "socket_options": _KEEP_ALIVE}

    def _request(self, request: Declared[Any], timeout_s: float | None) -> httpx2.Request:
        import httpx2

        limit_s = timeout_s or self._timeout_s or request.op.deadline_s
        method, target, headers, body = encode(request)
        timeout = httpx2.Timeout(limit_s)
        try:
            return httpx2.Request(
                method,
                self.endpoint + target,
                headers={**self._headers, **headers},
                content=body or (b"" if method in ("POST", "PUT", "PATCH") else None),
                extensions={"timeout": timeout.as_dict()},
            )
        except (httpx2.InvalidURL, UnicodeError):
            raise Invalid("endpoint", self.endpoint, "its host is neither a name nor an address") from None

    def _refusal(self, sent: httpx2.Request, response: httpx2.Response, raw: bytes) -> ApiError:
        path = sent.url.raw_path.decode().partition("?")[0]
        reason = response.reason_phrase
        return api_error(response.status_code, reason, response.headers, raw, sent.method, path)

    @contextmanager
    def _asking(self, sent: httpx2.Request) -> Iterator[None]:
        """What goes wrong before an answer begins, in our words."""
        import httpx2

        what = f"{sent.method} {sent.url.path}"
        limit_s = sent.extensions["timeout"]["read"]
        try:
            yield
        except httpx2.ConnectTimeout as error:
            raise Unreachable(f"{self.endpoint} did not take a connection within {limit_s:g} s") from error
        except httpx2.TimeoutException as error:
            raise Unreachable(f"{self.endpoint} gave no answer to {what} within {limit_s:g} s") from error
        except httpx2.ConnectError as error:
            if isinstance(_cause(error), ConnectionRefusedError):
                hint = "is the market up? hawker dev starts one on this machine"
                raise Unreachable(f"{self.endpoint} takes no connections", hint=hint) from error
            raise Unreachable(f"{self.endpoint} cannot be reached: {_reason(error)}") from error
        except httpx2.HTTPError as error:
            if _closed(error):
                raise _ClosedBeforeAnswer(f"{self.endpoint} closed the connection before it answered {what}") from error
            raise Unreachable(f"{self.endpoint} gave a broken answer to {what} ({_reason(error)})") from error
        except UnicodeError:
            raise Invalid("endpoint", self.endpoint, "its host is neither a name nor an address") from None

    @contextmanager
    def _reading(self, sent: httpx2.Request) -> Iterator[None]:
        """What goes wrong within an answer, in our words."""
        import httpx2

        what = f"{sent.method} {sent.url.path}"
        try:
            yield
        except httpx2.TimeoutException as error:
            raise Unreachable(f"{self.endpoint} broke off its answer to {what}: nothing more came in time") from error
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise Unreachable(f"{self.endpoint} broke off its answer to {what} ({_reason(error)})") from error

    def _taken(self, what: httpx2.Request, body: bytearray, piece: bytes) -> None:
        body += piece
        if len(body) > BODY_BYTES_MAX:
            path = f"{what.method} {what.url.path}"
            raise Unreachable(f"{self.endpoint} answered {path} with more than {BODY_BYTES_MAX} bytes")


class Client(_Market):
    """One market, seen through one of its brokers. Raises `Unreachable` when there is no whole answer, `ApiError` when
    it is a refusal. May be used by several threads."""

    _http: httpx2.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connections. The next call opens another."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def send(self, request: Request[R], *, timeout_s: float | None = None) -> R:
        """The reply to a call."""
        sent = self._request(request, timeout_s)
        try:
            raw = self._whole(sent)
        except _ClosedBeforeAnswer:
            if not _repeatable(request):
                raise
            raw = self._whole(sent)
        return read_reply(request, raw)

    def stream(self, request: StreamRequest[R], *, timeout_s: float | None = None) -> Stream[R]:
        """A streamed answer, part by part. Refusals are raised here, before the first part. `timeout_s` is for the
        head; a stream that is quiet for longer than its declaration says counts as broken off."""
        sent = self._request(request, timeout_s)
        response = self._head(sent)
        sent.extensions["timeout"]["read"] = request.op.quiet_s
        return Stream(response, self._reading(sent), request)

    def _head(self, sent: httpx2.Request) -> httpx2.Response:
        import httpx2

        if self._http is None:
            self._http = httpx2.Client(transport=httpx2.HTTPTransport(**self._transport()), trust_env=False)
        with self._asking(sent):
            response = self._http.send(sent, stream=True)
        self.answer_headers = response.headers
        if not response.is_success:
            with closing(response):
                raise self._refusal(sent, response, self._body(sent, response))
        return response

    def _whole(self, sent: httpx2.Request) -> bytes:
        with closing(self._head(sent)) as response:
            return self._body(sent, response)

    def _body(self, sent: httpx2.Request, response: httpx2.Response) -> bytes:
        body = bytearray()
        with self._reading(sent):
            for piece in response.iter_raw():
                self._taken(sent, body, piece)
        return bytes(body)


class Stream(Iterator[R]):
    """The parts of a streamed answer as they come. Close it to stop; it closes itself at the end and on an error."""

    def __init__(self, response: httpx2.Response, reading: Any, request: StreamRequest[R]) -> None:
        self._response = response
        self._reading = reading
        self._parts = self._read(parts_of(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> R:
        part: R = next(self._parts)
        return part

    def close(self) -> None:
        self._parts.close()
        self._response.close()

    def wake(self) -> None:
        """From another thread: whoever waits for more finds the answer broken off."""
        sock = self._response.extensions["network_stream"].get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _read(self, parts: Any) -> Any:
        with closing(self._response), self._reading:
            for piece in self._response.iter_raw():
                yield from parts(piece)
            yield from parts(b"")


class AsyncClient(_Market):
    """As `Client`, for one event loop."""

    _http: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the kept connections. The next call opens another."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def send(self, request: Request[R], *, timeout_s: float | None = None) -> R:
        """The reply to a call."""
        sent = self._request(request, timeout_s)
        try:
            raw = await self._whole(sent)
        except _ClosedBeforeAnswer:
            if not _repeatable(request):
                raise
            raw = await self._whole(sent)
        return read_reply(request, raw)

    @asynccontextmanager
    async def stream(
        self, request: StreamRequest[R], *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[R]]:
        """A streamed answer, part by part; see `Client.stream`."""
        sent = self._request(request, timeout_s)
        response = await self._head(sent)
        sent.extensions["timeout"]["read"] = request.op.quiet_s
        try:
            yield self._parts(sent, response, request)
        finally:
            await response.aclose()

    async def _parts(
        self, sent: httpx2.Request, response: httpx2.Response, request: StreamRequest[R]
    ) -> AsyncIterator[R]:
        parts = parts_of(request)
        with self._reading(sent):
            async for piece in response.aiter_raw():
                for part in parts(piece):
                    yield part
            for part in parts(b""):
                yield part

    async def _head(self, sent: httpx2.Request) -> httpx2.Response:
        import httpx2

        if self._http is None:
            self._http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(**self._transport()), trust_env=False)
        with self._asking(sent):
            response = await self._http.send(sent, stream=True)
        self.answer_headers = response.headers
        if not response.is_success:
            try:
                raise self._refusal(sent, response, await self._body(sent, response))
            finally:
                await response.aclose()
        return response

    async def _whole(self, sent: httpx2.Request) -> bytes:
        response = await self._head(sent)
        try:
            return await self._body(sent, response)
        finally:
            await response.aclose()

    async def _body(self, sent: httpx2.Request, response: httpx2.Response) -> bytes:
        body = bytearray()
        with self._reading(sent):
            async for piece in response.aiter_raw():
                self._taken(sent, body, piece)
        return bytes(body)


class _ClosedBeforeAnswer(Unreachable):
    """The connection closed before a byte of the answer."""


def _repeatable(request: Declared[Any]) -> bool:
    return request.op.idempotent or request.op.method in ("GET", "HEAD")


def _cause(error: BaseException) -> BaseException:
    """What the system said: the error at the bottom of those that wrap it."""
    below = error.__cause__ or error.__context__
    return _cause(below) if below is not None else error


def _closed(error: BaseException) -> bool:
    return isinstance(_cause(error), ConnectionError) or "disconnected" in str(error)


def _reason(error: BaseException) -> str:
    found = _cause(error)
    return (found.strerror if isinstance(found, OSError) else None) or str(error) or type(error).__name__
