"""Which of the host's users are a machine's: 65,536 each, no two machines of a worker the same.

They are noted in a file before anything is made that belongs to them, and a machine keeps them until it is destroyed.
They are given to another only once no file of the machine is left, which may be a while later, as many files take their
time to be removed.

Where /etc/subuid and /etc/subgid give root ids (subuid(5)), machines have those. Otherwise they have ids beyond those
that systems give out, except what these files give to others: 30,000 times as many as a machine has. Two workers of one
host do not know of each other: each begins at a place of its own, so that they hardly meet where there are many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from hawker.errors import Unreachable

COUNT: Final = 65536  # of each machine
FIRST: Final = 1 << 20
MANY: Final = 30_000  # machines, where the system says nothing
SUBORDINATE: Final = (Path("/etc/subuid"), Path("/etc/subgid"))


class NoUsers(Exception):
    """All are taken; the text says what to do."""


class _Noted(msgspec.Struct, frozen=True):
    """Each machine's first user. `gone` are destroyed, and may have files left."""

    machines: dict[str, int]
    gone: dict[str, int] = {}


class Users:
    """The users of one worker's machines, noted in the file `path`. Only root can have them."""

    def __init__(self, path: Path, subordinate: Collection[Path] = SUBORDINATE) -> None:
        self._path = path
        self._subordinate = subordinate
        self._noted: _Noted | None = None
        self._holders: list[Callable[[str], bool]] = []

    def hold(self, holds: Callable[[str], bool]) -> None:
        """`holds` says whether files of a machine may be left somewhere."""
        self._holders.append(holds)

    def of(self, machine: str) -> int:
        """The first of the machine's users; the first of its groups has the same number. Raises `NoUsers`, OSError,
        `Unreachable`."""
        noted = self._read()
        if machine in noted.machines:
            return noted.machines[machine]
        first = noted.gone.get(machine) or self._free(noted)
        self._note(machine, first)
        return first

    def keep(self, firsts: Mapping[str, int]) -> None:
        """Machines that were made before users were noted have those that they were made with. Those that are noted
        are passed over. Raises OSError, `Unreachable`."""
        noted = self._read()
        new = {machine: n for machine, n in firsts.items() if machine not in noted.machines | noted.gone}
        if new:
            self._write(_Noted(noted.machines | new, noted.gone))

    def release(self, machine: str) -> None:
        """The machine is destroyed. Unknown machine: success. Raises OSError, `Unreachable`."""
        noted = self._read()
        if machine not in noted.machines:
            return
        gone = {**noted.gone, machine: noted.machines[machine]}
        kept = {name: first for name, first in gone.items() if self._held(name)}
        self._write(_Noted({name: n for name, n in noted.machines.items() if name != machine}, kept))

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _free(self, noted: _Noted) -> int:
        taken = {*noted.machines.values(), *(first for name, first in noted.gone.items() if self._held(name))}
        given = self._given()
        odd = [first for first in taken if (first - FIRST) % COUNT] if given is None else list(taken)
        for first in self._usual() if given is None else self._turned(given):
            if first not in taken and not any(abs(first - other) < COUNT for other in odd):
                return first
        if given is None:
            raise NoUsers(f"all {MANY} ranges of users for machines are taken: destroy machines")
        files = " and ".join(map(str, self._subordinate))
        raise NoUsers(
            f"{files} give root users for {len(given)} machines, which are taken: each takes {COUNT}; give root more, "
            "or destroy machines"
        )

    def _given(self) -> list[int] | None:
        """Where the ranges begin that the system gives root, None where it says nothing of root."""
        of_root = [[entry[1:] for entry in entries if entry[0] in ("root", "0")] for entries in self._entries()]
        if not any(of_root):
            return None
        both = of_root[0]
        for more in of_root[1:]:  # users and groups have the same numbers
            both = [
                (max(a, b), min(a + n, b + m) - max(a, b)) for a, n in both for b, m in more if a < b + m and b < a + n
            ]
        return [first for start, count in both for first in range(start, start + count - COUNT + 1, COUNT)]

    def _turned(self, these: Sequence[int]) -> Iterator[int]:
        """Begun at a place that is this worker's own."""
        digest = blake2b(os.fsencode(self._path.absolute()), digest_size=8).digest()
        begin = int.from_bytes(digest, "big") % max(1, len(these))
        return chain(these[begin:], these[:begin])

    def _usual(self) -> Iterator[int]:
        others = [entry[1:] for entries in self._entries() for entry in entries]
        for number in self._turned(range(MANY)):
            first = FIRST + (1 + number) * COUNT  # the one before is for trying out runtimes
            if not any(first < start + count and start < first + COUNT for start, count in others):
                yield first

    def _entries(self) -> list[list[tuple[str, int, int]]]:
        return [_entries(path) for path in self._subordinate]

    def _held(self, machine: str) -> bool:
        return any(holds(machine) for holds in self._holders)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _note(self, machine: str, first: int) -> None:
        noted = self._read()
        gone = {name: other for name, other in noted.gone.items() if other != first}  # its files are gone as well
        self._write(_Noted({**noted.machines, machine: first}, gone))

    def _read(self) -> _Noted:
        if self._noted is None:
            try:
                self._noted = msgspec.json.decode(self._path.read_bytes(), type=_Noted)
            except FileNotFoundError:
                self._noted = _Noted({})
            except msgspec.DecodeError as error:
                why = f"{self._path} cannot be read, which says what users machines have: {error}"
                raise Unreachable(why) from error
        return self._noted

    def _write(self, noted: _Noted) -> None:
        """Whole, and on the disk before anything belongs to these users."""
        self._path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        making = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(noted))
            file.flush()
            os.fsync(fd)
        os.rename(making, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._noted = noted


def _entries(path: Path) -> list[tuple[str, int, int]]:
    """Name, first and count of each line, subuid(5). A line that says nothing of the kind is passed over."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    parts = [line.strip().split(":") for line in lines]
    numbers = [part for part in parts if len(part) == 3 and part[1].isdecimal() and part[2].isdecimal()]
    return [(name, int(first), int(count)) for name, first, count in numbers]
