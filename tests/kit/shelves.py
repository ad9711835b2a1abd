"""Images made of nothing, and a worker's shelf of them in memory: for what only asks which layers are where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from hawker.errors import ImageNotFound
from hawker.images.base import Missing
from hawker.model.image import Image, ImageConfig, Layer, Platform
from hawker.model.values import ImageRef


def digest(text: str) -> str:
    return "sha256:" + sha256(text.encode()).hexdigest()


def an_image(*layers: tuple[str, int]) -> Image:
    """An image of named layers with their sizes in bytes."""
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    made = [Layer(media_type=kind, digest=digest(n), size=size, diff_id=digest(f"{n} unpacked")) for n, size in layers]
    return Image(digest=digest(str(layers)), platform=Platform(), config=ImageConfig(), layers=tuple(made))


class MemoryShelf:
    """A `hawker.worker.images.stock.Shelf`. `there` is what a registry would have; fetching from it takes no time, or,
    while `gate` is closed, until that is opened."""

    def __init__(self, **there: Image) -> None:
        self.there = {str(ImageRef(name)): image for name, image in there.items()}
        self.here: dict[str, Image] = {}
        self.partly: dict[str, Missing] = {}
        self.holders: dict[str, str] = {}
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.bytes_per_s = 0.0

    def put(self, reference: str, image: Image) -> None:
        self.here[str(ImageRef(reference))] = image

    async def ensure(self, reference: str) -> Image:
        self.asked.append(reference)
        await self.gate.wait()
        name = str(ImageRef(reference))
        if name not in self.here and name not in self.there:
            raise ImageNotFound(reference, "its registry does not know it")
        return self.here.setdefault(name, self.there.get(name) or self.here[name])

    def find(self, reference: str) -> Image | None:
        ref = ImageRef(reference)
        return self.here.get(str(ref)) or next((i for i in self.here.values() if i.digest == ref.digest), None)

    def layers(self, image: Image) -> Sequence[Path]:
        return [Path("/nowhere") / layer.digest for layer in reversed(image.layers)]

    def missing(self, reference: str) -> Missing:
        return self.partly.get(reference, Missing(known=self.find(reference) is not None))

    def hold(self, holder: str, digest: str) -> None:
        self.holders[holder] = digest

    def release(self, holder: str) -> None:
        self.holders.pop(holder, None)

    def all(self) -> Iterable[tuple[Sequence[str], Image]]:
        return [((name,), image) for name, image in reversed(self.here.items())]

    def has_blob(self, digest: str) -> bool:
        return any(layer.digest == digest for image in self.here.values() for layer in image.layers)
