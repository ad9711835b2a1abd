"""The bodies of the API for images. All of it is ours: the public API knows images by their names alone."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from hawker.model.api import Body
from hawker.model.image import Image

PART_BYTES = 4 << 20
"""What a client sends at once of an upload."""
PART_BYTES_MAX = 16 << 20

Name = Annotated[str, Meta(min_length=1, max_length=1024)]


# --- requests --------------------------------------------------------------------------------------------------------


class PullImage(Body, frozen=True):
    """Ask the registry again what the name means, on every worker that has the image, or on one when none has.
    `worker` and `region` narrow it down."""

    image: Name
    worker: str | None = None
    region: str | None = None


class PrefetchImage(Body, frozen=True):
    """Have the image where it is not yet: on every worker, or on `count` of each region. What a worker has already
    stays what it is."""

    image: Name
    worker: str | None = None
    region: str | None = None
    count: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class PushImage(Body, frozen=True):
    """Copy the image to a registry, under the name `to`, or its own. `username` and `password` go to that registry and
    are kept nowhere; without them its configured ones are used."""

    image: Name
    to: Name | None = None
    worker: str | None = None
    username: str | None = None
    password: str | None = None


class BeginUpload(Body, frozen=True):
    """`size`: bytes in all."""

    size: Annotated[int, Meta(ge=0)]
    worker: str | None = None
    region: str | None = None


class BuildConfig(Body, frozen=True):
    """How the program of an image made from files is started; see `hawker.model.image.ImageConfig`."""

    entrypoint: list[str] = []
    cmd: list[str] = []
    env: list[str] = []
    user: str = ""
    working_dir: str = ""
    stop_signal: str = ""
    exposed: list[str] = []
    labels: dict[str, str] = {}


class ImportImage(Body, frozen=True):
    """Make an image of an upload that is complete, and name it. `archive`: an image as `docker save`, `podman save` and
    `skopeo` write it; `files`: a tar of its files, which become one layer with `config`."""

    upload: Annotated[str, Meta(min_length=1, max_length=64)]
    image: Name
    kind: Literal["archive", "files"] = "archive"
    worker: str | None = None
    config: BuildConfig = BuildConfig()


# --- replies ---------------------------------------------------------------------------------------------------------


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
