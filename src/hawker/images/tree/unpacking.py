"""Layers unpacked, settled on those below and removed, each by a process of its own that can do little else.

A layer's way: `unpack` gives its tree by itself; layers of an image may be unpacked side by side. `settle` then joins a
tree with those below it, from the lowest layer up. Only then is it what overlayfs needs:

    unpacked = await unpack(blob, layer.media_type, layer.diff_id, staging, limits=TreeLimits())
    await settle(staging, unpacked, lowers)  # the settled trees below, topmost first
    staging.rename(final)

A settled tree depends on those below, so it belongs to the chain of layers and not to the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hawker.images.tree.values import LayerRefused, TreeLimits, Unpacked

__all__ = ["LayerRefused", "TreeLimits", "Unpacked", "remove", "settle", "sweep", "unpack"]


async def unpack(blob: Path, media_type: str, diff_id: str, into: Path, *, limits: TreeLimits) -> Unpacked:
    """Make the tree of a layer at `into`, which must not exist. It appears there whole and on disk, or not at all.

    The directory of `into` must be closed to other users (mode 0700): trees hold setuid programs and device nodes.
    `media_type` tells the compression: `...tar`, `...tar+gzip`, `...tar+zstd`, or Docker's `...tar.gzip`. A kill
    leaves at most a directory that `sweep` knows. Cancelling ends the process and removes what it made.

    Raises `LayerRefused`, and `errors.DiskFull` when there is no room.
    """
    raise NotImplementedError


async def settle(tree: Path, unpacked: Unpacked, lowers: Sequence[Path]) -> None:
    """Join a tree with the settled ones below it, the topmost first, so that overlayfs of all shows what unpacking
    them over one another would give: whiteouts and opaque marks where there is something to hide, and directories the
    layer only implied with the mode, owner, times and attributes they have below. May be repeated."""
    raise NotImplementedError


async def remove(tree: Path) -> None:
    """Remove a tree, whoever its files belong to. What is not there is removed."""
    raise NotImplementedError


async def sweep(directory: Path) -> None:
    """Remove what killed processes left unfinished in a directory. To be called while nothing is unpacked there."""
    raise NotImplementedError
