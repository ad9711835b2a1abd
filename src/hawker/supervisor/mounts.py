"""File systems of machines: overlays, bind mounts and file systems in memory, in a mount namespace of our own.

What is mounted here is seen by this process and its children only, and ends with the last of them: nothing has to be
unmounted after a crash. Errors are OSErrors whose text says what was to be mounted where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class IdMap:
    """Users and groups of a machine: id `n` inside is `base + n` on the host, for `count` ids."""

    base: int
    count: int = 65536

    def outside(self, number: int) -> int:
        """The host's id. Raises ValueError for one that the machine does not have."""
        if not 0 <= number < self.count:
            raise ValueError(f"id {number}: this machine has ids up to {self.count - 1}")
        return self.base + number


def private_namespace() -> None:
    """From now on this process and its children have mounts of their own. Mounts that the host makes later are still
    seen here (propagation "slave"), ours are not seen there. On a host with both versions of cgroups, version 2's tree
    is unmounted here, because crun refuses to work beside it. Needs root (CAP_SYS_ADMIN); one thread only."""
    raise NotImplementedError


def user_namespace(ids: IdMap) -> int:
    """A descriptor (closed on exec) of a new user namespace with this map, for idmapped mounts."""
    raise NotImplementedError


def mount_overlay(
    lowers: Sequence[str],
    upper: str,
    work: str,
    target: str,
    *,
    ids: IdMap | None = None,
    read_only: bool = False,
) -> None:
    """Mount an overlay of `lowers` (topmost first) with what is written kept in `upper`; `work` is an empty directory
    on the same file system. `upper` and `work` are made where they are missing. With `ids` the files of the layers
    show up as owned by the machine's ids, without a change to them. nodev."""
    raise NotImplementedError


def bind(source: str, target: str, *, read_only: bool = False, ids: IdMap | None = None) -> None:
    """Show the directory or file `source` (and what is mounted below it, unless `ids` is given) at `target`. With `ids`
    its owner 0 is the machine's root, and what the machine writes is owned so on the host. nodev, nosuid."""
    raise NotImplementedError


def mount_tmpfs(target: str, *, size_bytes: int, mode: int = 0o755, ids: IdMap | None = None) -> None:
    """A file system in memory. It counts towards the group of the process that writes. nodev, nosuid."""
    raise NotImplementedError


def unmount(target: str) -> None:
    """Take off what is mounted at `target` and below, once nobody uses it any more. Nothing mounted there: success."""
    raise NotImplementedError
