"""What the market asks of a worker's images, answered from memory: what an order's image lacks here, and keeping it
while somebody counts on it.

An offer never waits for a registry. A worker that does not know an image can say what it lacks when the ask tells what
the image is made of; else it says that it does not know (decision record 14).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from hawker.images.base import ImageSource
from hawker.model.image import Image
from hawker.model.market import Parts
from hawker.model.values import is_host_image

BYTES_PER_S = 50e6
"""What a transfer is expected to bring before one was measured."""


class Lack(msgspec.Struct, frozen=True):
    """What is missing of an image. `parts` is what it is made of, where that is known here."""

    known: bool
    bytes: int = 0
    transfer_ms: int = 0
    parts: Parts | None = None


NOTHING = Lack(True)
UNKNOWN = Lack(False)


class Shelf(ImageSource, Protocol):
    """An image source that tells what it has."""

    def all(self) -> Iterable[tuple[Sequence[str], Image]]:
        """Every image whose layers are all here with its references, the one used last first."""

    def has_blob(self, digest: str) -> bool:
        """Whether a layer is here. From memory."""

    @property
    def bytes_per_s(self) -> float:
        """The mean rate of recent transfers; 0 before the first."""


class Stock:
    """One worker's images as its market sees them."""

    def __init__(self, images: Shelf) -> None:
        self._images = images

    def lack(self, image: str, parts: Parts | None) -> Lack:
        """What is missing of an order's image. `parts` is what the broker knows it to be made of."""
        if is_host_image(image):
            return NOTHING
        if (found := self._images.find(image)) is not None:
            return NOTHING if parts else Lack(True, parts=parts_of(found))
        missing = self._images.missing(image)
        if missing.known:
            return Lack(True, missing.bytes, missing.transfer_ms)
        if parts is None:
            return UNKNOWN
        count = sum(size for digest, size in dict(parts.layers).items() if not self._images.has_blob(digest))
        return Lack(True, count, int(count * 1000 / (self._images.bytes_per_s or BYTES_PER_S)))

    def hold(self, holder: str, image: str) -> None:
        """Keep an image that is here; of one that is not, nothing is to be kept."""
        if not is_host_image(image) and (found := self._images.find(image)) is not None:
            self._images.hold(holder, found.digest)

    def release(self, holder: str) -> None:
        self._images.release(holder)


def parts_of(image: Image) -> Parts:
    return Parts(image.digest, tuple((layer.digest, layer.size) for layer in image.layers))
