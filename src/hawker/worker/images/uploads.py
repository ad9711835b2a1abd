"""Uploads: files that clients send in parts, each of which may be sent again, until something is made of them.

A part says where it goes, so a client whose connection broke asks how much is there and goes on. What nobody adds to
for an hour is removed; so is everything at a start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import msgspec

from hawker.errors import Conflict, Invalid, NotFound, StoreError, TooManyRequests
from hawker.host import Host

UPLOADS_MOST = 16
KEPT_S = 3600.0
BYTES_MOST = 64 << 30
FREE_LEAST = 512 << 20
"""The bytes of the disk that must stay free when all that was announced has come."""


class _Upload(msgspec.Struct):
    size: int
    offset: int
    path: Path
    lock: asyncio.Lock
    touched_s: float
    taken: bool = False


class Uploads:
    """The uploads of one worker, in files of `directory`, which is made when it is needed."""

    def __init__(self, directory: Path, host: Host) -> None:
        self._directory = directory
        self._host = host
        self._uploads: dict[str, _Upload] = {}
        shutil.rmtree(directory, ignore_errors=True)

    def begin(self, size: int) -> str:
        """Raises `Invalid`, `TooManyRequests`; `Conflict` where there is no room."""
        self.sweep()
        if size > BYTES_MOST:
            raise Invalid("size", size, f"at most {BYTES_MOST} bytes")
        if len(self._uploads) >= UPLOADS_MOST:
            raise TooManyRequests(f"{UPLOADS_MOST} uploads are under way here", hint="try again when one has ended")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = os.statvfs(self._directory)
        coming = sum(upload.size - upload.offset for upload in self._uploads.values())
        if disk.f_bavail * disk.f_frsize - coming - size < FREE_LEAST:
            raise Conflict(f"no room for an upload of {size} bytes", hint="remove images, or name another worker")
        name = self._host.ulid()
        self._uploads[name] = _Upload(size, 0, self._directory / name, asyncio.Lock(), self._now_s())
        return name

    async def write(self, name: str, offset: int, data: bytes) -> int:
        """Put bytes at `offset`; returns how many are there now. Raises `NotFound`; `Conflict` for bytes that would
        leave a gap, or are more than were announced."""
        upload = self._get(name)
        async with upload.lock:
            if upload.taken:
                raise Conflict(f"upload {name} is being made into an image")
            if offset > upload.offset:
                problem = f"upload {name} has {upload.offset} bytes: what comes next goes there, not to {offset}"
                raise Conflict(problem, details={"offset": upload.offset})
            if offset + len(data) > upload.size:
                raise Conflict(f"upload {name} was announced with {upload.size} bytes; these are more")
            try:
                await asyncio.to_thread(_write_at, upload.path, offset, data)
            except OSError as error:
                self.drop(name)
                raise StoreError(f"upload {name}: {error.strerror}; it is gone", hint="begin another") from error
            upload.offset = max(upload.offset, offset + len(data))
            upload.touched_s = self._now_s()
            return upload.offset

    def take(self, name: str) -> Path:
        """The file of an upload that is complete, for whoever makes something of it and drops it then. Raises
        `Conflict` when bytes are missing."""
        upload = self._get(name)
        if upload.offset < upload.size or upload.taken:
            missing = upload.size - upload.offset
            text = f"{missing} bytes of upload {name} are missing" if missing else f"upload {name} is being used"
            raise Conflict(text, details={"offset": upload.offset})
        upload.path.touch(mode=0o600)  # of no bytes there is no file yet
        upload.taken = True
        return upload.path

    def drop(self, name: str) -> None:
        """Unknown upload: success."""
        if upload := self._uploads.pop(name, None):
            upload.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        for name, upload in list(self._uploads.items()):
            if not upload.taken and self._now_s() - upload.touched_s > KEPT_S:
                self.drop(name)

    def _get(self, name: str) -> _Upload:
        upload = self._uploads.get(name)
        if upload is None:
            raise NotFound(f"no upload {name} is under way here", hint="one that nothing comes for is given up")
        return upload

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _write_at(path: Path, offset: int, data: bytes) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            count = os.pwrite(number, view, offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(number)
