"""Which images a host has, under which names, used when: a small file for each, read at start-up.

`images/<hex of the manifest's digest>.json`. What the image is made of stands in its manifest and configuration, which
are blobs; the file adds what they do not tell. If the file cannot be read, its image loses the names and nothing else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hawker.errors import HawkerError
from hawker.host import Host
from hawker.images.blobs import Blobs, translated, write_durably
from hawker.images.layer_trees import LayerTrees
from hawker.images.manifest import Manifest, chain_ids, read_config, read_manifest
from hawker.images.settings import ImageSettings
from hawker.images.tree.values import TreeLimits
from hawker.model.image import Image, Platform
from hawker.model.values import is_digest
from hawker.telemetry import get_logger

_logger = get_logger()


class Record(msgspec.Struct):
    """The file. `names`: full references, and when each came to mean this image, in Unix ms."""

    media_type: str = ""
    names: dict[str, int] = {}
    fetched_ms: int = 0
    used_ms: int = 0


class Known:
    """An image that is known, its layers here or not."""

    def __init__(self, image: Image, manifest: Manifest, record: Record) -> None:
        self.image = image
        self.manifest = manifest
        self.record = record
        self.chain = chain_ids([layer.diff_id for layer in image.layers])
        self.written_ms = record.used_ms

    @property
    def blobs(self) -> set[str]:
        """Digests of all that it is made of."""
        return {self.image.digest, self.manifest.config.digest, *(layer.digest for layer in self.image.layers)}


def read_known(blobs: Blobs, digest: str, record: Record, platform: Platform) -> Known:
    """An image from its blobs. Raises `ImageError`, `StoreError`."""
    manifest = read_manifest(digest, record.media_type, blobs.read(digest))
    if not isinstance(manifest, Manifest):
        raise HawkerError(f"{digest} is an index")
    image = read_config(digest, digest, manifest, blobs.read(manifest.config.digest), platform)
    return Known(image, manifest, record)


class Names:
    """All that is known. One process at a time."""

    def __init__(self, directory: Path, blobs: Blobs, platform: Platform) -> None:
        self._directory = directory / "images"
        self._blobs = blobs
        self._known: dict[str, Known] = {}
        self._names: dict[str, str] = {}
        self._writing = threading.Lock()  # files are written by several threads
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in sorted(self._directory.iterdir()):
                self._load(path, platform)
        except OSError as error:
            raise translated(error, self._directory) from error
        for digest, known in self._known.items():
            for name, since_ms in list(known.record.names.items()):
                other = self._known.get(self._names.get(name, ""))
                if other is None or other.record.names[name] < since_ms:
                    self._names[name] = digest
        for digest, known in self._known.items():  # a kill between two files: the later word counts
            known.record.names = {
                name: ms for name, ms in known.record.names.items() if self._names.get(name) == digest
            }

    def _load(self, path: Path, platform: Platform) -> None:
        digest = f"sha256:{path.name.removesuffix('.json')}"
        if not is_digest(digest):
            path.unlink()  # not finished
            return
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _logger.warning("image.record_damaged", image=digest, problem=str(error))
            record = Record()
        try:
            self._known[digest] = read_known(self._blobs, digest, record, platform)
        except HawkerError as error:
            _logger.warning("image.lost", image=digest, names=sorted(record.names), problem=str(error))
            path.unlink()

    def all(self) -> list[Known]:
        """The one used last first."""
        return sorted(self._known.values(), key=lambda known: (-known.record.used_ms, known.image.digest))

    def get(self, digest: str) -> Known | None:
        return self._known.get(digest)

    def named(self, name: str) -> Known | None:
        return self._known.get(self._names.get(name, ""))

    def put(self, known: Known, names: list[str], now_ms: int) -> None:
        """Add an image, or names to one. Blocks on the disk. Raises `StoreError`; then nothing has changed but on
        disk."""
        with self._writing:
            self._put(known, names, now_ms)

    def _put(self, known: Known, names: list[str], now_ms: int) -> None:
        digest = known.image.digest
        old = self._known.get(digest)
        record = Record(
            known.record.media_type or (old.record.media_type if old else ""),
            {**(old.record.names if old else {}), **dict.fromkeys(names, now_ms)},
            old.record.fetched_ms if old else now_ms,
            now_ms,
        )
        self._write(digest, record)
        known.record = record
        self._known[digest] = known
        known.written_ms = now_ms
        for name in names:
            other = self._known.get(self._names.get(name, ""))
            self._names[name] = digest
            if other is not None and other.image.digest != digest:
                other.record.names.pop(name, None)
                self._write(other.image.digest, other.record)

    def unname(self, name: str) -> Known | None:
        """Let a name go; the image that it had. Blocks on the disk. Raises `StoreError`."""
        with self._writing:
            known = self.named(name)
            if known is not None:
                del self._names[name]
                known.record.names.pop(name, None)
                self._write(known.image.digest, known.record)
            return known

    def used(self, digest: str, now_ms: int) -> None:
        """Noted; written down by `flush`, so that a kill forgets a little of it and asking costs nothing."""
        known = self._known.get(digest)
        if known is not None:
            known.record.used_ms = max(known.record.used_ms, now_ms)

    def flush(self) -> None:
        """Write down when images were used. Blocks on the disk. Raises `StoreError`."""
        for digest, known in list(self._known.items()):
            with self._writing:
                if known.record.used_ms != known.written_ms and self._known.get(digest) is known:
                    known.written_ms = known.record.used_ms
                    self._write(digest, known.record)

    def drop(self, digest: str) -> None:
        with self._writing:
            known = self._known.pop(digest, None)
            if known is not None:
                for name in known.record.names:
                    if self._names.get(name) == digest:
                        del self._names[name]
                self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest.removeprefix('sha256:')}.json"

    def _write(self, digest: str, record: Record) -> None:
        path = self._path(digest)
        try:
            write_durably(path, msgspec.json.encode(record))
        except OSError as error:
            raise translated(error, path) from error


@dataclass(frozen=True, kw_only=True)
class ImageStore:
    """What one host keeps of images, and how it is to be kept."""

    settings: ImageSettings
    host: Host
    platform: Platform
    limits: TreeLimits
    blobs: Blobs
    trees: LayerTrees
    names: Names
