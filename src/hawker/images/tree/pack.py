"""A directory becomes a layer, and layers an image: the same bytes for the same files, on every host.

Entries are sorted, extended headers are PAX, gzip's header has neither name nor time. A tree that `merge` has made
becomes the layer it was: overlayfs' marks become whiteouts again (OCI image specification 1.1, layer.md).
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec

from hawker.images.manifest import CONFIG, LAYER, MANIFEST, digest_of
from hawker.images.tree.extract import OPAQUE, WHITEOUT
from hawker.images.tree.merging import is_opaque, opaque_mark
from hawker.model.image import ImageConfig, Layer, Platform

Compression = Literal["gzip", "zstd", ""]
PIECE = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
MARKS = tuple(opaque_mark(namespace) for namespace in (b"trusted.", b"user."))


class LayerWriter:
    """Takes the bytes of a tar, compresses them into a file, and knows both digests at the `finish`."""

    def __init__(self, file: BinaryIO, compression: Compression) -> None:
        self._file = file
        self._compression = compression
        self._tar = hashlib.sha256()
        self._blob = hashlib.sha256()
        self._size = 0
        self._compress: Callable[[bytes], bytes] = bytes
        self._flush: Callable[[], bytes] = bytes
        if compression == "gzip":
            gzip = zlib.compressobj(GZIP_LEVEL, wbits=31)
            self._compress, self._flush = gzip.compress, gzip.flush
        elif compression == "zstd":
            import zstandard

            zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
            self._compress, self._flush = zstd.compress, zstd.flush

    def write(self, data: bytes) -> int:
        self._tar.update(data)
        self._put(self._compress(data))
        return len(data)

    def finish(self) -> Layer:
        self._put(self._flush())
        return Layer(
            media_type=LAYER + (f"+{self._compression}" if self._compression else ""),
            digest=f"sha256:{self._blob.hexdigest()}",
            size=self._size,
            diff_id=f"sha256:{self._tar.hexdigest()}",
        )

    def _put(self, data: bytes) -> None:
        self._blob.update(data)
        self._size += len(data)
        self._file.write(data)


def pack_directory(
    directory: Path,
    out: Path,
    *,
    compression: Compression = "gzip",
    mtime: int | None = None,
    keep_owners: bool = False,
    under: str = "",
    exclude: Sequence[str] = (),
) -> Layer:
    """Write the layer of a directory's files to `out`, which appears whole or not at all. Blocks on the disk.

    `mtime`: in Unix seconds, for all files, so that the bytes say nothing of when they were made; None keeps theirs.
    Files belong to root unless `keep_owners`. `under`: where in the image they are, such as `app`. `exclude`: patterns
    of names (`*.pyc`) or of paths (`build/*`). Sockets are left out; links are packed, never followed.
    """
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            writer = LayerWriter(file, compression)
            with tarfile.open(
                fileobj=cast(Any, writer),  # it writes, and that is all a stream of this mode is asked for
                mode="w|",
                bufsize=PIECE,
                format=tarfile.PAX_FORMAT,
                encoding="utf-8",
                errors="surrogateescape",
            ) as tar:
                _Packing(tar, mtime, keep_owners, exclude).pack(os.fsencode(directory), under)
            layer = writer.finish()
            file.flush()
            os.fsync(file.fileno())
        part.rename(out)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return layer


class _Packing:
    def __init__(self, tar: tarfile.TarFile, mtime: int | None, keep_owners: bool, exclude: Sequence[str]) -> None:
        self._tar = tar
        self._mtime = mtime
        self._keep_owners = keep_owners
        self._exclude = exclude
        self._names: dict[tuple[int, int], str] = {}

    def pack(self, directory: bytes, under: str) -> None:
        parts = [part for part in under.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ValueError(f"{under!r} leads out of the image")
        for count in range(1, len(parts)):
            info = tarfile.TarInfo("/".join(parts[:count]))
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, self._mtime or 0
            self._tar.addfile(info)
        prefix = "/".join(parts)
        self._add(directory, prefix or ".", os.lstat(directory))
        for path, status in _walk(directory, self._is_wanted):
            name = os.fsdecode(path[len(directory) + 1 :])
            self._add(path, f"{prefix}/{name}" if prefix else name, status)

    def _is_wanted(self, path: bytes) -> bool:
        name = os.fsdecode(path)
        return not any(
            fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)
            for pattern in self._exclude
        )

    def _add(self, path: bytes, name: str, status: os.stat_result) -> None:
        info = tarfile.TarInfo(name)
        self._mtime_of(info, status)
        if self._keep_owners:
            info.uid, info.gid = status.st_uid, status.st_gid
        info.mode = stat.S_IMODE(status.st_mode)
        key = (status.st_dev, status.st_ino)
        if stat.S_ISSOCK(status.st_mode):
            return
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            parent, _, base = name.rpartition("/")
            self._mark(f"{parent}/{os.fsdecode(WHITEOUT)}{base}" if parent else f"{os.fsdecode(WHITEOUT)}{base}")
            return
        if not stat.S_ISDIR(status.st_mode) and key in self._names:
            info.type, info.linkname = tarfile.LNKTYPE, self._names[key]
            self._tar.addfile(info)
            return
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            self._names[key] = name
        info.pax_headers = {**info.pax_headers, **_xattrs(path)}
        if stat.S_ISREG(status.st_mode):
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                self._tar.addfile(info, file)
            return
        if stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(os.readlink(path))
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        else:
            info.type = tarfile.CHRTYPE if stat.S_ISCHR(status.st_mode) else tarfile.BLKTYPE
            info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        self._tar.addfile(info)
        if info.isdir() and any(is_opaque(path, mark) for mark in MARKS):
            self._mark(os.fsdecode(OPAQUE) if name == "." else f"{name}/{os.fsdecode(OPAQUE)}")

    def _mark(self, name: str) -> None:
        info = tarfile.TarInfo(name)
        info.mtime = self._mtime or 0
        self._tar.addfile(info)

    def _mtime_of(self, info: tarfile.TarInfo, status: os.stat_result) -> None:
        if self._mtime is not None:
            info.mtime = self._mtime
            return
        seconds, fraction = divmod(status.st_mtime_ns, 10**9)
        info.mtime = seconds
        if fraction and seconds >= 0:
            info.pax_headers = {"mtime": f"{seconds}.{fraction:09d}".rstrip("0")}


def _walk(directory: bytes, is_wanted: Callable[[bytes], bool], below: bytes = b"") -> Iterator[tuple[bytes, Any]]:
    """Every path, directories before what is in them, in the order of their bytes."""
    for name in sorted(os.listdir(directory + b"/" + below if below else directory)):
        relative = below + b"/" + name if below else name
        if not is_wanted(relative):
            continue
        path = directory + b"/" + relative
        status = os.lstat(path)
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(directory, is_wanted, relative)


def _xattrs(path: bytes) -> Mapping[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # the file system has none
        for name in sorted(os.listxattr(path, follow_symlinks=False)):
            if not name.startswith(("trusted.", "user.overlay.", "security.selinux")):
                value = os.getxattr(path, name, follow_symlinks=False)
                found[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
    return found


def describe(layers: Sequence[Layer], config: ImageConfig, platform: Platform) -> tuple[bytes, bytes]:
    """The manifest and the configuration of an image of these layers, the lowest first."""
    program = {
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "Env": list(config.env),
        "User": config.user,
        "WorkingDir": config.working_dir,
        "StopSignal": config.stop_signal,
        "ExposedPorts": {port: {} for port in config.exposed},
        "Labels": config.labels,
    }
    body: dict[str, Any] = {
        "architecture": platform.architecture,
        "os": platform.os,
        **({"variant": platform.variant} if platform.variant else {}),
        "config": {key: value for key, value in program.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    described = msgspec.json.encode(body, order="sorted")
    return manifest_of(CONFIG, described, layers), described


def manifest_of(config_type: str, config: bytes, layers: Sequence[Layer]) -> bytes:
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": config_type, "digest": digest_of(config), "size": len(config)},
        "layers": [{"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size} for layer in layers],
    }
    return msgspec.json.encode(manifest, order="sorted")
