"""Who a machine's program runs as: names of users and groups looked up in the image's own files.

The files are a stranger's, and lie in the host's file system: links are followed within the layers only, only regular
files are read, and not more of them than `MAX_BYTES`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

MAX_BYTES = 4 << 20
MAX_LINKS = 40  # as the kernel's
MAX_ID = (1 << 32) - 2  # the last one means "none"
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers inside the machine. `home` is an absolute path, "/" where the image names none."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/"


class UnknownUser(Exception):
    """The image has no such user or group; the text names it."""


def resolve_user(layers: Sequence[Path], user: str) -> User:
    """Look up `name|uid[:group|gid]` ("" is root) in /etc/passwd and /etc/group of the layers, the topmost first, as
    Docker does: a number needs no entry; without a group it is the user's own, with the groups that list the user.

    Raises `UnknownUser`. Links are followed inside the tree only."""
    name, _, group = user.partition(":")
    name = name or "0"
    entry = next((fields for fields in _entries(layers, "/etc/passwd", 7) if _is(fields, name)), None)
    uid = _number(entry[2]) if entry else _number(name)
    if uid is None:
        raise UnknownUser(f"user {name!r}: the image's /etc/passwd has no such user")
    home = entry[5] if entry and entry[5].startswith("/") and "\0" not in entry[5] else "/"
    if group:
        return User(uid=uid, gid=_group(layers, group), home=home)
    gid = (_number(entry[3]) if entry else None) or 0
    return User(uid=uid, gid=gid, groups=_member_of(layers, entry[0], gid) if entry else (), home=home)


def _group(layers: Sequence[Path], group: str) -> int:
    entry = next((fields for fields in _entries(layers, "/etc/group", 4) if _is(fields, group)), None)
    gid = _number(entry[2]) if entry else _number(group)
    if gid is None:
        raise UnknownUser(f"group {group!r}: the image's /etc/group has no such group")
    return gid


def _member_of(layers: Sequence[Path], name: str, gid: int) -> tuple[int, ...]:
    found = {}
    for fields in _entries(layers, "/etc/group", 4):
        number = _number(fields[2])
        if name in fields[3].split(",") and number is not None and number != gid:
            found[number] = True
    return tuple(found)


def _is(fields: list[str], written: str) -> bool:
    """Find an entry by name or by number. A line without a valid number counts as missing."""
    return _number(fields[2]) is not None and (fields[0] == written or _number(written) == _number(fields[2]))


def _number(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else MAX_ID + 1
    return number if number <= MAX_ID else None


def _entries(layers: Sequence[Path], path: str, fields: int) -> Iterator[list[str]]:
    for line in _read(layers, path).decode("utf-8", "replace").split("\n"):
        entry = line.strip().split(":")
        if len(entry) >= fields:
            yield entry


# --- a file of an image, as overlayfs would show it -----------------------------------------------------------------


def _read(layers: Sequence[Path], path: str) -> bytes:
    """b"" when there is no such file, or it is none to be read."""
    file = _find(layers, path)
    if file is None:
        return b""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(fd, "rb") as opened:
        return opened.read(MAX_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _find(layers: Sequence[Path], path: str) -> Path | None:
    """Where the file lies: in which layer, under what name without links. None when there is none."""
    todo = path.split("/")[::-1]
    done: list[str] = []
    where = list(layers)  # those that have the directory `done`, and may have what is below it
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            where = _with_directory(layers, done)
            continue
        found = _look(where, [*done, part])
        if found is None:
            return None
        layer, mode = found
        if stat.S_ISLNK(mode):
            links += 1
            target = os.readlink(layer.joinpath(*done, part))
            if links > MAX_LINKS:
                return None
            if target.startswith("/"):
                done = []
            where = _with_directory(layers, done)
            todo += target.split("/")[::-1]
            continue
        done.append(part)
        if not stat.S_ISDIR(mode):
            return layer.joinpath(*done) if not any(rest not in ("", ".") for rest in todo) else None
        where = _below(where, done)
    return None


def _look(where: Sequence[Path], parts: list[str]) -> tuple[Path, int] | None:
    """The topmost layer that has it, and its mode. None: nowhere, or covered by a whiteout."""
    for layer in where:
        try:
            found = layer.joinpath(*parts).lstat()
        except OSError:
            continue
        whiteout = stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
        return None if whiteout else (layer, found.st_mode)
    return None


def _with_directory(layers: Sequence[Path], parts: list[str]) -> list[Path]:
    where = list(layers)
    for depth in range(1, len(parts) + 1):
        where = _below(where, parts[:depth])
    return where


def _below(where: Sequence[Path], parts: list[str]) -> list[Path]:
    """Choose the layers whose directory `parts` overlayfs merges: from the top down to an opaque one, or to one where
    the name is no directory."""
    merged = []
    for layer in where:
        path = layer.joinpath(*parts)
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue
        if not stat.S_ISDIR(mode):
            break
        merged.append(layer)
        if _opaque(path):
            break
    return merged


def _opaque(path: Path) -> bool:
    for name in OPAQUE:
        try:
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False
