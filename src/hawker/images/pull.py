"""From a reference to unpacked trees: what it means, its blobs, its layers on top of one another.

Every blob, every tree and every image is one run of work however many ask (`singleflight`). Layers are fetched side by
side, the lowest first, and unpacked as they come; a tree is joined with those below it when these are there. What is
refused for good leaves nothing; what broke leaves what the next attempt can use.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hawker.errors import DiskFull, ImageError, ImageNotFound, Unreachable
from hawker.images.http import considerate
from hawker.images.known import ImageStore, Known, Record
from hawker.images.manifest import MANIFEST_BYTES_MAX, Manifest, choose, digest_of, read_config, read_manifest
from hawker.images.progress import State, Watchers
from hawker.images.registry import Document, Registries
from hawker.images.settings import MIB
from hawker.images.singleflight import Singleflight
from hawker.images.transfer import Peer, Transfers
from hawker.images.tree.values import LayerRefused, Unpacked
from hawker.model.image import Descriptor, Layer
from hawker.model.values import ImageRef
from hawker.telemetry import get_logger

INDEXES_MAX = 3
"""How many indexes may follow on one another: an index may lead to another (image-index.md)."""
_PEER_S = 10.0

_logger = get_logger()


def key_of(ref: ImageRef) -> str:
    """What images are remembered under. A digest says it all, so a tag beside it does not count."""
    return f"{ref.registry}/{ref.repository}@{ref.digest}" if ref.digest else str(ref)


class Pulls:
    """The pulls of one host. `close` it before the rest. `peers` may be added to at any time."""

    def __init__(self, store: ImageStore, peers: list[Peer]) -> None:
        settings, host, blobs = store.settings, store.host, store.blobs
        self._settings, self._host, self._platform, self._limits = settings, host, store.platform, store.limits
        self._blobs, self._trees, self._names = blobs, store.trees, store.names
        self._peers = peers
        self._registries = Registries(settings, host)
        self._transfers = Transfers(blobs, self._registries, peers, settings)
        self._unpacking = asyncio.Semaphore(settings.unpack_parallel)
        self._blob_runs: Singleflight[None] = Singleflight()
        self._tree_runs: Singleflight[None] = Singleflight()
        self._wanted: dict[object, tuple[set[str], set[str]]] = {}  # blobs and trees
        self._offered: dict[object, tuple[ImageRef, set[str]]] = {}  # repositories, and blobs that are in them
        self.registries = self._registries
        self.rate = self._transfers.rate
        self.watchers = Watchers()
        self.moved: dict[str, int] = {digest: size for digest, (size, _) in blobs.partials().items()}

    async def close(self) -> None:
        await self._tree_runs.close()
        await self._blob_runs.close()
        await self._registries.close()

    def wanted_blobs(self) -> set[str]:
        """The blobs that are on their way, or that an image on its way needs."""
        return set().union(*(blobs for blobs, _ in self._wanted.values()))

    def wanted_trees(self) -> set[str]:
        return set().union(*(trees for _, trees in self._wanted.values()))

    def is_fetched(self, digest: str) -> bool:
        return digest in self._blob_runs

    # What a reference means

    async def resolve(self, ref: ImageRef | None, digest: str = "") -> Known:
        """What an image is made of, as its registry has it now; nothing of it needs to be here. Without a reference
        only this host and other workers are asked for the manifest `digest`.

        Raises `ImageNotFound`, `ImageError`, `Unreachable`.
        """
        image = str(ref) if ref else digest
        wanted = digest or (ref.digest if ref else "")
        document = await self._document(ref, wanted)
        for _ in range(INDEXES_MAX):
            manifest = await asyncio.to_thread(read_manifest, image, document.media_type, document.data)
            if isinstance(manifest, Manifest):
                return await self._resolved(ref, image, document, manifest)
            chosen = await asyncio.to_thread(choose, image, manifest, self._platform)
            document = await self._document(ref, chosen.digest)
        raise ImageError(image, f"its index leads to more than {INDEXES_MAX} others")

    async def _resolved(self, ref: ImageRef | None, image: str, document: Document, manifest: Manifest) -> Known:
        config = manifest.config.digest
        was_here = config in self._blobs
        with self.wanting([config, document.digest]):
            await self.blob(ref, manifest.config)
            try:
                data = await asyncio.to_thread(self._blobs.read, config)
                made = await asyncio.to_thread(read_config, image, document.digest, manifest, data, self._platform)
            except ImageError:
                if not was_here:
                    self._blobs.remove(config)
                raise
            await self._blobs.put(document.data)
            return Known(made, manifest, Record(media_type=manifest.media_type))

    async def _document(self, ref: ImageRef | None, digest: str) -> Document:
        """A manifest or index. One that is named by its digest may come from here or from other workers."""
        if digest:
            if digest in self._blobs:
                return Document(digest, "", await asyncio.to_thread(self._blobs.read, digest))
            for peer in list(self._peers):
                data = await self._from_peer(peer, digest)
                if data is not None:
                    return Document(digest, "", data)
        if ref is None:
            raise ImageNotFound(digest, "neither this worker nor another that it knows has it")
        if self._settings.offline:
            raise ImageNotFound(str(ref), "it is not here, and this worker asks no registry")
        return await self._registries.manifest(ref, digest)

    async def _from_peer(self, peer: Peer, digest: str) -> bytes | None:
        try:
            async with asyncio.timeout(_PEER_S):
                pieces = await peer(digest, 0, 0)
                data = bytearray()
                async for piece in considerate(pieces or _nothing()):
                    data += piece
                    if len(data) > MANIFEST_BYTES_MAX:
                        return None
                whole = bytes(data)
                return whole if await asyncio.to_thread(digest_of, whole) == digest else None
        except Exception as error:  # there are others to ask
            _logger.info("image.peer_failed", blob=digest, problem=repr(error))
            return None

    # Its blobs and trees

    async def complete(self, ref: ImageRef | None, known: Known, name: str) -> None:
        """Have all layers of an image here, fetched and unpacked; `name` is what watchers know it by.

        Raises `ImageError`, `Unreachable`, `DiskFull`, `StoreError`.
        """
        self.watchers.begin(name, [(layer.digest, layer.size, self._state(known, n)) for n, layer in _numbered(known)])
        try:
            with self._offering(ref, [layer.digest for layer in known.image.layers]):
                async with asyncio.TaskGroup() as group:
                    for number, _ in _numbered(known):
                        group.create_task(self._tree(ref, known, number))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from errors
        finally:
            self.watchers.end(name)

    @contextmanager
    def wanting(self, blobs: Iterable[str], trees: Iterable[str] = ()) -> Iterator[None]:
        """They are needed, though no image is known yet that has them."""
        token = object()
        self._wanted[token] = set(blobs), set(trees)
        try:
            yield
        finally:
            del self._wanted[token]

    @contextmanager
    def _offering(self, ref: ImageRef | None, blobs: Iterable[str]) -> Iterator[None]:
        """They may be had where `ref` is, whoever began to fetch them."""
        token = object()
        if ref and not self._settings.offline:
            self._offered[token] = ref, set(blobs)
        try:
            yield
        finally:
            self._offered.pop(token, None)

    def _repositories(self, digest: str) -> list[ImageRef]:
        return [ref for ref, blobs in self._offered.values() if digest in blobs]

    def _state(self, known: Known, number: int) -> State:
        if known.chain[number] in self._trees:
            return "ready"
        return "fetched" if known.image.layers[number].digest in self._blobs else "waiting"

    async def _tree(self, ref: ImageRef | None, known: Known, number: int) -> None:
        chain_id = known.chain[number]
        if chain_id not in self._trees:
            await _joined(self._tree_runs, chain_id, lambda: self._make_tree(ref, known, number))
        self.watchers.moved(known.image.layers[number].digest, "ready")

    async def _make_tree(self, ref: ImageRef | None, known: Known, number: int) -> None:
        layer = known.image.layers[number]
        blob = Descriptor(media_type=layer.media_type, digest=layer.digest, size=layer.size)
        await self.blob(ref, blob)
        try:
            try:
                unpacked = await self._unpack_on(ref, known, number)
            except LayerRefused:
                if await self._blobs.is_sound(layer.digest):
                    raise
                await self.blob(ref, blob)  # the disk has damaged it
                unpacked = await self._unpack_on(ref, known, number)
        except LayerRefused as refused:
            raise ImageError(str(ref or known.image.digest), f"layer {number}: {refused.reason}") from refused
        if unpacked.left_out or unpacked.collapsed:
            _logger.warning(
                "image.layer_incomplete", layer=layer.digest, left_out=unpacked.left_out, collapsed=unpacked.collapsed
            )

    async def _unpack_on(self, ref: ImageRef | None, known: Known, number: int) -> Unpacked:
        """Unpack a layer, and join it with those below when they are here."""
        layer = known.image.layers[number]
        async with self._unpacking:
            self.watchers.moved(layer.digest, "unpacking")
            tree, unpacked = await self._trees.unpack(layer, self._blobs.path(layer.digest), self._limits)
        try:
            if number:
                await self._tree(ref, known, number - 1)
            lowers = [known.chain[lower] for lower in range(number - 1, -1, -1)]
            await self._trees.add(known.chain[number], tree, unpacked, lowers)
        except BaseException:
            await self._trees.discard(tree)
            raise
        return unpacked

    async def blob(self, ref: ImageRef | None, blob: Descriptor) -> None:
        """Have a blob here. Raises as `complete` does."""
        size = self._blobs.size(blob.digest)
        if size is not None and (size == blob.size or await self._blobs.is_sound(blob.digest)):
            self._check_size(ref, blob)
            return
        with self._offering(ref, [blob.digest]):
            await _joined(self._blob_runs, blob.digest, lambda: self._fetch(ref, blob))
        self._check_size(ref, blob)

    def _check_size(self, ref: ImageRef | None, blob: Descriptor) -> None:
        size = self._blobs.size(blob.digest)
        if size != blob.size:
            raise ImageError(str(ref or blob.digest), f"{blob.digest} is said to have {blob.size} bytes and has {size}")

    async def _fetch(self, ref: ImageRef | None, blob: Descriptor) -> None:
        def moved(count: int) -> None:
            self.moved[blob.digest] = count
            self.watchers.moved(blob.digest, "fetching", count)

        with self._offering(ref, [blob.digest]):
            await self._transfers.fetch(lambda: self._repositories(blob.digest), blob, moved)
        self.moved.pop(blob.digest, None)
        self.watchers.moved(blob.digest, "fetched")

    def lacking(self, known: Known) -> int:
        """Bytes that would have to travel before it runs here."""
        lacking = {}
        for number, layer in _numbered(known):
            if known.chain[number] not in self._trees and layer.digest not in self._blobs:
                lacking[layer.digest] = max(layer.size - self.moved.get(layer.digest, 0), 0)
        return sum(lacking.values())

    def has_room(self, known: Known) -> bool:
        return self.lacking(known) <= self._free()

    def check_room(self, known: Known) -> None:
        """Raises `DiskFull` when what is lacking would leave too little room for others."""
        if not self.has_room(known):
            raise DiskFull(
                f"image {known.image.digest}: {self.lacking(known) // MIB} MiB are lacking here, and "
                f"{max(self._free(), 0) // MIB} MiB are free above the {self._settings.free_mib_least} MiB kept free"
            )

    def _free(self) -> int:
        about = os.statvfs(self._blobs.directory)
        return about.f_bavail * about.f_frsize - self._settings.free_mib_least * MIB


async def _joined(runs: Singleflight[None], key: str, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Join a run of somebody else, who may come by it in a way that is closed to him and open to us: what he failed at
    is tried once more."""
    if key in runs:
        try:
            return await runs.join(key, start)
        except (ImageError, Unreachable):
            pass
    await runs.join(key, start)


def _numbered(known: Known) -> Iterable[tuple[int, Layer]]:
    return enumerate(known.image.layers)


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The reason among consequences. TaskGroup keeps them in the order in which they came."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _nothing() -> AsyncIterator[bytes]:
    for piece in list[bytes]():
        yield piece
