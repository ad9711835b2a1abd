"""The unpacked trees of layers, each on top of those below it: named by chain id.

`trees/<hex>` is there when it is whole; `unpacking/` is emptied at every start. `trees/<hex>.json` tells what unpacking
it found; without that its size counts as 0.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec

from hawker.images.blobs import sync_directory, translated, write_durably
from hawker.images.singleflight import to_its_end
from hawker.images.tree.unpacking import merge, remove, sweep, unpack
from hawker.images.tree.values import TreeLimits, Unpacked
from hawker.model.image import Layer

_HEX = 64
_DYING_S = 5.0


class _About(msgspec.Struct):
    bytes: int = 0
    left_out: tuple[str, ...] = ()
    collapsed: bool = False


class LayerTrees:
    """The trees of one host. One process at a time. Open with `open`."""

    def __init__(self, directory: Path) -> None:
        self._trees = directory / "trees"
        self._unpacking = directory / "unpacking"
        self._sizes: dict[str, int] = {}
        self._numbers = count()

    async def open(self) -> None:
        """Remove what a killed process left, and see what is there."""
        try:
            for each in (self._trees, self._unpacking):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._sweep()
            for each in list(self._trees.iterdir()):
                if len(each.name) == _HEX:
                    self._sizes[f"sha256:{each.name}"] = _about(each.with_name(each.name + ".json")).bytes
            for each in list(self._trees.iterdir()):
                if len(each.name) != _HEX and f"sha256:{each.name.partition('.')[0]}" not in self._sizes:
                    each.unlink()
        except OSError as error:
            raise translated(error, self._trees) from error

    async def _sweep(self) -> None:
        """A process that was unpacking dies with the one that was killed, but not in the same instant."""
        deadline = asyncio.get_running_loop().time() + _DYING_S
        while True:
            try:
                await sweep(self._unpacking)
                for each in list(self._unpacking.iterdir()):
                    await remove(each)
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.02)

    def path(self, chain_id: str) -> Path:
        return self._trees / chain_id.removeprefix("sha256:")

    def __contains__(self, chain_id: str) -> bool:
        return chain_id in self._sizes

    def all(self) -> dict[str, int]:
        """Bytes of file contents by chain id."""
        return dict(self._sizes)

    def changed_s(self, chain_id: str) -> float:
        """The time when it was unpacked, in Unix seconds."""
        try:
            return self.path(chain_id).with_name(self.path(chain_id).name + ".json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    async def unpack(self, layer: Layer, blob: Path, limits: TreeLimits) -> tuple[Path, Unpacked]:
        """A layer's tree by itself; the caller gives it to `add` or `discard`s it. Raises `LayerRefused`, `DiskFull`,
        `StoreError`."""
        into = self._unpacking / f"{layer.diff_id.removeprefix('sha256:')}.{next(self._numbers)}"
        try:
            return into, await unpack(blob, layer.media_type, layer.diff_id, into, limits=limits)
        except OSError as error:
            raise translated(error, into) from error
        except BaseException:
            await self.discard(into)  # a cancel may come as it is put in its place
            raise

    async def discard(self, tree: Path) -> None:
        await asyncio.shield(remove(tree))

    async def add(self, chain_id: str, tree: Path, unpacked: Unpacked, lowers: Sequence[str]) -> None:
        """Join a tree with those below it, the topmost first, and keep it. Raises `LayerRefused`, `StoreError`."""
        await to_its_end(self._add(chain_id, tree, unpacked, lowers))

    async def _add(self, chain_id: str, tree: Path, unpacked: Unpacked, lowers: Sequence[str]) -> None:
        final = self.path(chain_id)
        about = _About(unpacked.bytes, unpacked.left_out, unpacked.collapsed)
        try:
            await merge(tree, unpacked, [self.path(lower) for lower in lowers])
            await asyncio.to_thread(write_durably, final.with_name(final.name + ".json"), msgspec.json.encode(about))
            os.rename(tree, final)
            self._sizes[chain_id] = unpacked.bytes
            await asyncio.to_thread(sync_directory, self._trees)
        except OSError as error:
            raise translated(error, final) from error

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A directory of the same file system for making something; a kill leaves it until the next start."""
        path = self._unpacking / f"scratch.{next(self._numbers)}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise translated(error, path) from error
        try:
            yield path
        finally:
            await asyncio.shield(remove(path))

    async def remove(self, chain_id: str) -> None:
        """It is out of sight at once; then it is removed."""
        if self._sizes.pop(chain_id, None) is None:
            return
        path = self.path(chain_id)
        going = self._unpacking / f"{path.name}.gone.{next(self._numbers)}"
        path.rename(going)
        path.with_name(path.name + ".json").unlink(missing_ok=True)
        await asyncio.shield(remove(going))


def _about(path: Path) -> _About:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_About)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _About()
