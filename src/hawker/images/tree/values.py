"""What goes into unpacking a layer and what comes out."""

from __future__ import annotations

import msgspec

from hawker.images.tree.refused import LayerRefused

__all__ = ["LayerRefused", "TreeLimits", "Unpacked"]

MIB = 1 << 20


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer may ask of a host. The defaults let every layer pass that people build on purpose.

    `bytes`: of the tar, padding and headers included, which bounds what is written (sparse files count whole).
    `ratio`: of the tar's bytes to the blob's, once the tar is longer than `ratio_from`; zeros compress 1,000 to 1.
    `entries`: of the tar, and directories that it only implies; `depth`: of directories; `header`: bytes of one
    entry's extended header. `xattrs`: of one entry, all their names and values in bytes. `lists`: of what `merge` is
    told, the bytes of each path and 64 more: they are kept in memory until then.
    `devices`: whether device nodes are made. They are no way in as long as nothing but root reaches the trees and
    containers' roots are mounted or limited so that nodes do not open (as umoci, runc and the kernel's cgroups assume).
    `cpu_s`, `memory`: of the process that unpacks; of a small blob it gets less time.
    `free`: bytes of the disk that must stay free for others: unpacking ends as on a full disk.
    """

    bytes: int = 64 << 30
    ratio: int = 200
    ratio_from: int = 256 * MIB
    entries: int = 1_000_000
    depth: int = 256
    header: int = MIB
    xattrs: int = 64 * 1024
    lists: int = 16 * MIB
    devices: bool = True
    cpu_s: int = 1800
    memory: int = 1 << 30
    free: int = 0


class Unpacked(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's tree as it stands by itself; `merge` needs the lists, and nobody after that.

    `bytes`: of file contents. `implied`: directories that the tar has no entry for, "" for the root. `removed`: names
    that the layer takes away from those below. `opaque`: directories that hide everything below them. `left_out`: what
    could not be made as it should, a line each, at most 100 of them. `collapsed`: all files belong to one user, as
    this user has no others to give them to (/etc/subuid and newuidmap are missing).
    """

    diff_id: str
    entries: int
    bytes: int
    implied: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    collapsed: bool = False
