"""One request to a registry: redirects, authorization, and what an answer means.

- `Authorization` goes to the origin it was made for. A redirect to another, as registries give for blobs, goes without.
- A 401 is answered once, with a token or a password. Tokens are kept until they expire.

Nothing is repeated here: `Again` says that a request may be. `hawker.images.endpoint` says where requests may go. The
client's library is imported where it is used: a host that never asks a registry does without it.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

import hawker
from hawker.errors import ImageError, ImageNotFound
from hawker.host import Host
from hawker.images.auth import Credentials, Tokens, read_challenges, read_token
from hawker.images.docker import HelperFailed, credentials_for
from hawker.images.endpoint import Endpoint, check_leads, origin_of, url_of
from hawker.images.settings import ImageSettings
from hawker.telemetry import get_logger

if TYPE_CHECKING:
    import httpx2

REDIRECTS_MAX = 5
AFTER_S_MAX = 60.0
"""A registry that asks for more patience (`Retry-After`) is asked again after this."""
_SAID_BYTES_MAX = 4096
_TOKEN_BYTES_MAX = 1 << 20
_HEAD_TIMES = 3
"""How many read time-outs may pass until an answer begins, including all redirects and tokens that it takes."""
_SMALL_PIECES = 64
_CLIENT_ID = "hawker"
_NUMBER = re.compile(r"[0-9]{1,18}")
_logger = get_logger()

Content = Callable[[], AsyncIterator[bytes]]
"""Makes a body; called again for each attempt."""


class Again(Exception):
    """It did not work and may work later, not before `after_s` seconds if that is given. `unknown`: no host has the
    name that was asked for, so a few tries are enough."""

    def __init__(self, problem: str, after_s: float | None = None, *, unknown: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.after_s = after_s
        self.unknown = unknown


@cache
def _trusting_the_system() -> ssl.SSLContext:
    return ssl.create_default_context()


def _trusting(ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(ca)
    return context


class Exchange:
    """Requests to registries. `close` it."""

    def __init__(self, settings: ImageSettings, host: Host) -> None:
        self._settings = settings
        self._host = host
        self._tokens = Tokens()
        self._granting: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._clients: dict[str, httpx2.AsyncClient] = {}  # by the authorities that they trust besides the system's

    async def close(self) -> None:
        while self._clients:
            await self._clients.popitem()[1].aclose()

    def _opened(self, to: Endpoint) -> httpx2.AsyncClient:
        """The client for a registry and the hosts that it leads us to: authorities that are trusted for one registry
        vouch for no other. It is made when it is needed, so a host that never asks a registry does not load authorities
        (20 ms)."""
        settings = self._settings
        ca = settings.registry(to.host).ca
        client = self._clients.get(ca)
        if client is None:
            import httpx2

            client = self._clients[ca] = httpx2.AsyncClient(
                verify=_trusting(ca) if ca else _trusting_the_system(),
                timeout=httpx2.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s, pool=None),
                limits=httpx2.Limits(max_connections=64, max_keepalive_connections=8, keepalive_expiry=30),
                headers={"User-Agent": f"hawker/{hawker.__version__}", "Accept-Encoding": "identity"},
                mounts={f"all://{name}": None for name in ("127.0.0.1", "localhost", "[::1]")},  # by no proxy
            )
        return client

    @asynccontextmanager
    async def send(
        self,
        image: str,
        to: Endpoint,
        method: str,
        path: str,
        scope: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Content | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> AsyncIterator[httpx2.Response]:
        """The answer, its body yet to be read; `path` may be a whole URL that the registry gave. While it is read, too,
        a broken connection is raised as `Again`.

        Raises `Again`; `ImageNotFound` for 404 and `ImageError` for every other status that is not `expected`.
        """
        with _broken(to.host):
            most_s = self._settings.read_timeout_s * _HEAD_TIMES
            async with _in_time(to.host, most_s) if content is None else nullcontext():
                response = await self._authorized(image, to, method, path, scope, dict(headers or {}), content)
                if response.status_code not in expected:
                    try:
                        await self._refuse(image, to, response)
                    finally:
                        await response.aclose()
            try:
                yield response
            finally:
                await response.aclose()

    async def _authorized(
        self,
        image: str,
        to: Endpoint,
        method: str,
        path: str,
        scope: str,
        headers: dict[str, str],
        content: bytes | Content | None,
    ) -> httpx2.Response:
        held = self._tokens.get(to.origin, scope, self._now_s())
        response = await self._redirected(image, to, method, path, headers, held, content)
        if response.status_code != 401:
            return response
        challenge = response.headers.get("www-authenticate", "")
        if origin_of(response.request.url) != to.origin:
            return response  # another host's question is none that we answer
        await response.aclose()
        if held is not None:
            self._tokens.drop(to.origin, scope)
        granted = await self._grant(image, to, scope, challenge, held)
        return await self._redirected(image, to, method, path, headers, granted, content)

    async def _redirected(
        self,
        image: str,
        to: Endpoint,
        method: str,
        path: str,
        headers: dict[str, str],
        authorization: str | None,
        content: bytes | Content | None,
    ) -> httpx2.Response:
        home = url_of(to.origin)
        url = check_leads(self._settings, image, to, home.join(path))
        for _ in range(REDIRECTS_MAX + 1):
            more = {"Authorization": authorization} if authorization and origin_of(url) == to.origin else {}
            body = content() if callable(content) else content
            client = self._opened(to)
            request = client.build_request(method, url, headers={**headers, **more}, content=body)
            response = await client.send(request, stream=True)
            location = response.headers.get("location")
            if response.status_code not in (301, 302, 303, 307, 308) or not location or method not in ("GET", "HEAD"):
                return response
            await response.aclose()
            url = check_leads(self._settings, image, to, url.join(location))
        raise ImageError(image, f"{to.host} redirects more than {REDIRECTS_MAX} times")

    async def _grant(self, image: str, to: Endpoint, scope: str, header: str, tried: str | None) -> str:
        """An `Authorization` for this scope. Asked for once, however many need it."""
        async with self._granting.setdefault((to.origin, scope), asyncio.Lock()):
            now = self._now_s()
            held = self._tokens.get(to.origin, scope, now)
            if held is not None and held != tried:
                return held
            credentials, lacking = Credentials(), ""
            try:
                credentials = await credentials_for(self._settings, to.host)
            except HelperFailed as error:  # what is public needs none
                _logger.warning("image.credential_helper_failed", registry=to.host, problem=str(error))
                lacking = f": {error}"
            for challenge in read_challenges(header):
                if challenge.scheme == "bearer":
                    granted, lasts_s = await self._token(image, to, scope, challenge.values, credentials, lacking)
                    self._tokens.put(to.origin, scope, granted, now + lasts_s)
                    return granted
                if challenge.scheme == "basic" and credentials.username:
                    if credentials.basic == tried:
                        break
                    self._tokens.put(to.origin, scope, credentials.basic, now + 3600)
                    return credentials.basic
            why = "refuses ours" if credentials else f"knows nobody without credentials{lacking}"
            raise _denied(image, to, why)

    async def _token(
        self, image: str, to: Endpoint, scope: str, given: Mapping[str, str], credentials: Credentials, lacking: str
    ) -> tuple[str, float]:
        realm = check_leads(self._settings, image, to, url_of(to.origin).join(given.get("realm", "")))
        client = self._opened(to)
        asked = [("service", given["service"])] if given.get("service") else []
        if credentials.token:
            form = dict(asked) | {"grant_type": "refresh_token", "client_id": _CLIENT_ID, "scope": scope}
            form["refresh_token"] = credentials.token
            request = client.build_request("POST", realm, data=form)
        else:
            headers = {"Authorization": credentials.basic} if credentials.username else {}
            query = [*realm.params.multi_items(), *asked, *(("scope", one) for one in scope.split(" "))]
            request = client.build_request("GET", realm.copy_with(params=query), headers=headers)
        response = await client.send(request, stream=True)  # no redirect: credentials stay
        try:
            if response.status_code in (400, 401, 403, 404):
                raise _denied(image, to, f"has {realm.host} give tokens, which refuses one{lacking}")
            if response.status_code != 200:
                raise _again(response, realm.host)
            token = read_token(await body_of(response, _TOKEN_BYTES_MAX))
        finally:
            await response.aclose()
        if token is None:
            raise ImageError(image, f"{realm.host}, which gives tokens for {to.host}, answered without one")
        return f"Bearer {token[0]}", token[1]

    async def _refuse(self, image: str, to: Endpoint, response: httpx2.Response) -> None:
        status = response.status_code
        if status in (408, 425, 429) or status >= 500:
            raise _again(response, to.host)
        said = _said(await body_of(response, _SAID_BYTES_MAX, cut=True))
        if status == 404:
            raise ImageNotFound(image, f"{to.host} does not have it{said}")
        if status in (401, 403):
            raise _denied(image, to, f"denies access{said}")
        raise ImageError(image, f"{to.host} answered {status}{said}")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def body_of(response: httpx2.Response, bytes_max: int, *, cut: bool = False) -> bytes:
    """The whole body. A longer one is an error, or `cut` off."""
    body = bytearray()
    async with aclosing(considerate(response.aiter_raw())) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > bytes_max:
                if cut:
                    return bytes(body[:bytes_max])
                raise Again(f"{response.request.url.host} sent more than {bytes_max} bytes")
    return bytes(body)


async def considerate(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the same pieces, and let other tasks run in between: thousands of tiny pieces may come in one packet."""
    number = 0
    try:
        async for piece in pieces:
            yield piece
            number += 1
            if number % _SMALL_PIECES == 0:
                await asyncio.sleep(0)
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


@asynccontextmanager
async def _in_time(host: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Again(f"{host} did not begin to answer within {seconds:g} s") from error


@contextmanager
def _broken(host: str) -> Iterator[None]:
    import httpx2

    try:
        yield
    except (httpx2.TransportError, httpx2.StreamError) as error:
        raise Again(f"{host}: {str(error) or type(error).__name__}", unknown=_is_unknown(error)) from error
    except httpx2.InvalidURL as error:
        raise Again(f"{host} leads to an address that cannot be read: {error}") from error


def _is_unknown(error: BaseException | None) -> bool:
    """Whether a name server has said that there is no such name, as against having said nothing."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def number_of(text: str) -> int | None:
    """Read a number of a header. None: the text is no number, such as a superscript two, which is a digit to Python."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _again(response: httpx2.Response, host: str) -> Again:
    return Again(f"{host} answered {response.status_code}", _retry_after_s(response.headers))


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Read either form of `Retry-After` (RFC 9110, section 10.2.3). A date is measured by the sender's own clock."""
    value = headers.get("retry-after", "").strip()
    if (seconds := number_of(value)) is not None:
        return min(float(seconds), AFTER_S_MAX)
    try:
        at, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return min(max((at - now).total_seconds(), 0.0), AFTER_S_MAX)
    except (ValueError, TypeError):
        return None


def _denied(image: str, to: Endpoint, why: str) -> ImageError:
    return ImageError(
        image,
        f"{to.host} {why}",
        hint=f'set username and password in [images.registries."{to.host}"], or `docker login {to.host}`',
    )


class _Problem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Problems(msgspec.Struct):
    errors: list[_Problem] = []


def _said(body: bytes) -> str:
    """The first of a registry's own words for an error (distribution-spec.md, "Error Codes")."""
    try:
        problems: Any = msgspec.json.decode(body, type=_Problems).errors
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    words = (problems[0].message or problems[0].code) if problems else ""
    printable = "".join(character for character in words[:200] if character.isprintable())
    return f": {printable}" if printable else ""
