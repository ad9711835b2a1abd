"""An image: what it is made of and how its program is started. The words are those of the OCI image specification 1.1.

An image is named by the digest of its manifest for one platform. A *layer* is a compressed tar with the changes of one
build step; it is named by the digest of its bytes as they travel (`digest`) and of the tar inside (`diff_id`). The tree
that a layer gives when it is unpacked on top of those below it is kept once for all images that share them.
"""

from __future__ import annotations

import msgspec

IMAGE_TIMEOUT_S = 300.0
"""How long a machine waits for its image by default."""
NOT_IN_TIME = "it was not here within"
"""The error for an image that did not come in time begins so. Clients know by this that another try may help."""


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """A platform by Go's names: `linux`, `amd64` or `arm64`, variant `v8` or ""."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A blob: its media type, its digest as `sha256:<64 hex digits>`, and its size in bytes."""

    media_type: str
    digest: str
    size: int


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer. `size` counts bytes as they travel."""

    media_type: str
    digest: str
    size: int
    diff_id: str


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the image's program is started where the machine's configuration says nothing else.

    `env` as `NAME=value`; `exposed` as `8080/tcp`; `user` as `name|uid[:group|gid]`; `stop_signal` as `SIGTERM` or "".
    """

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    user: str = ""
    working_dir: str = ""
    stop_signal: str = ""
    exposed: tuple[str, ...] = ()
    labels: dict[str, str] = {}


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image of one platform. `digest` names its manifest; `layers` are in order, the lowest first."""

    digest: str
    platform: Platform
    config: ImageConfig
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """The bytes to download when no layer is here yet."""
        return sum({layer.digest: layer.size for layer in self.layers}.values())
