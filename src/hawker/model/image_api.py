"""The calls for images. A worker serves them for itself; a broker sends each to the workers that it is about. All of it
is ours: the public API knows images by their names alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from hawker.model.api import Body, Ok
from hawker.model.image import Image, ImageConfig
from hawker.model.op import BYTES, EVENTS, EVENTS_QUIET_S, Op, Request, StreamRequest, declared_in

PART_BYTES = 4 << 20
"""What a client sends at once of an upload."""

Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class ImageHere(Body, frozen=True):
    """An image on one worker. `size` counts bytes as they travel, `used_at_ms` is 0 for one never used, `in_use` counts
    the machines and reservations that need it."""

    worker: str
    region: str
    digest: str
    names: list[str]
    size: int
    layers: int
    used_at_ms: int
    in_use: int


class ImageShown(ImageHere, frozen=True):
    """`image`: what it is made of and how its program is started."""

    image: Image


class ImageRemoved(Body, frozen=True):
    """What became of an image on one worker. `removed` False: it was not there, or `error` says why not."""

    worker: str
    removed: bool
    error: str | UnsetType = UNSET


class Uploading(Body, frozen=True):
    """`offset`: the bytes that are there."""

    upload: str
    worker: str
    offset: int


class ImageProgress(Body, frozen=True):
    """How far a fetch, a push or an import is on one worker. `total` is 0 until it is known."""

    worker: str
    image: str
    done: int
    total: int
    doing: str = ""


class ImageEvent(Body, frozen=True):
    """A server-sent event by its fields; `data` is JSON: of `progress` an `ImageProgress`, of `done`, a worker's last,
    an `ImageHere`, of `error`, a worker's last too, an `ImageFailed`."""

    event: Literal["progress", "done", "error"]
    data: str


class ImageFailed(Body, frozen=True):
    """`status` is the word of the API's errors, `hint` may be empty."""

    worker: str
    error: str
    status: str
    hint: str = ""


# --- calls -----------------------------------------------------------------------------------------------------------

_IMAGES = "/v1/hawker/images"
_UPLOAD = f"{_IMAGES}/uploads/{{upload}}"


def _progress(name: str, example: dict[str, Any], *, refuses: tuple[int, ...] = (404, 412, 429, 500)) -> Op:
    """A call whose answer is its progress."""
    return Op(
        f"Images_{name}",
        "POST",
        f"{_IMAGES}/{name}",
        media=EVENTS,
        quiet_s=EVENTS_QUIET_S,
        refuses=refuses,
        extension=True,
        example=example,
    )


ImageName = Annotated[str, Meta(min_length=1, description="a reference or a digest")]
Worker = Annotated[str | None, Meta(description="only this worker")]
Region = Annotated[str | None, Meta(description="only this region")]
AtWorker = Annotated[str, Meta(description="the worker that the upload is at")]


class ListImages(Request[list[ImageHere]]):
    """List the images that workers have."""

    op = Op("Images_list", "GET", _IMAGES, refuses=(404, 412, 500), extension=True)
    worker: Worker = None
    region: Region = None


class RemoveImage(Request[list[ImageRemoved]]):
    """Remove an image from every worker that has it; one that machines need is kept and says so."""

    op = Op("Images_remove", "DELETE", _IMAGES, refuses=(404, 409, 412, 500), extension=True)
    image: ImageName
    worker: Worker = None
    region: Region = None


class ShowImage(Request[list[ImageShown]]):
    """Show what an image is made of, on every worker that has it."""

    op = Op("Images_show", "GET", f"{_IMAGES}/show", refuses=(404, 412, 500), extension=True)
    image: ImageName
    worker: Worker = None
    region: Region = None


class PullImage(StreamRequest[ImageEvent]):
    """Ask the registry again what a name means: on the workers that have the image, or on one; its progress.

    `worker` and `region` narrow it down. One worker asks when none has the image.
    """

    op = _progress("pull", {"image": "docker.io/library/nginx:1.29"})
    image: Name
    worker: str | None = None
    region: str | None = None


class PrefetchImage(StreamRequest[ImageEvent]):
    """Have an image on workers before machines need it; its progress. Goes on when nobody listens any more.

    It comes to every worker that lacks it, or to `count` of each region. What a worker has already stays what it is.
    """

    op = _progress("prefetch", {"image": "docker.io/library/nginx:1.29", "region": "mad", "count": 2})
    image: Name
    worker: str | None = None
    region: str | None = None
    count: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class PushImage(StreamRequest[ImageEvent]):
    """Copy an image from a worker that has it to a registry; its progress.

    It gets the name `to`, or its own. `username` and `password` go to that registry and are kept nowhere; without them
    its configured ones are used.
    """

    op = _progress("push", {"image": "shop:1", "to": "registry.example/shop:1"})
    image: Name
    to: Name | None = None
    worker: str | None = None
    username: str | None = None
    password: str | None = None


class BeginUpload(Request[Uploading]):
    """Begin to upload an archive or files to a worker: the one named, or one with room.

    `size` counts the bytes in all.
    """

    op = Op(
        "Images_begin_upload",
        "POST",
        f"{_IMAGES}/uploads",
        success=201,
        refuses=(404, 409, 412, 429, 500),
        extension=True,
        example={"size": 10485760},
    )
    size: Annotated[int, Meta(ge=0)]
    worker: str | None = None
    region: str | None = None


class Upload(Request[Uploading]):
    """Send the next bytes of an upload, at most 16 MiB; answers how many are there.

    The same bytes may be sent again.
    """

    op = Op(
        "Images_upload",
        "PUT",
        _UPLOAD,
        query=("offset", "worker"),
        raw="data",
        refuses=(404, 409, 412, 500),
        extension=True,
    )
    upload: str
    worker: AtWorker
    offset: Annotated[int, Meta(ge=0, description="where these bytes go")]
    data: bytes


class DropUpload(Request[Ok]):
    """Give an upload up."""

    op = Op("Images_drop_upload", "DELETE", _UPLOAD, refuses=(404, 412, 500), extension=True)
    upload: str
    worker: AtWorker


class ImportImage(StreamRequest[ImageEvent]):
    """Make an image of an upload that is complete, under a name; its progress.

    `archive` is an image as `docker save`, `podman save` and `skopeo` write it, `files` a tar of its files, which
    become one layer with `config`. The upload is gone then, also after an error.
    """

    op = _progress(
        "import",
        {"upload": "01K0EXAMPLE", "image": "shop:1", "kind": "archive"},
        refuses=(404, 409, 412, 422, 429, 500),
    )
    upload: Annotated[str, Meta(min_length=1, max_length=64)]
    image: Name
    kind: Literal["archive", "files"] = "archive"
    worker: str | None = None
    config: ImageConfig = ImageConfig()


IMAGE_CALLS = declared_in(globals())


# --- between agents ---------------------------------------------------------------------------------------------------


class Named(Body, frozen=True):
    """What an image's name means on a worker: the digest of its manifest, or "" when it means nothing there."""

    digest: str = ""


class NameImage(Request[Named]):
    """Ask a worker what a name means to it."""

    op = Op("Images_name", "GET", "/v1/images/names", callers="agents", idempotent=True)
    image: str


class ReadBlob(StreamRequest[bytes]):
    """Read a manifest, a configuration or a layer, from the offset of a Range header on."""

    op = Op("Images_blob", "GET", "/v1/images/blobs/{digest}", callers="agents", idempotent=True, media=BYTES)
    digest: str
