"""Images that come from files of this host instead of a registry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from hawker.errors import HawkerError, ImageError
from hawker.images.blobs import translated
from hawker.images.collecting import Collecting
from hawker.images.known import ImageStore, Known
from hawker.images.manifest import digest_of
from hawker.images.pull import Pulls, key_of
from hawker.images.singleflight import to_its_end
from hawker.images.tree.archive import Archived, read_archive, read_files
from hawker.images.tree.pack import describe, pack_directory
from hawker.model.image import Image, ImageConfig
from hawker.model.values import ImageRef, is_digest


class LocalImages:
    """Makes one host's images from its own files. `keep` is called with an image that is here and the names that it
    gets."""

    def __init__(
        self,
        store: ImageStore,
        pulls: Pulls,
        collecting: Collecting,
        keep: Callable[[Known, Sequence[str]], Awaitable[None]],
    ) -> None:
        self._platform, self._limits, self._blobs, self._trees = store.platform, store.limits, store.blobs, store.trees
        self._pulls = pulls
        self._collecting = collecting
        self._keep = keep

    async def add(self, names: Sequence[str], manifest: bytes, blobs: Mapping[str, bytes | Path]) -> Image:
        """As `Images.add`; without a name the image goes by its digest."""
        digest = digest_of(manifest)
        watched = names[0] if names else digest
        trees: list[str] = []
        try:
            with self._pulls.wanting([*blobs, digest]):
                for each, data in blobs.items():
                    await self._put(watched, each, data)
                known = await self._pulls.resolve(None, await self._blobs.put(manifest))
                trees = known.chain
                with self._pulls.wanting(known.blobs, known.chain):
                    await self._pulls.complete(None, known, watched)
                    await self._keep(known, [name for name in names if not is_digest(name)])
        except HawkerError:
            await self._collecting.clean_up([*blobs, digest], trees)
            raise
        return known.image

    async def import_archive(self, path: Path, name: str) -> Image:
        """As `Images.import_archive`."""
        return await self._made(name, lambda into: read_archive(path, into, self._platform, limits=self._limits))

    async def build_from(self, path: Path, name: str, config: ImageConfig) -> Image:
        """As `Images.build_from`."""

        def pack(into: Path) -> Archived:
            if not path.is_dir():
                return read_files(path, into, config, self._platform, limits=self._limits)
            layer = pack_directory(path, into / "layer", compression="zstd", mtime=0)
            manifest, described = describe([layer], config, self._platform)
            blobs: dict[str, bytes | Path] = {digest_of(described): described, layer.digest: into / "layer"}
            return Archived(names=(), manifest=manifest, blobs=blobs)

        return await self._made(name, pack)

    async def _made(self, name: str, make: Callable[[Path], Archived]) -> Image:
        """Add the image that a function makes in a directory; the function runs in a thread."""
        async with self._trees.scratch() as into:
            try:
                made = await to_its_end(asyncio.to_thread(make, into))
            except OSError as error:
                raise translated(error, into) from error
            told = [each for each in made.names if "/" in each or ":" in each]  # others are mere tags
            names = [name] if name else [key_of(ImageRef.checked(each)) for each in told]
            return await self.add(names, made.manifest, made.blobs)

    async def _put(self, image: str, digest: str, data: bytes | Path) -> None:
        if isinstance(data, Path):
            try:
                await asyncio.to_thread(self._blobs.take, data, digest)
            except OSError as error:
                raise translated(error, data) from error
        elif await self._blobs.put(data) != digest:
            raise ImageError(image, f"what was given for {digest} has other bytes")
