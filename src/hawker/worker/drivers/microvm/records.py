"""What the driver keeps of each machine on disk, so that the next daemon finds the machine again.

`<directory>/vms/<key>/` holds `record`, the machine's disk, its hypervisor's sockets, and of a suspended machine its
`state`, with Firecracker its `memory`, too. A record is written under another name and then renamed. A machine without
a hypervisor that is not suspended is gone: its host was rebooted, or its start was cut off.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hawker.network.base import Wanted
from hawker.worker.drivers.base import Exit, Limits, Stats
from hawker.worker.drivers.microvm.qemu import Vm

RECORD, STATE, MEMORY, DISK = "record", "state", "memory", "disk"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`vm` is what its hypervisor is started with. `suspended` has what it had used when its state was written: from
    then on it is in the file `state` and nowhere else. `exit` is set where no supervisor knows of its end."""

    key: str
    machine: str
    image: str
    vm: Vm
    limits: Limits
    wanted: Wanted | None = None
    started_at_ms: int = 0
    suspended: Stats | None = None
    exit: Exit | None = None
    note: Mapping[str, Any] = {}


class Records:
    def __init__(self, directory: Path) -> None:
        self._vms = directory / "vms"
        self._roots = directory / "roots"

    def open(self) -> list[Record]:
        self._vms.mkdir(parents=True, exist_ok=True)
        self._roots.mkdir(exist_ok=True)
        return list(self._read())

    def _read(self) -> Iterator[Record]:
        for path in sorted(self._vms.iterdir()):
            try:
                yield msgspec.json.decode((path / RECORD).read_bytes(), type=Record)
            except (FileNotFoundError, msgspec.DecodeError):
                shutil.rmtree(path, ignore_errors=True)  # a start that was cut off

    def directory(self, key: str) -> Path:
        return self._vms / key.replace("/", ".")

    def write(self, record: Record) -> None:
        """Whole, or not at all: raises OSError. That a machine is suspended outlives a power cut, as its state does."""
        path = self.directory(record.key)
        path.mkdir(mode=0o700, exist_ok=True)
        making = path / f"{RECORD}.new"
        left = msgspec.json.encode(record)
        fd = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[os.write(fd, left) :]
            if record.suspended:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(making, path / RECORD)
        if record.suspended:
            _sync_directory(path)

    def remove(self, key: str) -> None:
        """The record goes first: what is left of a removal that is cut off is removed at the next start."""
        path = self.directory(key)
        (path / RECORD).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def root(self, machine: str, image: str) -> Path:
        """The disk of a machine that keeps it from one start to the next. It fits one image only."""
        path = self._roots / f"{machine}-{image[-16:]}"
        for other in self._roots.glob(f"{machine}-*"):
            if other != path:
                other.unlink()
        return path

    def has_root(self, machine: str) -> bool:
        return any(self._roots.glob(f"{machine}-*"))

    def purge(self, machine: str) -> None:
        for name in os.listdir(self._roots):  # every machine that goes is asked about, and most are no microVMs
            if name.startswith(f"{machine}-"):
                (self._roots / name).unlink()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # what it holds counts already
            os.fsync(fd)
    finally:
        os.close(fd)
