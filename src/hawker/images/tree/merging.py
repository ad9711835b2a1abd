"""A layer's tree joined with the merged ones below it: overlayfs then shows what unpacking one over the other gives.

overlayfs (the kernel's Documentation/filesystems/overlayfs.rst): a character device 0:0 hides a name below, a directory
whose attribute `trusted.overlay.opaque` (or `user.overlay.opaque`) is "y" hides all below it. Both are made only where
there is something to hide: in a directory that is of one layer alone a whiteout would be seen.

Trees hold links of unknown origin. So paths are walked name by name, what is no directory is never gone through, and
links below are resolved by name inside the image. Nothing else changes these trees meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterable, Sequence

from hawker.images.tree.refused import LayerRefused, shown

MAX_MOVED = 1000
UNCLEAR = "the layer has something of its own there, and it is not clear which of them is meant"
MAX_DEPTH = 256
"""How deep a directory may be that a link below leads to."""
MAX_LINKS = 40
"""As many links as the kernel follows on one path."""


class Below:
    """What overlayfs shows of trees, the topmost first."""

    def __init__(self, trees: Sequence[bytes], opaque: bytes) -> None:
        self._opaque = opaque
        self._merged: dict[bytes, tuple[bytes, ...]] = {b"": tuple(trees)}

    def directories(self, path: bytes) -> tuple[bytes, ...]:
        """The directories that make up the one at a path, the topmost first; none when there is no directory."""
        known = self._merged.get(path)
        if known is None:
            known = self._merged[path] = tuple(self._directories(path))
        return known

    def find(self, path: bytes) -> bytes | None:
        """The file that is seen at a path."""
        if not path:
            return next(iter(self.directories(b"")), None)
        parent, _, name = path.rpartition(b"/")
        for directory in self.directories(parent):
            status = lstat(directory + b"/" + name)
            if status is not None:
                return None if _is_whiteout(status) else directory + b"/" + name
        return None

    def names(self, path: bytes) -> set[bytes]:
        """The names that are seen in a directory."""
        every = {name for directory in self.directories(path) for name in os.listdir(directory)}
        return {name for name in every if self.find(joined(path, name)) is not None}

    def resolve(self, path: bytes) -> bytes:
        """The path without links, inside the image. What is not there stays as it is."""
        done = b""
        todo = path.split(b"/") if path else []
        links = 0
        while todo:
            name = todo.pop(0)
            if name in (b"", b"."):
                continue
            if name == b"..":
                done = done.rpartition(b"/")[0]
                continue
            here = joined(done, name)
            found = self.find(here)
            if found is None or not os.path.islink(found):
                done = here
                continue
            links += 1
            if links > MAX_LINKS:
                raise LayerRefused(f"{shown(path)} goes in circles in the layers below")
            target = os.readlink(found)
            if target.startswith(b"/"):
                done = b""
            todo = target.split(b"/") + todo
        return done

    def _directories(self, path: bytes) -> Iterable[bytes]:
        parent, _, name = path.rpartition(b"/")
        for directory in self.directories(parent):
            here = directory + b"/" + name
            status = lstat(here)
            if status is None:
                continue
            if not stat.S_ISDIR(status.st_mode):
                return
            yield here
            if is_opaque(here, self._opaque):
                return


class _Joining:
    def __init__(
        self,
        tree: bytes,
        below: Below,
        implied: Iterable[bytes],
        removed: Iterable[bytes],
        opaque: Iterable[bytes],
        mark: bytes,
    ) -> None:
        self._tree = tree
        self._below = below
        self._implied = set(implied)
        self._removed = set(removed)
        self._opaque = set(opaque)
        self._mark = mark
        self._times: dict[bytes, int] = {}

    def join(self) -> None:
        self._follow_links()
        for path in sorted(self._opaque - self._removed):
            if not self._is_in_opaque(path):
                self._hide_all(path)
        for path in sorted(self._removed):
            if not self._is_in_opaque(path):
                self._hide(path)
        for path in sorted(self._implied, reverse=True):
            self._copy(path)
        for path, mtime_ns in self._times.items():
            if path not in self._implied and _is_directory(self._at(path)):
                os.utime(self._at(path), ns=(mtime_ns, mtime_ns))

    def _follow_links(self) -> None:
        """Where a directory that is only implied is a link below, what is in it belongs where the link leads."""
        moved = 0
        todo = sorted(self._implied, reverse=True)
        while todo:
            path = todo.pop()
            found = self._below.find(path)
            if found is None or _is_directory(found):
                continue
            if not os.path.islink(found):
                raise LayerRefused(f"{shown(path)} is a directory to this layer and a file to those below")
            moved += 1
            if moved > MAX_MOVED:
                raise LayerRefused(f"it goes through more than {MAX_MOVED} links of the layers below")
            target = self._below.resolve(path)
            if target == path or target.startswith(path + b"/"):
                raise LayerRefused(f"{shown(path)} is a link to itself in the layers below")
            if _is_directory(self._at(path)):  # it is not when this is a second time
                self._make_directories(target)
                if not _is_directory(self._at(target)):
                    raise LayerRefused(f"{shown(path)} leads to {shown(target)} below: {UNCLEAR}")
                self._move(path, target)
            self._implied, self._removed, self._opaque = (
                {_rebased(each, path, target) for each in paths}
                for paths in (self._implied - {path}, self._removed, self._opaque)
            )
            todo = sorted(self._implied, reverse=True)
        self._removed, self._opaque = (
            {self._resolved(path) for path in self._removed},
            {self._below.resolve(path) if lstat(self._at(path)) is None else path for path in self._opaque},
        )

    def _resolved(self, path: bytes) -> bytes:
        parent, _, name = path.rpartition(b"/")
        if lstat(self._at(parent)) is not None:
            return path
        return joined(self._below.resolve(parent), name)

    def _move(self, path: bytes, target: bytes) -> None:
        self._note_times(target)
        self._note_times(path.rpartition(b"/")[0])
        for name in os.listdir(self._at(path)):
            source, destination = joined(path, name), joined(target, name)
            status = lstat(self._at(destination))
            if status is None:
                os.rename(self._at(source), self._at(destination))
            elif stat.S_ISDIR(status.st_mode) and _is_directory(self._at(source)) and source in self._implied:
                self._move(source, destination)
            else:
                raise LayerRefused(f"{shown(source)} leads to {shown(destination)} below: {UNCLEAR}")
        os.rmdir(self._at(path))

    def _is_in_opaque(self, path: bytes) -> bool:
        """Whether a directory above hides what is below anyway."""
        while path:
            path = path.rpartition(b"/")[0]
            if path in self._opaque:
                return True
        return False

    def _hide_all(self, path: bytes) -> None:
        if not self._below.directories(path):
            return
        if not path:  # overlayfs merges the roots of its layers, whatever they say
            for name in self._below.names(b""):
                if not _is_directory(self._at(name)):
                    self._hide(name)
                elif self._below.directories(name):
                    os.setxattr(self._at(name), self._mark, b"y", follow_symlinks=False)
            return
        self._make_directories(path)
        if _is_directory(self._at(path)):
            os.setxattr(self._at(path), self._mark, b"y", follow_symlinks=False)

    def _hide(self, path: bytes) -> None:
        if self._below.find(path) is None:
            return
        parent = path.rpartition(b"/")[0]
        self._make_directories(parent)
        if not _is_directory(self._at(parent)) or lstat(self._at(path)) is not None:
            return
        self._note_times(parent)
        os.mknod(self._at(path), stat.S_IFCHR, os.makedev(0, 0))

    def _make_directories(self, path: bytes) -> None:
        """Have a directory and those above it, where the layer has nothing else in their place."""
        if path.count(b"/") >= MAX_DEPTH:
            raise LayerRefused(f"a link of the layers below leads deeper than {MAX_DEPTH} directories: {shown(path)}")
        missing = []
        while path and lstat(self._at(path)) is None:
            missing.append(path)
            path = path.rpartition(b"/")[0]
        if not _is_directory(self._at(path)):
            return
        for each in reversed(missing):
            self._note_times(each.rpartition(b"/")[0])
            os.mkdir(self._at(each), 0o755)
            os.chmod(self._at(each), 0o755)
            os.utime(self._at(each), (0, 0))
            self._implied.add(each)

    def _note_times(self, path: bytes) -> None:
        if path not in self._times:
            self._times[path] = os.lstat(self._at(path)).st_mtime_ns

    def _copy(self, path: bytes) -> None:
        """Give a directory what it has below."""
        source = self._below.find(path)
        here = self._at(path)
        if source is None:
            if path in self._times:
                os.utime(here, ns=(self._times[path], self._times[path]))
            return
        status = os.lstat(source)
        os.chown(here, status.st_uid, status.st_gid, follow_symlinks=False)
        os.chmod(here, stat.S_IMODE(status.st_mode))
        for name in os.listxattr(source, follow_symlinks=False):
            if os.fsencode(name) != self._mark:
                with contextlib.suppress(PermissionError):  # a host's own mark, as SELinux makes it
                    os.setxattr(here, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
        os.utime(here, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def _at(self, path: bytes) -> bytes:
        return joined(self._tree, path) if path else self._tree


def merge(
    tree: bytes,
    lowers: Sequence[bytes],
    *,
    implied: Iterable[bytes],
    removed: Iterable[bytes],
    opaque: Iterable[bytes],
    namespace: bytes,
) -> None:
    """`implied`, `removed` and `opaque` as in `Unpacked`; `namespace` of the attributes that overlayfs is to read."""
    mark = opaque_mark(namespace)
    try:
        _Joining(tree, Below(lowers, mark), implied, removed, opaque, mark).join()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise LayerRefused("a link of the layers below leads to a path that is too long") from None


def opaque_mark(namespace: bytes) -> bytes:
    return namespace + b"overlay.opaque"


def is_opaque(directory: bytes, mark: bytes) -> bool:
    try:
        return os.getxattr(directory, mark, follow_symlinks=False) == b"y"
    except OSError:
        return False


def remove(tree: str) -> None:
    """Directories may be closed even to their owner, which is nothing to root, and deeper than calls or paths can go.
    So each is moved beside the others before it is emptied; a kill leaves the tree and `<tree>.<number>`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(tree).st_mode):
            os.unlink(tree)
        elif os.geteuid() == 0:
            _remove_directory(tree)


def _remove_directory(tree: str) -> None:
    beside = next(name for number in itertools.count() if not os.path.lexists(name := f"{tree}.{number}"))
    os.mkdir(beside, 0o700)
    moved = 0
    try:
        os.rename(tree, f"{beside}/{moved}")
        todo = [f"{beside}/{moved}"]
        while todo:
            directory = todo.pop()
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        moved += 1
                        os.rename(entry.path, f"{beside}/{moved}")
                        todo.append(f"{beside}/{moved}")
                    else:
                        os.unlink(entry.path)
            os.rmdir(directory)
    finally:
        with contextlib.suppress(OSError):  # of what could not be removed the first error tells
            os.rmdir(beside)


def joined(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def lstat(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_directory(path: bytes) -> bool:
    status = lstat(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _rebased(path: bytes, old: bytes, new: bytes) -> bytes:
    if path == old:
        return new
    return joined(new, path[len(old) + 1 :]) if path.startswith(old + b"/") else path
