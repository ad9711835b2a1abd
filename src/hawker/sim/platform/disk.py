"""A disk for SQLite that loses power, fails and fills up on request.

What was written but not synced when the power goes is kept, lost or torn (only its beginning is kept), each write by
itself as the seed decides, so that later writes may survive earlier ones. The same holds for files made and deleted,
until the directory is synced. What is safe is what the unix VFS makes safe: a synced file, the directory with the first
sync of a new journal or write-ahead log, and whatever lies beside a write (POWERSAFE_OVERWRITE).

    with CrashDisk(seed=1) as disk:
        disk.cut_at = 40                                  # the 40th call that changes the disk is its last
        ... Store.open("w.db", host, vfs=disk.name) ...   # from then on everything raises apsw.IOError
        disk.power_on()                                   # what survived can be opened again

A Python VFS has no shared memory, so SQLite uses its write-ahead log in exclusive mode only (`Store.open` does that).
In a simulation a file belongs to the process that opened it: once that is dead its calls fail and change nothing, and
what it wrote is there for the next one, synced or not, as after kill -9.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Literal, NamedTuple

import apsw

from hawker.sim.platform.processes import PROCESS

Fate = Literal["kept", "lost", "torn"]
_FATES: tuple[Fate, ...] = ("kept", "lost", "torn")
_number = itertools.count()


class Write(NamedTuple):
    """A write that is not synced; without data, a truncation to `offset`."""

    offset: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            return
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data


class Content:
    """One file: what is safe, what was written since, and what a reader sees: both together."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.seen = bytearray()
        self.unsynced: list[Write] = []

    def write(self, write: Write) -> None:
        self.unsynced.append(write)
        write.apply(self.seen)

    def sync(self) -> None:
        for write in self.unsynced:
            write.apply(self.safe)
        self.unsynced.clear()


class CrashDisk:
    """`cut_at`: the call at which the power goes. `fail_at`: a call that fails once, with an I/O error. `room`: bytes
    the disk holds. A call is one that changes the disk: write, truncate, sync or delete; `calls` counts them.

    `fates` counts what became of unsynced writes, `ended_by` the calls that were cut, failed or found no room, by what
    they were. `broken`: every change fails. `on_cut` is called as the power goes; `on_call` with every change that is
    about to happen, and may kill the process that makes it; `on_sync` after every sync, and `note` with the file that
    was synced and the number of the call.
    """

    def __init__(self, seed: int | str) -> None:
        self.name = f"crashdisk-{next(_number)}"
        self.rng = random.Random(seed)
        self.files: dict[str, Content] = {}
        self.calls = 0
        self.cut_at: int | None = None
        self.fail_at: int | None = None
        self.room: int | None = None
        self.off = False
        self.broken = False
        self.on_cut: Callable[[], None] = lambda: None
        self.on_call: Callable[[str], None] | None = None
        self.on_sync: Callable[[], None] | None = None
        self.note: Callable[[str], None] | None = None
        self.fates: Counter[Fate] = Counter()
        self.ended_by: Counter[str] = Counter()
        self._safe_names: dict[str, Content] = {}  # the directory as it was last synced
        self._vfs = _Vfs(self)

    def __enter__(self) -> CrashDisk:
        return self

    def close(self) -> None:
        """Close what is open on it; no database can be opened on it any more.

        A connection and the file objects that SQLite holds for it keep each other, where Python's collector cannot see.
        """
        for connection in apsw.connections():
            with suppress(apsw.Error):  # it may be closed by now, or find its disk without power
                if connection.open_vfs == self.name:
                    connection.close(True)
        self._vfs.unregister()
        self.files.clear()
        self._safe_names.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def power_on(self) -> None:
        """Decide what became of everything unsynced, and make the disk work again without faults."""
        for name in sorted(self._safe_names.keys() | self.files.keys()):
            now, safe = self.files.get(name), self._safe_names.get(name)
            survivor = now if now is safe else self.rng.choice((now, safe))
            if survivor is None:
                self.files.pop(name, None)
            else:
                self.files[name] = survivor
        self.sync_directory()
        kept = self.rng.choice((0.2, 0.5, 0.95))  # some disks had nearly finished, others had hardly begun
        chances = (kept, (1 - kept) / 2, (1 - kept) / 2)
        for content in self.files.values():
            for write in content.unsynced:
                [fate] = self.rng.choices(_FATES, chances)
                if write.data is None and fate == "torn":
                    fate = "lost"
                self.fates[fate] += 1
                if fate == "torn" and write.data is not None:
                    write = Write(write.offset, write.data[: self.rng.randrange(len(write.data))])
                if fate != "lost":
                    write.apply(content.safe)
            content.seen = bytearray(content.safe)
            content.unsynced.clear()
        self.cut_at = self.fail_at = self.room = None
        self.off = self.broken = False

    def used(self) -> int:
        """Bytes in all files."""
        return sum(len(content.seen) for content in self.files.values())

    def backup(self) -> Mapping[str, bytes]:
        """A copy of every file at this moment."""
        return {name: bytes(content.seen) for name, content in self.files.items()}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Put another disk in its place, with these files or empty."""
        self.files = {}
        for name, data in files.items():
            content = self.files[name] = Content()
            content.safe, content.seen = bytearray(data), bytearray(data)
        self.cut_at = self.fail_at = self.room = None
        self.off = self.broken = False
        self.sync_directory()

    # --- called by the files ---

    def check_power(self) -> None:
        if self.off:
            raise apsw.IOError("the disk has no power")

    def call(self, what: str) -> None:
        """Count a change that is about to happen. Raises when it is the one that fails."""
        self.check_power()
        self.calls += 1
        if self.on_call:
            self.on_call(what)
            check_alive()
        if self.calls == self.fail_at or self.broken:
            self.ended_by[f"failed {what}"] += 1
            raise apsw.IOError(f"{what} failed")

    def maybe_cut(self, what: str) -> None:
        """Take the power away when this was the last call; a write may have reached the disk, a sync has not."""
        if self.calls == self.cut_at:
            self.off = True
            self.ended_by[f"cut {what}"] += 1
            self.on_cut()
            raise apsw.IOError(f"power lost in {what}")

    def check_room(self, content: Content, end: int) -> None:
        if self.room is not None and self.used() + max(0, end - len(content.seen)) > self.room:
            self.ended_by["full"] += 1
            raise apsw.FullError("the disk is full")

    def delete(self, name: str, synced: bool) -> None:
        kind = _kind(name)
        self.call(f"delete of {kind}")
        del self.files[name]
        self.maybe_cut(f"delete of {kind}")
        if synced:
            self.sync_directory()

    def sync_directory(self) -> None:
        self._safe_names = dict(self.files)


class _File:
    def __init__(self, disk: CrashDisk, name: str) -> None:
        self._disk = disk
        self._process = PROCESS.get()
        self._name = name.rsplit("/", 1)[-1]
        self._kind = _kind(name)
        self._new = name not in disk.files
        self._content = disk.files.setdefault(name, Content())

    def _void(self) -> bool:
        """Whether a call has no effect any more: SQLite closes a dead process's database when Python collects it.

        Raises when that process itself still runs on to the end of the step it was killed in.
        """
        if self._process is None or not self._process.dead:
            return False
        check_alive()
        return True

    def xRead(self, amount: int, offset: int) -> bytes:
        if self._void():
            return b""
        self._disk.check_power()
        return bytes(memoryview(self._content.seen)[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._void():
            return
        what = f"write of {self._kind}"
        self._disk.call(what)
        if self._kind != "database":
            # SQLite ignores a checkpoint that finds no room, since its commit is safe. An error raised here would come
            # out of that commit all the same, as a Python exception.
            self._disk.check_room(self._content, offset + len(data))
        self._content.write(Write(offset, bytes(data)))
        self._disk.maybe_cut(what)

    def xTruncate(self, size: int) -> None:
        if self._void():
            return
        what = f"truncation of {self._kind}"
        self._disk.call(what)
        self._content.write(Write(size, None))
        self._disk.maybe_cut(what)

    def xSync(self, flags: int) -> None:
        if self._void():
            return
        what = f"sync of {self._kind}"
        self._disk.call(what)
        self._disk.maybe_cut(what)
        self._content.sync()
        if self._new and self._kind != "database":
            self._disk.sync_directory()
        self._new = False
        if self._disk.note:
            self._disk.note(f"{self._name} {self._disk.calls}")
        if self._disk.on_sync:
            self._disk.on_sync()

    def xFileSize(self) -> int:
        return len(self._content.seen)

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE

    def xClose(self) -> None: ...

    def xLock(self, level: int) -> None: ...

    def xUnlock(self, level: int) -> None: ...

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        return False


class _Vfs(apsw.VFS):
    def __init__(self, disk: CrashDisk) -> None:
        self._disk = disk
        super().__init__(disk.name, "")  # "": the clock and the rest come from the default VFS

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _File:  # type: ignore[override]
        self._disk.check_power()
        check_alive()
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        flags[1] = flags[0]
        return _File(self._disk, path or f"temporary-{next(_number)}")

    def xDelete(self, filename: str, syncdir: bool) -> None:
        check_alive()
        self._disk.delete(filename, bool(syncdir))

    def xAccess(self, pathname: str, flags: int) -> bool:
        self._disk.check_power()
        return pathname in self._disk.files

    def xFullPathname(self, name: str) -> str:
        return name

    def xRandomness(self, numbytes: int) -> bytes:
        return self._disk.rng.randbytes(numbytes)


def check_alive() -> None:
    """Raise if the process that makes this call was killed, so that the call has no effect."""
    process = PROCESS.get()
    if process is not None and process.dead:
        raise apsw.IOError("the process is dead")


def _kind(name: str) -> str:
    for kind in ("wal", "journal"):
        if name.endswith(f"-{kind}"):
            return kind
    return "database"
