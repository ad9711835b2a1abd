"""The worker's handlers for images: for everybody what is in `hawker.model.image_api`, for agents the blobs by
their digests and what names mean.

Only agents may read blobs: a digest is no secret, and an image may be private to whoever pulled it. A fetch goes on
when the client that asked for it is gone, as an order does.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.responses import Response, StreamingResponse

from hawker.errors import HawkerError, ImageNotFound, Invalid, NotFound, PreconditionFailed, TooManyRequests
from hawker.http.call import Call
from hawker.http.events import KEEP_ALIVE, EventStream, event
from hawker.http.handlers import Route, on, unread
from hawker.images.blobs import translated
from hawker.images.progress import Progress
from hawker.images.service import Images, Listed
from hawker.images.singleflight import to_its_end
from hawker.images.tree.archive import Archived, read_archive, read_files
from hawker.model import api, image_api
from hawker.model.image import Image
from hawker.model.values import ImageRef, check_image, is_digest, is_host_image
from hawker.telemetry import get_logger
from hawker.worker.images.uploads import Uploads

JOBS_MOST = 32
BLOBS_MOST = 8
"""Blobs sent to other workers at once: whoever is refused asks another, who has it soon."""
TELL_S = 0.2
QUIET_S = 10.0
_RANGE = re.compile(r"bytes=(\d+)-")

Work = Callable[[Callable[[Progress], None]], Awaitable[Image]]


class ImageApi:
    """Answers the calls of `hawker.model.image_api` for its worker. `close` ends what still runs."""

    def __init__(self, images: Images, uploads: Uploads, worker: str, region: str) -> None:
        self._images = images
        self._uploads = uploads
        self._worker = worker
        self._region = region
        self._jobs: dict[asyncio.Task[Image], None] = {}
        self._sending = 0

    def routes(self) -> tuple[Route, ...]:
        return (
            on(image_api.ListImages, self.list_images),
            on(image_api.ShowImage, self.show),
            on(image_api.RemoveImage, self.remove),
            on(image_api.PullImage, self.pull),
            on(image_api.PrefetchImage, self.prefetch),
            on(image_api.PushImage, self.push),
            on(image_api.BeginUpload, self.begin_upload),
            on(image_api.Upload, self.upload),
            on(image_api.DropUpload, self.drop_upload),
            on(image_api.ImportImage, self.import_image),
            on(image_api.NameImage, self.name),
            unread(image_api.ReadBlob, self.blob),
        )

    async def close(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    # --- what is here ------------------------------------------------------------------------------------------------

    async def list_images(self, call: Call, request: image_api.ListImages) -> Any:
        self._check_meant(request.worker, request.region)
        return [image_api.ImageHere(**self._here(listed)) for listed in self._images.list() if listed.complete]

    async def show(self, call: Call, request: image_api.ShowImage) -> Any:
        self._check_meant(request.worker, request.region)
        found = self._images.find(checked(request.image))
        return [
            image_api.ImageShown(**self._here(listed), image=listed.image)
            for listed in self._images.list()
            if found and listed.image.digest == found.digest
        ]

    async def remove(self, call: Call, request: image_api.RemoveImage) -> Any:
        self._check_meant(request.worker, request.region)
        try:
            await self._images.remove(checked(request.image))
        except ImageNotFound:
            return []
        return [image_api.ImageRemoved(worker=self._worker, removed=True)]

    def _here(self, listed: Listed) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "region": self._region,
            "digest": listed.image.digest,
            "names": list(listed.names),
            "size": listed.size,
            "layers": len(listed.image.layers),
            "used_at_ms": listed.used_ms,
            "in_use": len(listed.held),
        }

    # --- bringing and sending ----------------------------------------------------------------------------------------

    async def pull(self, call: Call, request: image_api.PullImage) -> Any:
        self._check_meant(request.worker, request.region)
        name = checked(request.image)
        return self._told(name, lambda progress: self._images.pull(name, progress))

    async def prefetch(self, call: Call, request: image_api.PrefetchImage) -> Any:
        self._check_meant(request.worker, request.region)
        name = checked(request.image)

        async def work(progress: Callable[[Progress], None]) -> Image:
            end = self._images.watch(name, progress)
            try:
                return await self._images.ensure(name)
            finally:
                end()

        return self._told(name, work)

    async def push(self, call: Call, request: image_api.PushImage) -> Any:
        self._check_meant(request.worker, None)
        name, to = checked(request.image), str(ImageRef.checked(request.to or request.image, "to"))
        return self._told(
            name, lambda progress: self._images.push(name, to, request.username or "", request.password or "", progress)
        )

    async def begin_upload(self, call: Call, request: image_api.BeginUpload) -> Any:
        self._check_meant(request.worker, request.region)
        return image_api.Uploading(upload=self._uploads.begin(request.size), worker=self._worker, offset=0)

    async def upload(self, call: Call, request: image_api.Upload) -> Any:
        self._check_meant(request.worker, None)
        offset = await self._uploads.write(request.upload, request.offset, request.data)
        return image_api.Uploading(upload=request.upload, worker=self._worker, offset=offset)

    async def drop_upload(self, call: Call, request: image_api.DropUpload) -> Any:
        self._check_meant(request.worker, None)
        self._uploads.drop(request.upload)
        return api.Ok()

    async def import_image(self, call: Call, request: image_api.ImportImage) -> Any:
        self._check_meant(request.worker, None)
        ref = ImageRef.checked(request.image)
        if ref.digest:
            raise Invalid("image", request.image, "give it a name with a tag: its digest follows from its bytes")
        name = str(ref)
        path = self._uploads.take(request.upload)

        async def work(progress: Callable[[Progress], None]) -> Image:
            into = path.with_name(f"{path.name}.parts")
            end = self._images.watch(name, progress)
            try:
                found = await to_its_end(asyncio.to_thread(_unwrapped, path, into, request, self._images))
                return await self._images.add(name, found.manifest, found.blobs)
            except OSError as error:
                raise translated(error, into) from error
            finally:
                end()
                self._uploads.drop(request.upload)
                await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)

        return self._told(name, work)

    def _told(self, name: str, work: Work) -> EventStream:
        """Begin it, and tell how it goes."""
        if len(self._jobs) >= JOBS_MOST:
            raise TooManyRequests(
                f"{JOBS_MOST} fetches are under way on {self._worker}", hint="try again when some end"
            )
        layers: dict[str, Progress] = {}
        job = asyncio.get_running_loop().create_task(_begun(work, layers), name=f"image {name}")
        self._jobs[job] = None
        job.add_done_callback(self._ended)
        return EventStream(self._events(name, job, layers))

    def _ended(self, job: asyncio.Task[Image]) -> None:
        del self._jobs[job]
        if not job.cancelled() and (error := job.exception()) and not isinstance(error, HawkerError):
            _logger.error("image.job_failed", job=job.get_name(), exc_info=error)

    async def _events(
        self, name: str, job: asyncio.Task[Image], layers: dict[str, Progress]
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        told, told_s = None, loop.time()
        while not job.done():
            await asyncio.wait({job}, timeout=TELL_S)
            now = self._progress(name, layers)
            if now != told:
                told, told_s = now, loop.time()
                yield event("progress", now)
            elif loop.time() - told_s > QUIET_S:
                told_s = loop.time()
                yield KEEP_ALIVE
        if job.cancelled():
            yield self._error(HawkerError(f"{self._worker} is stopping", hint="ask again"))
        elif (error := job.exception()) is None:
            yield event("done", self._done(name, job.result()))
        else:
            ours = HawkerError(f"internal error: {type(error).__name__}")
            yield self._error(error if isinstance(error, HawkerError) else ours)

    def _progress(self, name: str, layers: dict[str, Progress]) -> image_api.ImageProgress:
        states = [layer.state for layer in layers.values()]
        if any(state in ("sending", "sent") for state in states):
            doing = "sending"
        else:
            doing = "fetching" if any(state in ("waiting", "fetching") for state in states) else "unpacking"
        return image_api.ImageProgress(
            worker=self._worker,
            image=name,
            done=sum(layer.bytes for layer in layers.values()),
            total=sum(layer.total for layer in layers.values()),
            doing=doing if states else "",
        )

    def _done(self, name: str, image: Image) -> image_api.ImageHere:
        for listed in self._images.list():
            if listed.image.digest == image.digest:
                return image_api.ImageHere(**self._here(listed))
        return image_api.ImageHere(
            worker=self._worker,
            region=self._region,
            digest=image.digest,
            names=[name],
            size=image.size,
            layers=len(image.layers),
            used_at_ms=0,
            in_use=0,
        )

    def _error(self, error: HawkerError) -> bytes:
        return event(
            "error",
            image_api.ImageFailed(worker=self._worker, error=error.message, status=error.code, hint=error.hint),
        )

    # --- for agents --------------------------------------------------------------------------------------------------

    async def name(self, call: Call, request: image_api.NameImage) -> image_api.Named:
        found = self._images.find(checked(request.image)) if request.image else None
        return image_api.Named(digest=found.digest if found else "")

    async def blob(self, call: Call) -> Response:
        """A manifest, a configuration or a layer, from the offset of a Range header on."""
        digest = call.path("digest")
        size = self._images.blob_size(digest) if is_digest(digest) else None
        if size is None:
            raise NotFound(f"{self._worker} does not have {digest}")
        headers = {"accept-ranges": "bytes"}
        offset = 0
        if asked := call.request.headers.get("range"):
            if not (matched := _RANGE.fullmatch(asked)):
                raise Invalid("range", asked, "ask for bytes=OFFSET- or for all")
            offset = int(matched[1])
            if offset >= size:
                raise RangeNotSatisfiable(f"{digest} has {size} bytes")
            headers["content-range"] = f"bytes {offset}-{size - 1}/{size}"
        headers["content-length"] = str(size - offset)
        if call.request.method == "HEAD":
            return Response(status_code=200, headers=headers, media_type=_BYTES)
        if self._sending >= BLOBS_MOST:
            raise TooManyRequests(f"{self._worker} sends {BLOBS_MOST} blobs already")
        self._sending += 1
        return _Blob(self._send(digest, offset), self._sent, 206 if asked else 200, headers)

    async def _send(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        async for piece in self._images.blob(digest, offset):
            yield piece

    def _sent(self) -> None:
        self._sending -= 1

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _check_meant(self, worker: str | None, region: str | None) -> None:
        """A request that a broker sent on is for this worker; one that came here directly may name another."""
        if worker and worker != self._worker:
            raise NotFound(f"this is worker {self._worker}, not {worker}", hint="ask a broker")
        if region and region != self._region:
            raise NotFound(f"worker {self._worker} is in {self._region}, not in {region}", hint="ask a broker")


_BYTES = "application/octet-stream"


class RangeNotSatisfiable(Invalid):
    """The range that was asked for begins after the blob's end."""

    status = 416

    def __init__(self, problem: str) -> None:
        super().__init__("range", "", problem)


class _Blob(StreamingResponse):
    """Tells when it is over, also when it never began."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], over: Callable[[], None], status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(pieces, status, headers=headers, media_type=_BYTES)
        self._pieces = pieces
        self._over = over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()
            await self._pieces.aclose()


async def _begun(work: Work, layers: dict[str, Progress]) -> Image:
    def moved(progress: Progress) -> None:
        layers[progress.digest] = progress

    return await work(moved)


def _unwrapped(path: Path, into: Path, body: image_api.ImportImage, images: Images) -> Archived:
    into.mkdir(mode=0o700)
    if body.kind == "archive":
        return read_archive(path, into, images.platform, wanted=body.image, limits=images.limits)
    return read_files(path, into, body.config, images.platform, limits=images.limits)


def checked(image: str) -> str:
    """A reference or a digest. Raises `Invalid`."""
    if is_host_image(image):
        raise Invalid("image", image, "this stands for the host's own programs; name an image")
    return image if is_digest(image) else check_image("image", image)


def no_images() -> tuple[Route, ...]:
    """The routes of a worker that keeps no images."""

    async def refuse(call: Call) -> Any:
        raise PreconditionFailed("this worker keeps no images", hint="none of its drivers runs any")

    return tuple(unread(kind, refuse) for kind in image_api.IMAGE_CALLS)


_logger = get_logger()
