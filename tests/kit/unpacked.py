"""Images that lie unpacked in directories from the start: for what runs machines and does not care where images come
from."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tests.kit.oci import Entry, busybox_layer, tar_of

from hawker.errors import ImageNotFound
from hawker.images.base import Missing
from hawker.model.image import Image, ImageConfig, Layer, Platform

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnpackedImages:
    """An `ImageSource`. `busybox` is there; `add` makes further ones on top of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._there: dict[str, Image] = {}
        self._layers: dict[str, list[Path]] = {}
        self.held: dict[str, str] = {}
        base = self._unpack("base", gzip.decompress(busybox_layer().blob))
        self._base = base
        self._put("busybox", ImageConfig(cmd=("/bin/sh",), env=(PATH,)), [base])

    def add(self, reference: str, config: Mapping[str, object], layers: Sequence[Sequence[Entry]] = ()) -> str:
        """`layers` from below to the top, without whiteouts. Gives the reference."""
        trees = [self._unpack(f"{reference}-{n}", tar_of(entries)) for n, entries in enumerate(layers)]
        plain = {"cmd": ("/bin/sh",), "env": (PATH,), **config}
        self._put(reference, msgspec.convert(plain, ImageConfig), [*reversed(trees), self._base])
        return reference

    async def ensure(self, reference: str) -> Image:
        if reference not in self._there:
            raise ImageNotFound(reference, "it is not among the images of this test")
        return self._there[reference]

    def find(self, reference: str) -> Image | None:
        named = self._there.get(reference)
        return named or next((image for image in self._there.values() if image.digest == reference), None)

    def layers(self, image: Image) -> Sequence[Path]:
        return self._layers[image.digest]

    def missing(self, reference: str) -> Missing:
        return Missing(known=reference in self._there)

    def hold(self, holder: str, digest: str) -> None:
        self.held[holder] = digest

    def release(self, holder: str) -> None:
        self.held.pop(holder, None)

    def _put(self, reference: str, config: ImageConfig, trees: list[Path]) -> None:
        layer = Layer(media_type="", digest="", size=0, diff_id="")
        image = Image(digest=f"sha256:{reference}", platform=Platform(), config=config, layers=(layer,) * len(trees))
        self._there[reference] = image
        self._layers[image.digest] = trees

    def _unpack(self, name: str, tar: bytes) -> Path:
        target = self._directory / name
        if target.exists():
            return target
        os.makedirs(target)
        target.chmod(0o755)
        with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
            opened.extractall(target, filter="fully_trusted", numeric_owner=True)
        return target
