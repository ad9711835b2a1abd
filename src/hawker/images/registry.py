"""Registries as the OCI distribution specification 1.1 has them: manifests, blobs from any byte on, uploads.

What is asked for is asked of the registry's mirrors first, in order. A mirror that does not have it or does not work is
passed over; only the registry's own word is final. Each is tried a few times, later and later, as long as trying again
may help.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hawker.errors import HawkerError, ImageError, Unreachable
from hawker.host import Host
from hawker.images.blobs import PIECE_BYTES
from hawker.images.endpoint import Endpoint, endpoint, url_of
from hawker.images.http import Again, Exchange, body_of, considerate, number_of
from hawker.images.manifest import ACCEPT, MANIFEST_BYTES_MAX, check_digest, digest_of
from hawker.images.settings import ImageSettings
from hawker.model.image import Descriptor
from hawker.model.values import ImageRef
from hawker.telemetry import get_logger

if TYPE_CHECKING:
    import httpx2

BACKOFF_S_MAX = 15.0
MIRROR_ATTEMPTS = 2
"""The registry behind it can be asked, so a mirror gets less patience."""
MIRROR_DOWN_S = 60.0
MANIFEST_S = 60.0
ANSWER_S = 120.0
"""How long a registry may take to check a blob that it was sent."""

T = TypeVar("T")
_logger = get_logger()


class Document(msgspec.Struct, frozen=True):
    """A manifest or index as it was sent, and its digest."""

    digest: str
    media_type: str
    data: bytes


class Body(msgspec.Struct, frozen=True):
    """A blob's bytes from `offset` on, which may be less than was asked for. `total`: of the whole blob, as the
    registry has it; None: it does not say."""

    offset: int
    total: int | None
    pieces: AsyncIterator[bytes]


class RangeRefused(Again):
    """The registry has nothing from that byte on, so what we have already is useless."""


class Patience:
    """Counts how often to try again and says how long to wait before. Progress starts the count over."""

    def __init__(self, settings: ImageSettings, host: Host, attempts: int | None = None) -> None:
        self._attempts = attempts or settings.attempts
        self._backoff_s = settings.backoff_s
        self._host = host
        self._failed = 0

    def progress(self) -> None:
        self._failed = 0

    async def wait(self, error: Again) -> None:
        """Raises `Unreachable` when there is none left."""
        self._failed += 1
        if self._failed >= self._attempts:
            raise Unreachable(error.problem) from error
        most = min(self._backoff_s * 2 ** (self._failed - 1), BACKOFF_S_MAX)
        await asyncio.sleep(max(most * (0.5 + self._host.rng.random() / 2), error.after_s or 0.0))


class Registries:
    """All registries, as this host may reach them. `close` it."""

    def __init__(self, settings: ImageSettings, host: Host) -> None:
        self._settings = settings
        self._host = host
        self._exchange = Exchange(settings, host)
        self._down: dict[str, float] = {}  # until when, by origin

    async def close(self) -> None:
        await self._exchange.close()

    def endpoints(self, ref: ImageRef) -> list[Endpoint]:
        """Where an image may be had, in the order to ask: mirrors that are not known to be down, then the registry."""
        mirrors = [endpoint(self._settings, host) for host in self._settings.registry(ref.registry).mirrors]
        now_s = asyncio.get_running_loop().time()
        up = [mirror for mirror in mirrors if self._down.get(mirror.origin, 0.0) <= now_s]
        return [*up, endpoint(self._settings, ref.registry)]

    def passed_over(self, mirror: Endpoint, error: HawkerError) -> None:
        """It was of no use. One that cannot be reached is not asked again for a while: every blob would wait for it."""
        if isinstance(error, Unreachable):
            self._down[mirror.origin] = asyncio.get_running_loop().time() + MIRROR_DOWN_S
        _logger.info("image.mirror_failed", mirror=mirror.host, problem=error.message)

    def patience(self, last: bool = True) -> Patience:
        return Patience(self._settings, self._host, None if last else MIRROR_ATTEMPTS)

    async def manifest(self, ref: ImageRef, digest: str = "") -> Document:
        """What `ref` names, or a manifest of the same repository by `digest`.

        Raises `ImageNotFound`, `ImageError`, `Unreachable`.
        """
        digest = digest or ref.digest
        return await self._first(ref, lambda to: self._manifest(ref, to, digest))

    async def _manifest(self, ref: ImageRef, to: Endpoint, digest: str) -> Document:
        path = to.path(ref.repository, f"manifests/{digest or ref.tag}")
        try:
            async with (
                asyncio.timeout(MANIFEST_S),
                self._exchange.send(str(ref), to, "GET", path, _pull(ref, to), headers={"Accept": ACCEPT}) as response,
            ):
                data = await body_of(response, MANIFEST_BYTES_MAX)
        except TimeoutError as error:
            raise Again(f"{to.host} did not send a manifest within {MANIFEST_S:g} s") from error
        found = await asyncio.to_thread(digest_of, data)
        check_digest(str(ref), "its manifest", found, digest or found)
        return Document(found, response.headers.get("content-type", ""), data)

    async def _first(self, ref: ImageRef, ask: Callable[[Endpoint], Awaitable[T]]) -> T:
        endpoints = self.endpoints(ref)
        for to in endpoints[:-1]:
            try:
                return await self._patiently(lambda to=to: ask(to), last=False)  # type: ignore[misc]
            except HawkerError as error:
                self.passed_over(to, error)
        try:
            return await self._patiently(lambda: ask(endpoints[-1]))
        except Unreachable as error:
            if isinstance(error.__cause__, Again) and error.__cause__.unknown:
                raise ImageError(str(ref), f"no host has the name of its registry ({error.message})") from error
            raise

    async def _patiently(self, ask: Callable[[], Awaitable[T]], last: bool = True) -> T:
        patience = self.patience(last)
        while True:
            try:
                return await ask()
            except Again as error:
                await patience.wait(error)

    @asynccontextmanager
    async def blob(self, ref: ImageRef, to: Endpoint, digest: str, offset: int) -> AsyncIterator[Body]:
        """One request for a blob from `offset` on. Raises `Again`, also while it is read; `ImageNotFound`,
        `ImageError`."""
        path = to.path(ref.repository, f"blobs/{digest}")
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        expected = (200, 206, 416) if offset else (200,)
        async with self._exchange.send(
            str(ref), to, "GET", path, _pull(ref, to), headers=headers, expected=expected
        ) as response:
            if response.status_code == 416:
                raise RangeRefused(f"{to.host} has less of {digest} than was asked for")
            start, total = 0, _length(response)
            if response.status_code == 206:
                start, total = _range(response)
                if start > offset:
                    raise Again(f"{to.host} sent another range than it was asked for")
            yield Body(start, total, considerate(response.aiter_raw()))

    # Uploads

    async def has_blob(self, ref: ImageRef, digest: str) -> bool:
        to = self.endpoints(ref)[-1]

        async def ask() -> bool:
            path = to.path(ref.repository, f"blobs/{digest}")
            async with self._exchange.send(str(ref), to, "HEAD", path, _push(ref, to), expected=(200, 404)) as response:
                return response.status_code == 200

        return await self._patiently(ask)

    async def upload(
        self, ref: ImageRef, blob: Descriptor, path: Path, moved: Callable[[int], None], mount_from: str = ""
    ) -> bool:
        """Put a blob into the repository of `ref`. `mount_from`: another of the same registry that may have it.
        `moved` is told how many bytes have been sent. Whether bytes travelled.

        Raises `ImageError`, `Unreachable`.
        """
        to = self.endpoints(ref)[-1]
        scope = _push(ref, to, mount_from)
        patience = self.patience()
        while True:
            try:
                return await self._upload(ref, to, scope, blob, path, moved, mount_from, patience)
            except Again as error:
                await patience.wait(error)

    async def _upload(
        self,
        ref: ImageRef,
        to: Endpoint,
        scope: str,
        blob: Descriptor,
        path: Path,
        moved: Callable[[int], None],
        mount_from: str,
        patience: Patience,
    ) -> bool:
        begin = to.path(ref.repository, "blobs/uploads/")
        if mount_from:
            begin += str(url_of("").copy_merge_params({"mount": blob.digest, "from": f"{to.prefix}{mount_from}"}))
        async with self._exchange.send(str(ref), to, "POST", begin, scope, expected=(201, 202)) as response:
            if response.status_code == 201:
                return False
            location = _location(to, response)
        offset = 0
        while blob.size - offset > self._settings.upload_chunk_bytes:
            try:
                location, offset = await self._upload_chunk(ref, to, scope, location, path, offset, moved)
                patience.progress()
            except Again as error:
                await patience.wait(error)
                location, offset = await self._uploaded(ref, to, scope, location)
        last = url_of(location).copy_merge_params({"digest": blob.digest})
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size - offset)}
        async with (
            _limited(to, ANSWER_S + blob.size / 1e5),
            self._exchange.send(
                str(ref),
                to,
                "PUT",
                str(last),
                scope,
                headers=headers,
                content=lambda: _read(path, offset, blob.size - offset, moved),
                expected=(201,),
            ),
        ):
            return True

    async def _upload_chunk(
        self,
        ref: ImageRef,
        to: Endpoint,
        scope: str,
        location: str,
        path: Path,
        offset: int,
        moved: Callable[[int], None],
    ) -> tuple[str, int]:
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(self._settings.upload_chunk_bytes),
            "Content-Range": f"{offset}-{offset + self._settings.upload_chunk_bytes - 1}",
        }
        async with self._exchange.send(
            str(ref),
            to,
            "PATCH",
            location,
            scope,
            headers=headers,
            content=lambda: _read(path, offset, self._settings.upload_chunk_bytes, moved),
            expected=(202,),
        ) as response:
            return _location(to, response), offset + self._settings.upload_chunk_bytes

    async def _uploaded(self, ref: ImageRef, to: Endpoint, scope: str, location: str) -> tuple[str, int]:
        """How far an interrupted upload came. Raises `Again` when the registry does not know the upload, which then
        starts over."""
        async with self._exchange.send(str(ref), to, "GET", location, scope, expected=(202, 204, 404, 416)) as response:
            if response.status_code in (404, 416):
                raise Again(f"{to.host} has lost an upload")
            first, _, last = response.headers.get("range", "").removeprefix("bytes=").partition("-")
            end = number_of(last) if first == "0" else None
            return _location(to, response), end + 1 if end else 0

    async def put_manifest(self, ref: ImageRef, media_type: str, data: bytes) -> None:
        to = self.endpoints(ref)[-1]
        path = to.path(ref.repository, f"manifests/{ref.tag or digest_of(data)}")

        async def ask() -> None:
            async with self._exchange.send(
                str(ref),
                to,
                "PUT",
                path,
                _push(ref, to),
                headers={"Content-Type": media_type},
                content=data,
                expected=(201,),
            ):
                return

        await self._patiently(ask)


def _pull(ref: ImageRef, to: Endpoint) -> str:
    return f"repository:{to.prefix}{ref.repository}:pull"


def _push(ref: ImageRef, to: Endpoint, mount_from: str = "") -> str:
    other = f" repository:{to.prefix}{mount_from}:pull" if mount_from else ""
    return f"repository:{to.prefix}{ref.repository}:pull,push{other}"


def _location(to: Endpoint, response: httpx2.Response) -> str:
    location = response.headers.get("location", "")
    if not location:
        raise Again(f"{to.host} began an upload and did not say where")
    return str(response.request.url.join(location))


def _length(response: httpx2.Response) -> int | None:
    return number_of(response.headers.get("content-length", ""))


def _range(response: httpx2.Response) -> tuple[int, int | None]:
    """First byte and length of the whole, of a `Content-Range` (RFC 9110, section 14.4)."""
    unit, _, value = response.headers.get("content-range", "").partition(" ")
    span, _, total = value.partition("/")
    first = number_of(span.partition("-")[0])
    if unit != "bytes" or (response.status_code == 206 and first is None):
        raise Again(f"{response.request.url.host} sent a range that cannot be read")
    return first or 0, number_of(total)


async def _read(path: Path, offset: int, length: int, moved: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Part of a file. `moved` is told where in it we are when a piece has been taken."""
    with path.open("rb") as file:
        file.seek(offset)
        end = offset + length
        while offset < end and (piece := await asyncio.to_thread(file.read, min(end - offset, PIECE_BYTES))):
            yield piece
            offset += len(piece)
            moved(offset)


@asynccontextmanager
async def _limited(to: Endpoint, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Again(f"{to.host} did not answer an upload within {seconds:.0f} s") from error
