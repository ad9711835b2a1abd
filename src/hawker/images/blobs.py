"""Blobs by the digest of their bytes, in files: `sha256/<hex>` is whole and checked, `partial/<hex>` is on its way.

A blob appears under its digest in one step, after its bytes were hashed and are on disk. What a kill leaves is a
partial file, and the next fetch goes on at its end: its bytes are hashed again then, so a torn end cannot do harm. File
work is done in threads, a mebibyte or so at a time. `partial/<hex>.<number>` is on its way in or out by itself.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path

from hawker.errors import DiskFull, StoreError
from hawker.images.manifest import digest_of
from hawker.images.singleflight import to_its_end
from hawker.model.values import is_digest

PIECE_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CorruptBlob(Exception):
    """The bytes are not those of the digest; they are gone."""

    def __init__(self, digest: str, found: str) -> None:
        super().__init__(f"the bytes of {digest} have the digest {found}")
        self.found = found


def translated(error: OSError, path: Path) -> StoreError:
    ours = (
        DiskFull(f"{path}: no room: {error.strerror}")
        if error.errno in _NO_ROOM
        else StoreError(f"{path}: {error.strerror or error}")
    )
    ours.__cause__ = error
    return ours


class Partial:
    """A blob being written, by one writer. `offset` is where the next byte goes."""

    def __init__(self, blobs: Blobs, digest: str) -> None:
        self.digest = digest
        self.offset = 0
        self._blobs = blobs
        self._path = blobs.partial_path(digest)
        self._file: FileIO | None = None
        self._left = False
        self._lock = threading.RLock()  # a cancelled caller closes while its thread writes; the number is used again
        self._hash = hashlib.sha256()

    @property
    def is_open(self) -> bool:
        return self._file is not None

    async def open(self) -> None:
        """Take up what an earlier fetch left."""
        self._left = False
        try:
            await asyncio.shield(opening := asyncio.ensure_future(asyncio.to_thread(self._open)))
        except asyncio.CancelledError:
            self._left = True  # nobody waits for gigabytes to be hashed
            await asyncio.wait([opening])
            self.close()
            raise

    def _open(self) -> None:
        try:
            self._path.touch(0o600)
            self._file = self._path.open("r+b", 0)
            self._hash = hashlib.sha256()
            self.offset = 0
            self._blobs.writing.add(self.digest)
            while not self._left and (piece := self._file.read(PIECE_BYTES)):
                self._hash.update(piece)
                self.offset += len(piece)
        except OSError as error:
            self.close()
            raise translated(error, self._path) from error

    async def write(self, data: bytes | bytearray) -> None:
        """Raises `DiskFull` and `StoreError`; then part of `data` may be in the file, and `offset` says no more how
        long it is: close it. Cancelled, it waits for the disk: somebody else may go on with it."""
        await to_its_end(asyncio.to_thread(self._write, data))

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        with self._lock:
            file = self._opened()
            try:
                if self.offset >= PIECE_BYTES:  # there is always room to say what is lacking
                    self._blobs.check_room()
                while view:
                    view = view[file.write(view) or 0 :]
            except OSError as error:
                raise translated(error, self._path) from error
            self._hash.update(data)
            self.offset += len(data)

    async def restart(self) -> None:
        """Begin again at the first byte."""
        await to_its_end(asyncio.to_thread(self._restart))

    def _restart(self) -> None:
        with self._lock:
            file = self._opened()
            try:
                file.seek(0)
                file.truncate()
            except OSError as error:
                raise translated(error, self._path) from error
            self._hash = hashlib.sha256()
            self.offset = 0

    async def finish(self) -> Path:
        """Make it a blob. Raises `CorruptBlob`. Cancelled, it waits for the disk: to close it would wait, too."""
        return await to_its_end(asyncio.to_thread(self._finish))

    def _finish(self) -> Path:
        with self._lock:
            file = self._opened()
            found = "sha256:" + self._hash.hexdigest()
            if found != self.digest:
                self.discard()
                raise CorruptBlob(self.digest, found)
            try:
                os.fsync(file.fileno())
                return self._blobs.take(self._path, self.digest)
            except OSError as error:
                raise translated(error, self._path) from error
            finally:
                self.close()

    def close(self) -> None:
        """Leave it as it is for a later fetch."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
                self._blobs.writing.discard(self.digest)

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def _opened(self) -> FileIO:
        if self._file is None:
            raise StoreError(f"{self._path} was closed while it was written")
        return self._file


class Blobs:
    """The blobs of one host. One process at a time. `writing`: digests whose partial files are open. `free`: bytes of
    the disk that are not for them."""

    def __init__(self, directory: Path, free: int = 0) -> None:
        self.directory = directory
        self.free = free
        self.writing: set[str] = set()
        self._whole = directory / "sha256"
        self._partial = directory / "partial"
        self._numbers = count()
        try:
            for each in (self._whole, self._partial):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each in self._partial.iterdir():
                if "." in each.name:
                    each.unlink()  # a killed process was about to
        except OSError as error:
            raise translated(error, directory) from error
        self._sizes = {f"sha256:{each.name}": each.stat().st_size for each in self._whole.iterdir()}

    def path(self, digest: str) -> Path:
        assert is_digest(digest), digest
        return self._whole / digest.removeprefix("sha256:")

    def partial_path(self, digest: str) -> Path:
        assert is_digest(digest), digest
        return self._partial / digest.removeprefix("sha256:")

    def size(self, digest: str) -> int | None:
        """The size of a blob, from memory; None if it is not here."""
        return self._sizes.get(digest)

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sizes))

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    def check_room(self) -> None:
        """Raises `OSError` as a full disk does."""
        if self.free:
            about = os.statvfs(self.directory)
            if about.f_bavail * about.f_frsize < self.free:
                raise OSError(errno.ENOSPC, f"{about.f_bavail * about.f_frsize >> 20} MiB are left")

    def partials(self) -> dict[str, tuple[int, float]]:
        """Size and time of the last write, Unix seconds, of what is on its way or was left behind."""
        found = {}
        for each in self._partial.iterdir():
            if "." in each.name:
                continue
            with suppress(FileNotFoundError):
                about = each.stat()
                found[f"sha256:{each.name}"] = about.st_size, about.st_mtime
        return found

    def discard_partial(self, digest: str) -> None:
        self.partial_path(digest).unlink(missing_ok=True)

    async def begin(self, digest: str) -> Partial:
        """The caller sees to it that a digest has one writer at a time, and closes, finishes or discards it."""
        partial = Partial(self, digest)
        try:
            await partial.open()
        except BaseException:
            partial.close()
            raise
        return partial

    async def put(self, data: bytes) -> str:
        """Add bytes that are at hand; returns their digest. What is here already stays as it is. Several may add the
        same at once."""
        return await to_its_end(asyncio.to_thread(self._put, data))

    def _put(self, data: bytes) -> str:
        digest = digest_of(data)
        if digest not in self:
            new = self._aside(digest)
            try:
                with new.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                self.take(new, digest)
            except OSError as error:
                new.unlink(missing_ok=True)
                raise translated(error, new) from error
        return digest

    def _aside(self, digest: str) -> Path:
        return self._partial / f"{digest.removeprefix('sha256:')}.{next(self._numbers)}"

    def take(self, path: Path, digest: str) -> Path:
        """Take over a file of the same file system whose bytes the caller knows to have this digest and to be on disk.
        Blocks on the disk. Raises `OSError`."""
        size = path.stat().st_size
        final = self.path(digest)
        path.rename(final)
        sync_directory(final.parent)
        self._sizes[digest] = size
        return final

    def read(self, digest: str) -> bytes:
        """Read a small blob as a whole. Raises `StoreError`, also when the file has other bytes than it must: then it
        is gone."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise translated(error, path) from error
        if digest_of(data) != digest:
            self.remove(digest)
            raise StoreError(f"{path} is damaged: its bytes have another digest than its name")
        return data

    async def is_sound(self, digest: str) -> bool:
        """Whether the bytes on disk still are those that were put there. One that is not sound is removed."""

        def look() -> bool:
            try:
                with self.path(digest).open("rb") as file:
                    return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest() == digest
            except OSError:
                return False

        sound = await asyncio.to_thread(look)
        if not sound:
            self.remove(digest)
        return sound

    async def stream(self, digest: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a blob from `offset`, in pieces. Raises `StoreError` when it is not here."""
        path = self.path(digest)
        try:
            file = await asyncio.to_thread(path.open, "rb", 0)
        except OSError as error:
            raise translated(error, path) from error
        left = (self.size(digest) or 0) - offset if length is None else length
        with file:
            await asyncio.to_thread(file.seek, offset)
            while left > 0 and (piece := await asyncio.to_thread(file.read, min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece

    def remove(self, digest: str) -> None:
        self._sizes.pop(digest, None)
        self.path(digest).unlink(missing_ok=True)

    async def remove_large(self, digest: str) -> None:
        """As `remove`, for large ones: out of sight at once, and another of the digest may come while its bytes, which
        can take a while, are given back."""
        self._sizes.pop(digest, None)
        going = self._aside(digest)
        with suppress(FileNotFoundError):
            self.path(digest).rename(going)
            await asyncio.to_thread(going.unlink)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file in one step. Raises `OSError`."""
    new = path.with_name(path.name + ".new")  # one writer of a file at a time
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
