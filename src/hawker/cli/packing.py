"""A directory as a tar for an image: every file of it, in a fixed order, owned by root."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from hawker.errors import Invalid

ENTRIES_MOST = 1_000_000


def pack(directory: Path, to: BinaryIO, leave_out: Sequence[str] = ()) -> None:
    """Write the tar. `leave_out` are patterns of names or of paths below the directory. Sockets are left out, all other
    files go as they are: modes, times, links, holes filled.

    Raises `Invalid` when it is no directory or one that cannot be an image, `OSError` for what cannot be read.
    """
    if not directory.is_dir():
        raise Invalid("directory", str(directory), "give a directory with the image's files")
    links: dict[tuple[int, int], str] = {}
    with tarfile.open(fileobj=to, mode="w|", format=tarfile.PAX_FORMAT, dereference=False) as tar:
        for count, (path, name) in enumerate(_walk(directory, leave_out)):
            if count >= ENTRIES_MOST:
                raise Invalid("directory", str(directory), f"an image made here has at most {ENTRIES_MOST} files")
            about = path.lstat()
            if stat.S_ISSOCK(about.st_mode):
                continue
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = stat.S_IMODE(about.st_mode), int(about.st_mtime)
            info.uid = info.gid = 0
            if stat.S_ISREG(about.st_mode):
                inode = (about.st_dev, about.st_ino)
                if about.st_nlink > 1 and inode in links:
                    info.type, info.linkname = tarfile.LNKTYPE, links[inode]
                    tar.addfile(info)
                else:
                    links[inode] = name
                    with path.open("rb") as file:
                        info.size = os.fstat(file.fileno()).st_size
                        tar.addfile(info, file)
            else:
                _set_kind(info, path, about)
                tar.addfile(info)


def _set_kind(info: tarfile.TarInfo, path: Path, about: os.stat_result) -> None:
    if stat.S_ISDIR(about.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(about.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
    elif stat.S_ISFIFO(about.st_mode):
        info.type = tarfile.FIFOTYPE
    else:
        info.type = tarfile.CHRTYPE if stat.S_ISCHR(about.st_mode) else tarfile.BLKTYPE
        info.devmajor, info.devminor = os.major(about.st_rdev), os.minor(about.st_rdev)


def _walk(directory: Path, leave_out: Sequence[str], below: str = "") -> Iterator[tuple[Path, str]]:
    """Paths and their names in the tar, directories before what is in them."""
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = f"{below}{entry.name}"
        if any(fnmatch(entry.name, pattern) or fnmatch(name, pattern) for pattern in leave_out):
            continue
        path = Path(entry.path)
        yield path, name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, leave_out, f"{name}/")
