"""Entries become files, below the current directory, which is the root of the process by then.

Every path that the layer has made is remembered with its kind, so no link is ever followed and nothing is asked of the
file system that is known. Directories stay closed and root's until the end; then they get their mode, owner, times.

A whiteout speaks of the layers below only: what the same layer makes stays, whether before or after (OCI image
specification 1.1, "Whiteouts"). So nothing is made for it here; what it hides is for `merging` to see.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

from hawker.images.tree.headers import BLOCKDEV, CHAR, DIRECTORY, FIFO, FILE, LINK, SYMLINK, Entry
from hawker.images.tree.refused import LayerRefused, shown
from hawker.images.tree.streams import TarStream

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
PATH_MAX = 3584
"""Bytes: the kernel takes 4095, of which some are to say where the tree is."""
NAME_MAX = 255
MAX_LEFT_OUT = 100
SPECIAL = {CHAR: stat.S_IFCHR, BLOCKDEV: stat.S_IFBLK, FIFO: stat.S_IFIFO}
IGNORED = (b"trusted.", b"user.overlay.", b"security.selinux", b"system.nfs4_acl")
"""Attributes that are a host's own affair, or that would speak to the overlayfs that the tree becomes part of."""
TRANSIENT = 0o700
LISTED = 64
"""Bytes that a path in a list costs besides its own."""
LOOK_BYTES, LOOK_ENTRIES = 16 << 20, 4096
"""After how many bytes, or entries, the free room is looked at again."""


class Extraction:
    """Takes each entry with `make`, then `finish`."""

    def __init__(
        self, stream: TarStream, *, entries: int, depth: int, xattrs: int, lists: int, devices: bool, free: int
    ) -> None:
        self._stream = stream
        self._max_entries = entries
        self._depth = depth
        self._max_xattrs = xattrs
        self._max_lists = lists
        self._devices = devices
        self._free = free
        self._listed = 0
        self._look = (0, 0)
        self._kinds: dict[bytes, bytes] = {b"": DIRECTORY}
        self._directories: dict[bytes, Entry] = {}
        self.entries = 0
        self.bytes = 0
        self.implied: dict[bytes, None] = {b"": None}
        self.removed: dict[bytes, None] = {}
        self.opaque: dict[bytes, None] = {}
        self.left_out: list[str] = []

    def make_all(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._count(1)
            try:
                self._check_room()
                self._make(entry)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM):
                    raise
                raise LayerRefused(f"{shown(entry.name)} cannot be made: {error.strerror}") from None
        self._finish()

    def _count(self, more: int) -> None:
        self.entries += more
        if self.entries > self._max_entries:
            raise LayerRefused(f"it has more than {self._max_entries} entries")

    def _list(self, path: bytes, where: dict[bytes, None]) -> None:
        self._listed += len(path) + LISTED
        if self._listed > self._max_lists:
            raise LayerRefused(f"it hides or implies more than {self._max_lists} bytes of names")
        where[path] = None

    def _check_room(self) -> None:
        at, entries = self._look
        if self._free and (self._stream.position >= at or self.entries >= entries):
            self._look = self._stream.position + LOOK_BYTES, self.entries + LOOK_ENTRIES
            about = os.statvfs(".")
            if about.f_bavail * about.f_frsize < self._free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _make(self, entry: Entry) -> None:
        path = self._path(entry.name, "name")
        parent, _, name = path.rpartition(b"/")
        if name.startswith(WHITEOUT):
            self._hide(parent, name, entry)
            return
        if not path:
            if entry.kind != DIRECTORY:
                raise LayerRefused(f"{shown(entry.name)} would make something else than a directory of the root")
            self._note_directory(path, entry)
            return
        if self._kinds.get(parent) != DIRECTORY:
            self._imply(parent, entry)
        if entry.kind == DIRECTORY:
            self._directory(path, entry)
            return
        if path in self._kinds:
            self._clear(path)
        self.removed.pop(path, None)  # what is made hides what is below as well
        if entry.kind == FILE:
            self._file(path, entry)
        elif entry.kind == SYMLINK:
            if not entry.link or b"\0" in entry.link:
                raise LayerRefused(f"{shown(entry.name)} is a symbolic link to nowhere")
            os.symlink(entry.link, path)
        elif entry.kind == LINK:
            self._link(path, entry)
            return
        elif entry.kind in SPECIAL:
            if not self._special(path, entry):
                return
        else:
            raise LayerRefused(f"{shown(entry.name)} is of an unknown type: {shown(entry.kind)}")
        self._kinds[path] = entry.kind
        if entry.kind != FILE:
            self._finish_entry(path, entry)

    def _path(self, raw: bytes, what: str) -> bytes:
        """Where a name of the tar is in the tree. A leading slash means the tree's root, as readers of tars have it."""
        if b"\0" in raw:
            raise LayerRefused(f"{shown(raw)} has a null byte in its {what}")
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise LayerRefused(f"{shown(raw)} would leave the root: its {what} has a '..'")
        if len(parts) > self._depth:
            raise LayerRefused(f"{shown(raw)} is deeper than {self._depth} directories")
        path = b"/".join(parts)
        if len(path) > PATH_MAX or any(len(part) > NAME_MAX for part in parts):
            raise LayerRefused(f"{shown(raw)} is too long a {what}")
        return path

    def _hide(self, parent: bytes, name: bytes, entry: Entry) -> None:
        self._check_directories(parent, entry)
        if name == OPAQUE:
            self._list(parent, self.opaque)
            return
        hidden = name[len(WHITEOUT) :]
        if hidden in (b"", b".", b"..") or hidden.startswith(WHITEOUT):
            raise LayerRefused(f"{shown(entry.name)} is no whiteout that means anything")
        path = parent + b"/" + hidden if parent else hidden
        kind = self._kinds.get(path)
        if kind is None:
            self._list(path, self.removed)
        elif kind == DIRECTORY:
            self._list(path, self.opaque)

    def _check_directories(self, path: bytes, entry: Entry) -> None:
        """Nothing that this layer made stands where a whiteout needs a directory."""
        while path:
            if self._kinds.get(path, DIRECTORY) != DIRECTORY:
                raise LayerRefused(f"{shown(entry.name)} would go through {shown(path)}, which is no directory")
            path = path.rpartition(b"/")[0]

    def _imply(self, path: bytes, entry: Entry) -> None:
        """Make the directories that the tar has no entries for."""
        missing = []
        while (kind := self._kinds.get(path)) is None:
            missing.append(path)
            path = path.rpartition(b"/")[0]
        if kind != DIRECTORY:
            what = "a symbolic link" if kind == SYMLINK else "no directory"
            raise LayerRefused(f"{shown(entry.name)} would be written through {shown(path)}, which is {what}")
        self._count(len(missing))
        for path in reversed(missing):
            os.mkdir(path, TRANSIENT)
            self._kinds[path] = DIRECTORY
            if path in self.removed:
                del self.removed[path]
                self._list(path, self.opaque)
            elif not self._is_in_opaque(path):
                self._list(path, self.implied)

    def _is_in_opaque(self, path: bytes) -> bool:
        """Whether a directory above is opaque by now, so that nothing below this layer shows through."""
        while self.opaque and path:
            path = path.rpartition(b"/")[0]
            if path in self.opaque:
                return True
        return False

    def _directory(self, path: bytes, entry: Entry) -> None:
        kind = self._kinds.get(path)
        if kind != DIRECTORY:
            if kind is not None:
                os.unlink(path)  # it had taken the place of what is below, so the directory begins empty
                self._list(path, self.opaque)
            elif path in self.removed:
                del self.removed[path]
                self._list(path, self.opaque)
            os.mkdir(path, TRANSIENT)
            self._kinds[path] = DIRECTORY
        self._note_directory(path, entry)

    def _note_directory(self, path: bytes, entry: Entry) -> None:
        self.implied.pop(path, None)
        self._directories[path] = entry

    def _clear(self, path: bytes) -> None:
        """Remove what this layer made at a path. Each thing is made once and removed once, so this costs no more than
        making them, whatever order the entries come in."""
        if self._kinds.pop(path) != DIRECTORY:
            os.unlink(path)
            return
        self._directories.pop(path, None)
        self.implied.pop(path, None)
        self.opaque.pop(path, None)
        for name in os.listdir(path):
            self._clear(path + b"/" + name)
        os.rmdir(path)

    def _file(self, path: bytes, entry: Entry) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            for piece in self._stream.pieces(entry.size):
                self._check_room()
                while piece:
                    count = os.write(fd, piece)
                    written += count
                    piece = piece[count:]
            if written < entry.size:
                raise LayerRefused(f"its tar ends in the middle of {shown(entry.name)}")
            self.bytes += written
            if entry.uid or entry.gid:
                self._chown(fd, entry)
            os.fchmod(fd, entry.mode)
            if entry.xattrs:
                self._set_xattrs(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _link(self, path: bytes, entry: Entry) -> None:
        target = self._path(entry.link, "link")
        kind = self._kinds.get(target)
        if kind is None or target == path:
            raise LayerRefused(
                f"{shown(entry.name)} is a hard link to {shown(entry.link)}, which its layer does not have"
            )
        if kind == DIRECTORY:
            raise LayerRefused(f"{shown(entry.name)} is a hard link to {shown(entry.link)}, which is a directory")
        os.link(target, path, follow_symlinks=False)
        self._kinds[path] = kind

    def _special(self, path: bytes, entry: Entry) -> bool:
        """Returns whether it was made."""
        device = 0
        if entry.kind != FIFO:
            if not self._devices:
                raise LayerRefused(f"{shown(entry.name)} is a device node, which is not allowed here")
            if entry.major >> 12 or entry.minor >> 20:
                raise LayerRefused(f"{shown(entry.name)} has a device number that no device has")
            device = os.makedev(entry.major, entry.minor)
            if entry.kind == CHAR and device == 0:
                raise LayerRefused(f"{shown(entry.name)} is a device 0:0, which is how overlayfs marks what is gone")
        try:
            os.mknod(path, SPECIAL[entry.kind] | 0o600, device)
        except PermissionError:
            self._leave_out(f"{shown(entry.name)}: only root can make device nodes")
            return False
        return True

    def _finish_entry(self, path: bytes, entry: Entry) -> None:
        if entry.uid or entry.gid:
            self._chown(path, entry)
        if entry.kind != SYMLINK:
            os.chmod(path, entry.mode)
        if entry.xattrs:
            self._set_xattrs(path, entry)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)

    def _chown(self, where: int | bytes, entry: Entry) -> None:
        try:
            os.chown(where, entry.uid, entry.gid, follow_symlinks=isinstance(where, int))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
            self._leave_out(f"{shown(entry.name)}: no user {entry.uid}:{entry.gid} to give it to")

    def _set_xattrs(self, where: int | bytes, entry: Entry) -> None:
        if sum(len(name) + len(value) for name, value in entry.xattrs.items()) > self._max_xattrs:
            raise LayerRefused(f"{shown(entry.name)} has extended attributes of more than {self._max_xattrs} bytes")
        for name, value in entry.xattrs.items():
            if name.startswith(IGNORED):
                self._leave_out(f"{shown(entry.name)}: attribute {shown(name)}")
                continue
            try:
                if isinstance(where, int):
                    os.setxattr(where, name, value)
                else:
                    os.setxattr(where, name, value, follow_symlinks=False)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    if os.statvfs(".").f_bavail == 0 or error.errno == errno.EIO:
                        raise
                    raise LayerRefused(
                        f"{shown(entry.name)} has more extended attributes than the file system keeps"
                    ) from None  # ext4 says so by the same error as when it is full
                self._leave_out(f"{shown(entry.name)}: attribute {shown(name)}: {error}")

    def _finish(self) -> None:
        """Directories get what their entries say, the deepest first: a closed one lets nobody in any more, and what
        happens in one changes its times. Those that are only implied get what a directory has by default."""
        for path in self._kinds:
            if self._kinds[path] == DIRECTORY and path not in self._directories:
                self._directories[path] = Entry(path, DIRECTORY, mode=0o755)
        for path in sorted(self._directories, reverse=True):
            self._finish_entry(path or b".", self._directories[path])

    def _leave_out(self, line: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            self.left_out.append(line)
