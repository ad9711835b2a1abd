"""What the market asks of a worker's images, answered from memory: what an order's image lacks here, and keeping it
while somebody counts on it.

An offer never waits for a registry. A worker that does not know an image can say what it lacks when the ask tells what
the image is made of; else it says that it does not know (decision record 14).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from hawker.errors import HawkerError
from hawker.images.base import ImageSource
from hawker.model.image import Image
from hawker.model.market import Parts
from hawker.model.values import is_host_image
from hawker.telemetry import get_logger

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
        """As transfers have been of late; 0 before the first."""


class Stock:
    """One worker's images as its market sees them. `close` ends the fetching that nobody waits for."""

    def __init__(self, images: Shelf) -> None:
        self._images = images
        self._fetching: dict[str, asyncio.Task[None]] = {}

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

    def prefetch(self, image: str) -> None:
        """Fetch it in the background, once however many ask. That it fails is for whoever needs it to find out."""
        if is_host_image(image) or image in self._fetching:
            return
        task = asyncio.get_running_loop().create_task(self._fetch(image), name=f"prefetch {image}")
        self._fetching[image] = task
        task.add_done_callback(lambda done: self._fetching.pop(image, None))

    async def close(self) -> None:
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, image: str) -> None:
        try:
            await self._images.ensure(image)
        except HawkerError as error:
            _logger.warning("prefetch.failed", image=image, error=error.message, cause="an order without a start")


def parts_of(image: Image) -> Parts:
    return Parts(image.digest, tuple((layer.digest, layer.size) for layer in image.layers))


_logger = get_logger()
