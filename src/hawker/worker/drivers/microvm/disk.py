"""The disks of machines: one for each image, shared and never written to, and one for each machine over it.

The image's disk is named by the image's digest and has the same bytes wherever it is made with the same mkfs.erofs. It
is made in a process of its own under another name and then renamed; what a kill left half done is removed at the next
start. The machine's disk is sparse: an empty ext4 takes some hundred KiB, whatever its size.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hawker.errors import ImageError
from hawker.model.image import Image
from hawker.worker.drivers.microvm.building import PACKAGE, TOOL

SIZE_MIB = 1024  # of a machine's disk where nothing else is asked for
DEVICE_BYTES = 64 << 30
"""What every disk seems to hold to a guest that is made of a template. That is booted before it is known which disks it
will get, and the size of a disk that is there cannot change; the file systems know their own. Images' files are sparse
up to it. A machine's own ends where its file system does: what its root writes to the disk past that is refused."""

MKFS = "mke2fs"
MKFS_PACKAGE = "e2fsprogs"


class DiskError(Exception):
    """A disk could not be made; the text says why."""


class Disks:
    """Disks under `directory`: `<digest>.erofs` for each image, and empty file systems to copy."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._building: dict[str, asyncio.Task[Path]] = {}
        self._formatting = asyncio.Lock()

    def open(self) -> None:
        """Remove what was left half made."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)  # every machine's user may read images' disks, but does not get at them here
        for path in self._directory.glob(".making-*"):
            path.unlink()

    async def close(self) -> None:
        building = list(self._building.values())
        for task in building:
            task.cancel()
        await asyncio.gather(*building, return_exceptions=True)

    def path(self, digest: str) -> Path:
        """Where an image's disk is, or will be."""
        return self._directory / f"{digest.replace(':', '-')}.erofs"

    async def of_image(self, image: Image, layers: Sequence[Path]) -> Path:
        """Make it where it is not there yet, once however many ask. Raises `ImageError`."""
        path = self.path(image.digest)
        if path.exists():
            return path
        task = self._building.get(image.digest)
        if task is None:
            making = self._make(image, layers, path)
            task = asyncio.get_running_loop().create_task(making, name=f"disk of {image.digest}")
            self._building[image.digest] = task
            task.add_done_callback(lambda _: self._building.pop(image.digest, None))
        return await asyncio.shield(task)

    async def _make(self, image: Image, layers: Sequence[Path], path: Path) -> Path:
        making = path.with_name(f".making-{path.name}")
        if not layers:
            raise ImageError(image.digest, "it has no layers, so nothing that could run")
        argv = [sys.executable, "-m", "hawker.worker.drivers.microvm.building", str(making), *map(str, layers)]
        try:
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            try:
                said, _ = await child.communicate()
            except asyncio.CancelledError:
                child.kill()
                await child.wait()
                raise
            if child.returncode:
                raise ImageError(image.digest, f"no disk could be made of it: {said.decode(errors='replace').strip()}")
            size = making.stat().st_size
            if size > DEVICE_BYTES:
                raise ImageError(image.digest, f"its disk has {size} bytes, more than {DEVICE_BYTES}")
            os.truncate(making, DEVICE_BYTES)
            os.rename(making, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                making.unlink()
        return path

    def made(self) -> list[str]:
        """Digests of images that have a disk here."""
        return [path.name.removesuffix(".erofs").replace("-", ":", 1) for path in self._directory.glob("*.erofs")]

    def forget(self, digest: str) -> None:
        """Remove an image's disk. A machine that runs on it keeps it until it ends. Unknown digest: success."""
        with contextlib.suppress(FileNotFoundError):
            self.path(digest).unlink()

    async def empty(self, path: Path, size_mib: int, *, journal: bool, owner: int = 0) -> None:
        """Make a machine's disk at `path`: an empty ext4 of this size (0: the usual one), with a journal if it is to be
        used again after its machine was killed. The file belongs to `owner`. Raises `DiskError`."""
        size_mib = size_mib or SIZE_MIB
        if size_mib << 20 > DEVICE_BYTES:
            raise DiskError(f"root.size_mib {size_mib} is more than {DEVICE_BYTES >> 20}")
        model = self._directory / f"empty-{size_mib}{'-journal' if journal else ''}.ext4"
        async with self._formatting:  # once however many ask
            if not model.exists():
                await self._format(model, size_mib, journal)
        await asyncio.to_thread(copy_sparse, model, path, size_mib << 20, owner)

    async def _format(self, model: Path, size_mib: int, journal: bool) -> None:
        tool = shutil.which(MKFS) or shutil.which(MKFS, path="/usr/sbin:/sbin")
        if tool is None:
            raise DiskError(f"{MKFS} is missing: install Debian's package {MKFS_PACKAGE}")
        making = model.with_name(f".making-{os.getpid()}-{model.name}")
        try:
            making.touch(0o600)
            os.truncate(making, size_mib << 20)
            features = ("has_journal" if journal else "^has_journal") + ",^resize_inode"
            options = ("-O", features, "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "-m", "0")
            child = await asyncio.create_subprocess_exec(
                *(tool, "-q", "-F", "-t", "ext4", *options, str(making)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            said, _ = await child.communicate()
            if child.returncode:
                raise DiskError(f"{MKFS} ended with {child.returncode}: {said.decode(errors='replace').strip()}")
            os.rename(making, model)
        finally:
            with contextlib.suppress(FileNotFoundError):
                making.unlink()


def copy_sparse(source: Path, target: Path, size: int, owner: int = 0) -> None:
    """Copy what is not a hole; the copy has `size` bytes, and belongs to `owner` unless that is 0. Under another name
    first: what has its name is whole."""
    making = target.with_name(f"{target.name}.new")
    there = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    here = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        end = os.fstat(there).st_size
        at = 0
        while at < end:
            try:
                start = os.lseek(there, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole is left
                break
            at = os.lseek(there, start, os.SEEK_HOLE)
            while start < at:
                data = os.pread(there, min(at - start, 1 << 20), start)
                start += os.pwrite(here, data, start)
        os.ftruncate(here, size)
        if owner:
            os.fchown(here, owner, owner)
        os.rename(making, target)
    finally:
        os.close(there)
        os.close(here)


def missing_tools() -> list[str]:
    """Packages of the tools that are not here."""
    packages = []
    if not shutil.which(TOOL):
        packages.append(PACKAGE)
    if not (shutil.which(MKFS) or shutil.which(MKFS, path="/usr/sbin:/sbin")):
        packages.append(MKFS_PACKAGE)
    return packages
