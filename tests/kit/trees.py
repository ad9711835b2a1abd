"""Trees of files told in full, and what overlayfs shows of several: for comparing what unpacked them.

    picture(Path("rootfs"))         # every path with its kind, mode, owner, time, attributes, content and links
    overlaid([top, ..., base])      # the same of the mount, made in a mount namespace that ends with the look

`apply(made, directory)` unpacks and settles the layers of an image from `tests.kit.oci`; `by_umoci(made, directory)` is
what umoci makes of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x0002_0000, 0x4000, 0x4_0000


def picture(root: Path) -> dict[str, dict[str, Any]]:
    """By path, "." for the root. Names of one file are told by `links`: all of them."""
    base = os.fsencode(root)
    found: dict[bytes, dict[str, Any]] = {b".": _about(base)}
    names: dict[tuple[int, int], list[bytes]] = {}
    for directory, directories, files in os.walk(base):
        for name in directories + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            found[path[len(base) + 1 :]] = _about(path)
            if not stat.S_ISDIR(status.st_mode):
                names.setdefault((status.st_dev, status.st_ino), []).append(path[len(base) + 1 :])
    for several in names.values():
        for name in several:
            found[name]["links"] = sorted(os.fsdecode(each) for each in several)
    return {os.fsdecode(path): about for path, about in sorted(found.items())}


def _about(path: bytes) -> dict[str, Any]:
    status = os.lstat(path)
    told: dict[str, Any] = {
        "mode": oct(status.st_mode),
        "owner": f"{status.st_uid}:{status.st_gid}",
        "mtime_ns": status.st_mtime_ns,
    }
    xattrs = {
        name: os.getxattr(path, name, follow_symlinks=False).hex()
        for name in os.listxattr(path, follow_symlinks=False)
        if ".overlay." not in name
    }
    if xattrs:
        told["xattrs"] = xattrs
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            told["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    elif stat.S_ISLNK(status.st_mode):
        told["target"] = os.fsdecode(os.readlink(path))
    elif not stat.S_ISDIR(status.st_mode):
        told["device"] = status.st_rdev
    return told


def overlaid(trees: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What overlayfs shows, the first tree on top. The trees have one parent."""
    argv = [sys.executable, __file__, str(trees[0].parent), *(tree.name for tree in trees)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return told


def by_umoci(layout: Path, tag: str, bundle: Path) -> tuple[Path | None, str]:
    """The root that umoci makes, or None and what it complains about."""
    argv = ["umoci", "unpack", "--image", f"{layout}:{tag}", str(bundle)]
    done = subprocess.run(argv, capture_output=True, text=True)
    return (bundle / "rootfs", "") if done.returncode == 0 else (None, done.stderr)


def _show(parent: str, names: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    os.chdir(parent)
    call(libc.unshare(CLONE_NEWNS))
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    call(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None))
    for name in ("upper", "work", "merged"):
        os.mkdir(f"/mnt/{name}")
    lowest = os.stat(names[0])
    os.chown("/mnt/upper", lowest.st_uid, lowest.st_gid)
    os.chmod("/mnt/upper", stat.S_IMODE(lowest.st_mode))
    for attribute in os.listxattr(names[0]):
        if ".overlay." not in attribute:
            os.setxattr("/mnt/upper", attribute, os.getxattr(names[0], attribute))
    os.utime("/mnt/upper", ns=(lowest.st_mtime_ns, lowest.st_mtime_ns))
    options = f"lowerdir={':'.join(names)},upperdir=/mnt/upper,workdir=/mnt/work"
    call(libc.mount(b"overlay", b"/mnt/merged", b"overlay", 0, options.encode()))
    print(json.dumps(picture(Path("/mnt/merged"))))


if __name__ == "__main__":
    _show(sys.argv[1], sys.argv[2:])
