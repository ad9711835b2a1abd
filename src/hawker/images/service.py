"""A host's images: fetched when they are asked for, kept while they are needed, and removed when room is needed.

`Images` is what drivers and the market ask (`hawker.images.base.ImageSource`) and what the API offers besides. How an
image is fetched is in `pull`, what a name means in `references`, what is kept where in `blobs`, `layer_trees` and
`known`, what goes first in `collecting`.

A name is a full reference (`registry-1.docker.io/library/nginx:1.27`); short ones are completed as Docker does. It
means the image that it meant when it was fetched, until `pull` asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hawker.errors import Conflict, HawkerError, ImageError, ImageNotFound, StoreError
from hawker.host import Host
from hawker.images.base import Missing
from hawker.images.blobs import Blobs
from hawker.images.collecting import Collected, Collecting
from hawker.images.known import ImageStore, Known, Names
from hawker.images.layer_trees import LayerTrees
from hawker.images.local import LocalImages
from hawker.images.manifest import chain_ids
from hawker.images.progress import Watcher
from hawker.images.pull import Pulls
from hawker.images.pushing import push, with_credentials
from hawker.images.references import Namer, References, name_of
from hawker.images.settings import MIB, ImageSettings, host_platform
from hawker.images.singleflight import Singleflight
from hawker.images.transfer import Peer
from hawker.images.tree.values import TreeLimits
from hawker.model.image import Image, ImageConfig, Platform
from hawker.model.values import ImageRef, is_digest
from hawker.telemetry import get_logger

COLLECT_S = 600.0

_logger = get_logger()

OnRemoved = Callable[[str], None]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """An image of this host. `size`: bytes of its blobs, as they travel; `unpacked`: of its trees, shared ones
    counted too. `held` names who needs it. Times are Unix ms."""

    image: Image
    names: tuple[str, ...]
    size: int
    unpacked: int
    fetched_ms: int
    used_ms: int
    held: tuple[str, ...]
    complete: bool


class Images:
    """Open with `await Images(...).open()`; one process at a time has a directory.

    `fetchers` are asked for blobs before any registry (`transfer.Peer`), `namers` what a name means. `on_change` is
    called whenever the set of images or names has changed, `on_removed` with the digest of each image that is gone.
    """

    def __init__(
        self,
        directory: Path,
        settings: ImageSettings,
        host: Host,
        *,
        platform: Platform | None = None,
        limits: TreeLimits | None = None,
    ) -> None:
        settings.check()
        self.directory = directory
        self.settings = settings
        self.platform = platform or host_platform()
        self.fetchers: list[Peer] = []
        self.namers: list[Namer] = []
        self.on_change: list[Callable[[], None]] = []
        self.on_removed: list[OnRemoved] = []
        self._host = host
        self.limits = limits or TreeLimits(free=settings.free_mib_least * MIB)
        self._held: dict[str, str] = {}
        self._running: Singleflight[Image] = Singleflight()
        self._background: set[asyncio.Task[None]] = set()
        self._may_collect = False
        self._over = asyncio.Event()

    async def open(self) -> Images:
        """Take over what is there: drop images whose files are damaged, and remove or continue what a killed process
        left undone. Raises `StoreError`, `Invalid`."""
        free = self.settings.free_mib_least * MIB
        self._blobs = await asyncio.to_thread(Blobs, self.directory / "blobs", free)
        self._trees = LayerTrees(self.directory)
        await self._trees.open()
        self._names = await asyncio.to_thread(Names, self.directory, self._blobs, self.platform)
        store = ImageStore(
            settings=self.settings,
            host=self._host,
            platform=self.platform,
            limits=self.limits,
            blobs=self._blobs,
            trees=self._trees,
            names=self._names,
        )
        self._pulls = Pulls(store, self.fetchers)
        self._references = References(self._names, self._pulls, self.namers)
        self._collecting = Collecting(store, self._pulls, self._held)
        self._local = LocalImages(store, self._pulls, self._collecting, self._keep)
        return self

    async def close(self) -> None:
        """End what runs; what it fetched is gone on with another time."""
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        await self._running.close()
        await self._pulls.close()
        with suppress(StoreError):  # of when images were used: the next start knows a little less
            self._names.flush()

    # What drivers ask

    async def ensure(self, reference: str) -> Image:
        """As `ImageSource.ensure` says. Raises `Invalid` for what is no reference."""
        found = self.find(reference)
        if found is not None:
            self._names.used(found.digest, self._host.now_ms())
            return found
        name = name_of(reference)
        return await self._running.join(name, lambda: self._obtain(reference, name))

    def find(self, reference: str) -> Image | None:
        known = self._references.known(reference)
        return known.image if known is not None and self._is_complete(known) else None

    def layers(self, image: Image) -> Sequence[Path]:
        known = self._names.get(image.digest)
        chain = known.chain if known else chain_ids([layer.diff_id for layer in image.layers])
        return [self._trees.path(chain_id) for chain_id in reversed(chain)]

    def missing(self, reference: str) -> Missing:
        known = self._references.known_or_described(reference)
        if known is None:
            return Missing(known=False)
        lacking = self._pulls.lacking(known)
        return Missing(known=True, bytes=lacking, transfer_ms=int(lacking * 1000 / self._pulls.rate.expected))

    def hold(self, holder: str, digest: str) -> None:
        self._held[holder] = digest
        self._names.used(digest, self._host.now_ms())

    def release(self, holder: str) -> None:
        digest = self._held.pop(holder, None)
        if digest is not None:
            self._names.used(digest, self._host.now_ms())

    # What the market and other workers ask

    def all(self) -> Iterable[tuple[Sequence[str], Image]]:
        """Every image whose layers are all here with its names, the one used last first."""
        return [(tuple(known.record.names), known.image) for known in self._names.all() if self._is_complete(known)]

    def has_blob(self, digest: str) -> bool:
        return digest in self._blobs

    @property
    def bytes_per_s(self) -> float:
        """The mean rate of recent transfers; 0 before the first."""
        return self._pulls.rate.bytes_per_s

    def blob_size(self, digest: str) -> int | None:
        """The size of a manifest, configuration or layer; None if it is not here."""
        return self._blobs.size(digest)

    def blob(self, digest: str, offset: int = 0) -> AsyncIterator[bytes]:
        """The bytes of one from `offset` on, for another worker. Raises `StoreError` when it is not here."""
        return self._blobs.stream(digest, offset)

    # What the API offers

    async def describe(self, reference: str) -> Image:
        """What an image is made of, fetching no layer of it; the registry is asked when it is not known here. From then
        on `missing` knows it."""
        return (await self._references.describe(reference)).image

    async def pull(self, reference: str, progress: Watcher | None = None) -> Image:
        """Fetch what the registry now means by it. Raises as `ensure` does; `progress` is called as layers move."""
        name = name_of(reference)
        end = self._pulls.watchers.add(name, progress) if progress else None
        try:
            return await self._running.join(f"pull {name}", lambda: self._obtain(reference, name, fresh=True))
        finally:
            if end:
                end()

    async def add(self, name: str, manifest: bytes, blobs: Mapping[str, bytes | Path]) -> Image:
        """Add an image whose parts the caller has, under a name: `blobs` are its configuration and those of its layers
        that are not here, each as bytes or as a file of the same file system, which is taken over. Raises `Invalid`,
        `ImageError`, `DiskFull`, `StoreError`."""
        return await self._local.add([name_of(name)], manifest, blobs)

    async def import_archive(self, path: Path, name: str = "") -> Image:
        """The image in a tar or directory as `docker save`, `podman save` or `skopeo copy` make them; without a name it
        goes by those in the archive, or by its digest. Raises `Invalid`, `ImageError`, `DiskFull`, `StoreError`."""
        return await self._local.import_archive(path, name and name_of(name))

    async def build_from(self, path: Path, name: str, config: ImageConfig | None = None) -> Image:
        """An image of one layer: the files of a directory, or those in a tar. The same files give the same image.
        Raises as `import_archive` does."""
        return await self._local.build_from(path, name_of(name), config or ImageConfig())

    async def push(
        self, reference: str, to: str, username: str = "", password: str = "", progress: Watcher | None = None
    ) -> Image:
        """Copy an image that is here to a registry, under the name `to`. Without credentials those of the configuration
        are used. Raises `ImageNotFound`, `ImageError`, `Unreachable`."""
        target = ImageRef.checked(to, "to")
        known = self._references.known(reference)
        if known is None:
            raise ImageNotFound(reference, "this worker does not have it")
        settings = self.settings
        if username:
            settings = with_credentials(settings, target.registry, username, password)
        with self._pulls.wanting(known.blobs, known.chain):
            await push(settings, self._host, self._blobs, known, target, progress)
        return known.image

    def watch(self, reference: str, watcher: Watcher) -> Callable[[], None]:
        """Be told of every step of this image's layers, whoever has it fetched. Returns what ends that."""
        return self._pulls.watchers.add(name_of(reference), watcher)

    def prefetch(self, reference: str) -> None:
        """Fetch it in the background. That it fails is for whoever needs it to find out."""
        name_of(reference)
        self._in_background(self._prefetch(reference), f"prefetch {reference}")

    async def _prefetch(self, reference: str) -> None:
        try:
            await self.ensure(reference)
        except HawkerError as error:
            _logger.warning("image.prefetch_failed", image=reference, problem=error.message)

    def list(self) -> list[Listed]:
        """The one used last first."""
        holders: dict[str, list[str]] = {}
        for holder, digest in sorted(self._held.items()):
            holders.setdefault(digest, []).append(holder)
        trees = self._trees.all()
        return [self._listed(known, trees, holders.get(known.image.digest, ())) for known in self._names.all()]

    async def remove(self, reference: str) -> None:
        """Let a name go, and the image with its last name; by digest, the image with all its names.

        Raises `ImageNotFound`, and `Conflict` when it is needed.
        """
        known = self._references.known(reference)
        if known is None:
            raise ImageNotFound(reference, "this worker does not have it")
        name = "" if is_digest(reference) else name_of(reference)
        if name in known.record.names and len(known.record.names) > 1:
            await asyncio.to_thread(self._names.unname, name)
            self._changed()
            return
        if not await self._collecting.drop(known):
            holders = sorted(holder for holder, held in self._held.items() if held == known.image.digest)
            raise Conflict(f"image {reference} is needed by {', '.join(holders[:5])}")
        self._gone([known.image.digest])

    async def collect(self) -> Collected:
        """Remove what nobody needs: what broken fetches left a day ago, and, above the upper limit, images that nobody
        holds, those first whose last use is the longest ago."""
        collected = await self._collecting.collect()
        if collected.images:
            self._gone(collected.images)
        return collected

    def begin_collecting(self) -> None:
        """Everything that is needed is held from now on: collect at once, from time to time, and when room is short.
        Before, nothing goes by itself."""
        if not self._may_collect:
            self._may_collect = True
            self._in_background(self._collect_for_ever(), "collect images")

    async def _collect_for_ever(self) -> None:
        while True:
            try:
                await self.collect()
            except HawkerError as error:
                _logger.warning("image.not_collected", problem=error.message)
            self._over.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(COLLECT_S):
                    await self._over.wait()

    # How

    def _is_complete(self, known: Known) -> bool:
        return all(chain_id in self._trees for chain_id in known.chain)

    async def _obtain(self, reference: str, name: str, *, fresh: bool = False) -> Image:
        known = await self._references.resolve(reference, fresh=fresh)
        ref = None if is_digest(reference) else ImageRef.checked(reference)
        if ref is None and known.record.names:
            ref = ImageRef(next(iter(known.record.names)))
        try:
            with self._pulls.wanting(known.blobs, known.chain):
                if self._may_collect and not self._pulls.has_room(known):
                    await self._collecting.collect(self._pulls.lacking(known))
                self._pulls.check_room(known)
                await self._pulls.complete(ref, known, name)
                await self._keep(known, [] if is_digest(name) else [name])
        except ImageError:
            await self._collecting.clean_up(known.blobs, known.chain)
            raise
        return known.image

    async def _keep(self, known: Known, names: Sequence[str]) -> None:
        """Know an image, all of which is here, under these names."""
        await asyncio.to_thread(self._names.put, known, list(names), self._host.now_ms())
        self._references.are_here(names)
        self._changed()
        if self._collecting.is_over():
            self._over.set()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _listed(self, known: Known, trees: Mapping[str, int], holders: Sequence[str]) -> Listed:
        return Listed(
            image=known.image,
            names=tuple(sorted(known.record.names)),
            size=sum(self._blobs.size(digest) or 0 for digest in known.blobs),
            unpacked=sum(trees.get(chain_id, 0) for chain_id in known.chain),
            fetched_ms=known.record.fetched_ms,
            used_ms=known.record.used_ms,
            held=tuple(holders),
            complete=self._is_complete(known),
        )

    def _gone(self, digests: Iterable[str]) -> None:
        for digest in digests:
            for call in self.on_removed:
                call(digest)
        self._changed()

    def _changed(self) -> None:
        for call in self.on_change:
            call()
