"""`python -m hawker.worker.drivers.microvm.building FILE LAYER...`: a disk made of an image's unpacked layers.

The layers, the topmost first, are joined by overlayfs in a mount namespace of this process, so whatever ends it leaves
no mount. An ordinary user gets a user namespace in which that is allowed. Prints what went wrong and returns 1.

The file system is EROFS. mkfs.erofs orders files by name and keeps their times; the only bytes that differ between two
runs are the time of making in the superblock (fs/erofs/erofs_fs.h), which is set to zero here.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

TOOL = "mkfs.erofs"
PACKAGE = "erofs-utils"
_UUID = "00000000-0000-0000-0000-000000000000"
_SUPERBLOCK, _MAGIC = 1024, b"\xe2\xe1\xf5\xe0"
_BUILD_TIME, _BUILD_TIME_BYTES = _SUPERBLOCK + 24, 12

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _REC, _PRIVATE, _BIND = 1, 0x4000, 1 << 18, 0x1000
_libc = ctypes.CDLL(None, use_errno=True)


def build(target: str, layers: Sequence[str]) -> None:
    """Raises OSError, `subprocess.CalledProcessError`."""
    _enter_namespace()
    place = tempfile.mkdtemp(prefix="hawker-disk-")
    _mount("tmpfs", place, "tmpfs", 0, "mode=700")
    os.mkdir(f"{place}/root")
    for number, layer in enumerate(layers):
        os.symlink(os.path.abspath(layer), f"{place}/{number}")
    target = os.path.abspath(target)
    if len(layers) == 1:
        _mount(f"{place}/0", f"{place}/root", "", _BIND, "")
    else:  # by short names: options may be a page long, and an image have a hundred layers
        os.chdir(place)
        _mount("overlay", f"{place}/root", "overlay", _RDONLY, "lowerdir=" + ":".join(map(str, range(len(layers)))))
    try:
        argv = [TOOL, "-E", "nosbcrc", "-U", _UUID, "--quiet", target, f"{place}/root"]
        subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    finally:
        os.chdir("/")
        _libc.umount2(place.encode(), 2)
        os.rmdir(place)
    _without_time(target)


def _without_time(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(_SUPERBLOCK)
        if file.read(4) != _MAGIC:
            raise OSError(f"{path}: not an EROFS file system")
        file.seek(_BUILD_TIME)
        file.write(bytes(_BUILD_TIME_BYTES))


def _enter_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_NEWNS | (_NEWUSER if uid else 0)):
        raise OSError(ctypes.get_errno(), f"no namespace of its own: {os.strerror(ctypes.get_errno())}")
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", "", _REC | _PRIVATE, "")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None):
        error = ctypes.get_errno()
        raise OSError(error, f"mounting {kind or source} failed: {os.strerror(error)}")


def main(argv: Sequence[str]) -> int:
    try:
        build(argv[0], argv[1:])
    except subprocess.CalledProcessError as error:
        print(f"{TOOL} ended with {error.returncode}: {error.stderr.strip()[-400:]}")
        return 1
    except OSError as error:
        print(error.strerror or error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
