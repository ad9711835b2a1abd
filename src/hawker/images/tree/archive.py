"""Images in files: what `docker save`, `podman save` and `skopeo copy` write, OCI layouts, and plain tars of files.

A file is read as hostile: nothing of it chooses a path here, all that is kept in memory is small, and every blob is
hashed on its way. `read_archive` tells what a file is by what is in it:

- an OCI layout, as a directory or a tar (image-layout.md): `oci-layout`, `index.json`, `blobs/`;
- a Docker archive: `manifest.json`, which names a configuration and the tars of the layers.

`read_files` takes a tar as the files of an image with one layer, as `docker import` does. All may be compressed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from hawker.errors import ImageError
from hawker.images.manifest import DOCKER_CONFIG, INDEX, LAYER, Index, Manifest, choose, digest_of, read_manifest
from hawker.images.tree.headers import FILE, LINK, SYMLINK, entries
from hawker.images.tree.pack import Compression, LayerWriter, describe, manifest_of
from hawker.images.tree.refused import LayerRefused, shown
from hawker.images.tree.streams import GZIP, ZSTD, Limits, TarStream
from hawker.images.tree.values import TreeLimits
from hawker.model.image import ImageConfig, Layer, Platform
from hawker.model.values import is_digest

SMALL = 4 << 20
"""Bytes of a document that is read into memory, as of a manifest."""
MEMBERS = 20_000
PIECE = 1 << 20
NAME_MAX = 4096
"""Bytes of a member's name and of where a link leads: they are kept."""
LOOK_BYTES = 16 << 20
NESTED = 4
"""Indexes within indexes."""
T = TypeVar("T")
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """An image that was read from an archive. `names` are as the archive has them. `blobs` by digest: the
    configuration, and the layers as files that the caller may take; their bytes have these digests."""

    names: tuple[str, ...]
    manifest: bytes
    blobs: dict[str, bytes | Path]


def read_archive(
    path: Path, into: Path, platform: Platform, *, wanted: str = "", limits: TreeLimits | None = None
) -> Archived:
    """The image in an archive or a layout; blobs are written to the directory `into`, which is the caller's to empty.

    `wanted`: which image, where there are several. Blocks on the disk. Raises `ImageError`."""
    limits = limits or TreeLimits()
    try:
        members = _Layout(path) if path.is_dir() else _Tar(path, into, limits)
        if "index.json" in members and ("oci-layout" in members or "manifest.json" not in members):
            return _read_layout(path.name, members, into, platform, wanted)
        if "manifest.json" in members:
            return _read_docker(path.name, members, wanted)
    except LayerRefused as refused:
        raise ImageError(path.name, refused.reason) from None
    raise ImageError(
        path.name,
        "it is no archive of an image: it has neither index.json nor manifest.json",
        hint="a tar of plain files becomes an image with `hawker image build-from`",
    )


def read_files(
    path: Path, into: Path, config: ImageConfig, platform: Platform, *, limits: TreeLimits | None = None
) -> Archived:
    """An image of the files in a tar. Blocks on the disk. Raises `ImageError`."""
    limits = limits or TreeLimits()
    try:
        out = into / "files"
        with path.open("rb") as file, contextlib.closing(_stream(file.fileno(), limits)) as stream:
            magic = os.pread(file.fileno(), 4, 0)
            if magic.startswith(GZIP) or magic == ZSTD:
                while stream.skip(PIECE):
                    pass
                layer = _copied(path, out, "gzip" if magic.startswith(GZIP) else "zstd", stream.digest)
            else:
                with out.open("wb") as blob:
                    writer = LayerWriter(blob, "zstd")
                    while piece := stream.take(PIECE):
                        writer.write(piece)
                    layer = writer.finish()
                    blob.flush()
                    os.fsync(blob.fileno())
    except LayerRefused as refused:
        raise ImageError(path.name, refused.reason) from None
    manifest, described = describe([layer], config, platform)
    return Archived(names=(), manifest=manifest, blobs={digest_of(described): described, layer.digest: out})


class _Layout:
    """An archive that is a directory. Its files are copied, because the caller takes the blobs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __contains__(self, name: str) -> bool:
        return (self._path / name).is_file()

    def document(self, name: str) -> bytes:
        try:
            with (self._path / name).open("rb") as file:
                data = file.read(SMALL + 1)
        except OSError as error:
            raise LayerRefused(f"its {name} cannot be read: {error.strerror}") from None
        if len(data) > SMALL:
            raise LayerRefused(f"its {name} is longer than {SMALL} bytes")
        return data

    def blob(self, digest: str, into: Path) -> Path | None:
        path = self._path / "blobs" / "sha256" / digest.removeprefix("sha256:")
        if path.is_symlink() or not path.is_file():
            return None
        out = into / path.name
        with path.open("rb") as source:
            found = _save(iter(lambda: source.read(PIECE), b""), out)
        if found != digest:
            raise LayerRefused(f"its blob {digest} is corrupt: it has the digest {found}")
        return out


class _Member:
    __slots__ = ("digest", "path", "size")

    def __init__(self, path: Path, digest: str, size: int) -> None:
        self.path = path
        self.digest = digest
        self.size = size


class _Tar:
    """A tar, read once: its files are in `into` under numbers."""

    def __init__(self, path: Path, into: Path, limits: TreeLimits) -> None:
        self._members: dict[str, _Member] = {}
        self._links: dict[str, str] = {}
        numbers = itertools.count()
        with path.open("rb") as file, contextlib.closing(_stream(file.fileno(), limits)) as stream:
            for entry in entries(stream, limits.header):
                if len(entry.name) + len(entry.link) > NAME_MAX:
                    raise LayerRefused(f"{shown(entry.name)} is too long a name for an archive of an image")
                name = posixpath.normpath(entry.name.decode("utf-8", "surrogateescape")).lstrip("/")
                if len(self._members) + len(self._links) >= MEMBERS:
                    raise LayerRefused(f"it has more than {MEMBERS} files; no archive of an image needs that many")
                if entry.kind == FILE:
                    out = into / f"member-{next(numbers)}"
                    digest = _save(stream.pieces(entry.size), out, limits.free)
                    self._members[name] = _Member(out, digest, entry.size)
                elif entry.kind in (LINK, SYMLINK):
                    link = entry.link.decode("utf-8", "surrogateescape")
                    base = posixpath.dirname(name) if entry.kind == SYMLINK else ""
                    self._links[name] = posixpath.normpath(posixpath.join(base, link))

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def document(self, name: str) -> bytes:
        member = self.member(name)
        if member.size > SMALL:
            raise LayerRefused(f"its {name} is longer than {SMALL} bytes")
        return member.path.read_bytes()

    def member(self, name: str) -> _Member:
        member = self._find(name)
        if member is None:
            raise LayerRefused(f"it has no {shown(name.encode('utf-8', 'surrogateescape'))}")
        return member

    def blob(self, digest: str, into: Path) -> Path | None:
        member = self._find(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        if member is None:
            return None
        if member.digest != digest:
            raise LayerRefused(f"its blob {digest} is corrupt: it has the digest {member.digest}")
        return member.path

    def _find(self, name: str) -> _Member | None:
        name = posixpath.normpath(name)
        return self._members.get(self._links.get(name, name))


class _Entry(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int = 0
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: msgspec.Raw | None = None

    @property
    def names(self) -> list[str]:
        return [name for key in _NAMES if (name := (self.annotations or {}).get(key))][:1]


class _Index(msgspec.Struct, frozen=True):
    manifests: list[_Entry]


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    """One image of a Docker archive (docker/docker, image/spec/spec.md)."""

    config: str
    layers: list[str] | None = None
    repo_tags: list[str] | None = None


def _read_layout(image: str, members: _Layout | _Tar, into: Path, platform: Platform, wanted: str) -> Archived:
    data = members.document("index.json")
    names: dict[str, list[str]] = {}
    for entry in _decoded(image, "index.json", data, _Index).manifests:
        names.setdefault(entry.digest, []).extend(entry.names)
    if not names:
        raise ImageError(image, "its index.json names no image")
    named = [digest for digest in names if wanted and wanted in names[digest]]
    if len(named) == 1 or len(names) == 1:
        chosen = (named or list(names))[0]
    else:
        index = read_manifest(image, INDEX, data)
        if not isinstance(index, Index) or any(entry.platform is None for entry in index.entries):
            raise _several(image, itertools.chain.from_iterable(names.values()), len(names))
        chosen = choose(image, index, platform).digest
    if not is_digest(chosen):
        raise ImageError(image, f"its index.json has the digest {shown(chosen.encode())}; only sha256 is known")
    found, manifest = _manifest(image, members, into, chosen, platform)
    blobs: dict[str, bytes | Path] = {}
    for each in (found.config, *found.layers):
        if (path := members.blob(each.digest, into)) is not None:
            blobs[each.digest] = path
    config = blobs.get(found.config.digest)
    if config is None:
        raise ImageError(image, f"it has no blob {found.config.digest}, which is its configuration")
    return Archived(names=tuple(names.get(chosen, ())), manifest=manifest, blobs=blobs)


def _manifest(
    image: str, members: _Layout | _Tar, into: Path, digest: str, platform: Platform
) -> tuple[Manifest, bytes]:
    """The manifest of a digest, or of the one for the platform in the index of that digest."""
    for _ in range(NESTED):
        path = members.blob(digest, into)
        if path is None:
            raise ImageError(image, f"it has no blob {digest}, which is its manifest")
        if path.stat().st_size > SMALL:
            raise ImageError(image, f"its manifest {digest} is longer than {SMALL} bytes")
        data = path.read_bytes()
        read = read_manifest(image, "", data)
        if isinstance(read, Manifest):
            return read, data
        digest = choose(image, read, platform).digest
    raise ImageError(image, f"it has an index in an index in an index, more than {NESTED} deep")


def _read_docker(image: str, members: _Layout | _Tar, wanted: str) -> Archived:
    if isinstance(members, _Layout):
        raise ImageError(image, "it is a Docker archive that was unpacked; give the tar itself")
    saved = _decoded(image, "manifest.json", members.document("manifest.json"), list[_Saved])
    named = [each for each in saved if wanted and wanted in (each.repo_tags or ())]
    if len(named) != 1 and len(saved) != 1:
        raise _several(image, (name for each in saved for name in each.repo_tags or ()), len(saved))
    one = (named or saved)[0]
    config = members.document(one.config)
    blobs: dict[str, bytes | Path] = {digest_of(config): config}
    layers = []
    for name in one.layers or ():
        member = members.member(name)
        with member.path.open("rb") as file:
            magic = file.read(4)
        suffix = "+gzip" if magic.startswith(GZIP) else "+zstd" if magic == ZSTD else ""
        layers.append(Layer(media_type=LAYER + suffix, digest=member.digest, size=member.size, diff_id=""))
        blobs[member.digest] = member.path
    return Archived(names=tuple(one.repo_tags or ()), manifest=manifest_of(DOCKER_CONFIG, config, layers), blobs=blobs)


def _several(image: str, names: Iterable[str], count: int) -> ImageError:
    there = ", ".join(sorted(set(names))[:20]) or "without names"
    return ImageError(image, f"it has {count} images ({there}); one is expected", hint="save only the one you mean")


def _decoded(image: str, what: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImageError(image, f"its {what} cannot be read: {error}") from None


def _stream(fd: int, limits: TreeLimits) -> TarStream:
    return TarStream(fd, Limits(limits.bytes, limits.ratio, limits.ratio_from))


def _copied(path: Path, out: Path, compression: Compression, diff_id: str) -> Layer:
    with path.open("rb") as source:
        digest = _save(iter(lambda: source.read(PIECE), b""), out)
    return Layer(media_type=f"{LAYER}+{compression}", digest=digest, size=out.stat().st_size, diff_id=diff_id)


def _save(pieces: Iterator[bytes] | Iterator[memoryview], out: Path, free: int = 0) -> str:
    """Write them to a new file and on disk. Returns their digest. With less than `free` bytes left it is as on a full
    disk."""
    hasher = hashlib.sha256()
    looked = -LOOK_BYTES
    with out.open("xb") as file:
        for piece in pieces:
            if free and file.tell() - looked >= LOOK_BYTES:
                looked = file.tell()
                about = os.statvfs(out.parent)
                if about.f_bavail * about.f_frsize < free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
            hasher.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return f"sha256:{hasher.hexdigest()}"
