"""Layers unpacked, merged on those below and removed, each by a process of its own that can do little else.

A layer's way: `unpack` gives its tree by itself; layers of an image may be unpacked side by side. `merge` then joins a
tree with those below it, from the lowest layer up. Only then is it what overlayfs needs:

    unpacked = await unpack(blob, layer.media_type, layer.diff_id, staging, limits=TreeLimits())
    await merge(staging, unpacked, lowers)  # the merged trees below, topmost first
    staging.rename(final)

A merged tree depends on those below, so it belongs to the chain of layers and not to the one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from hawker.errors import DiskFull
from hawker.images.singleflight import to_its_end
from hawker.images.tree import merging, streams
from hawker.images.tree.values import LayerRefused, TreeLimits, Unpacked

__all__ = ["LayerRefused", "TreeLimits", "Unpacked", "merge", "remove", "sweep", "unpack"]

UNFINISHED = ".unfinished-"
_PACKAGES = str(Path(__file__).parents[3])
_numbers = count()
CPU_S_LEAST, CPU_BYTES_PER_S = 120, 1_000_000
"""The processor time that unpacking one blob may take: at least so many seconds, or one for so many bytes."""
SETTLE_CPU_S = 300
SETTLE_HERE = 20_000
"""Paths times trees: with more to look for, it is work for a process of its own, which can be stopped."""


async def unpack(blob: Path, media_type: str, diff_id: str, into: Path, *, limits: TreeLimits) -> Unpacked:
    """Make the tree of a layer at `into`, which must not exist. It appears there whole and on disk, or not at all.

    The directory of `into` must be closed to other users (mode 0700): trees hold setuid programs and device nodes.
    `media_type`: any of a layer that is a tar; how it is compressed is told by its first bytes. A kill leaves at most
    a directory that `sweep` knows. Cancelling ends the process and removes what it made.

    Raises `LayerRefused`, and `errors.DiskFull` when there is no room.
    """
    if "encrypted" in media_type or "tar" not in media_type:
        raise LayerRefused(f"its media type is {media_type}, which is no tar that can be read here")
    made = into.parent / f"{UNFINISHED}{os.getpid()}-{next(_numbers)}"
    made.mkdir(mode=0o755)
    try:
        with blob.open("rb", 0) as opened:
            cpu_s = min(limits.cpu_s, CPU_S_LEAST + os.fstat(opened.fileno()).st_size // CPU_BYTES_PER_S)
            request = {
                "do": "unpack",
                "into": _absolute(made),
                "diff_id": diff_id,
                "limits": {**msgspec.to_builtins(limits), "cpu_s": cpu_s},
            }
            done = await _ask({**request, "zstd": _may_be_zstd(opened.fileno())}, opened.fileno())
        await to_its_end(asyncio.to_thread(_put_in_place, made, into))
    except BaseException:
        await asyncio.shield(remove(made))
        raise
    return msgspec.convert(done, Unpacked)


async def merge(tree: Path, unpacked: Unpacked, lowers: Sequence[Path]) -> None:
    """Join a tree with the merged ones below it, the topmost first, so that overlayfs of all shows what unpacking
    them over one another would give: whiteouts and opaque marks where there is something to hide, directories the
    layer only implied with the mode, owner, times and attributes they have below, and what it put below a link of a
    lower layer where that link leads. May be repeated. Raises `LayerRefused` when layers do not go together."""
    lists = {name: getattr(unpacked, name) for name in ("implied", "removed", "opaque")}
    is_root = os.geteuid() == 0
    if is_root and sum(map(len, lists.values())) * (len(lowers) + 1) <= SETTLE_HERE:
        await asyncio.to_thread(
            merging.merge,
            os.fsencode(tree),
            [os.fsencode(lower) for lower in lowers],
            **{name: [os.fsencode(path) for path in paths] for name, paths in lists.items()},
            namespace=b"trusted.",
        )
        return
    request = {
        "do": "merge",
        "tree": _absolute(tree),
        "lowers": [_absolute(lower) for lower in lowers],
        "namespace": "trusted." if is_root else "user.",
        "cpu_s": SETTLE_CPU_S,
    }
    await _ask(request, None, json.dumps(lists).encode())


async def remove(tree: Path) -> None:
    """Remove a tree, whoever its files belong to. What is not there is removed."""
    if os.geteuid() == 0:
        await asyncio.to_thread(merging.remove, str(tree))
    else:
        await _ask({"do": "remove", "tree": _absolute(tree)}, None)


async def sweep(directory: Path) -> None:
    """Remove what killed processes left unfinished in a directory. To be called while nothing is unpacked there."""
    for name in sorted(os.listdir(directory)):
        if name.startswith(UNFINISHED):
            await remove(directory / name)


async def _ask(request: dict[str, Any], blob: int | None, more: bytes = b"") -> Any:
    """Have a child do it. Nothing of it runs any more when this returns or raises."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-m", "hawker.images.tree.child", json.dumps({**request, "parent": os.getpid()})),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([_PACKAGES, *sys.path]),
        },  # `-S`: looking for packages takes its time
        stdin=asyncio.subprocess.PIPE if blob is None else blob,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        answer, complaint = await process.communicate(more if blob is None else None)
    except BaseException:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.communicate())  # the end of its output: its own children have ended, too
        raise
    if not answer:
        raise LayerRefused(_ended(process.returncode or 0, complaint))
    told = json.loads(answer)
    if "refused" in told:
        raise LayerRefused(told["refused"])
    if "failed" in told:
        if told["errno"] in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("there is no room to unpack a layer")
        raise OSError(told["errno"], told["failed"])
    return told["done"]


def _ended(code: int, complaint: bytes) -> str:
    number = -code if code < 0 else 256 - code
    if 0 < number < signal.NSIG:
        return f"the process that unpacked it was ended by {signal.Signals(number).name}: too much time or memory"
    lines = complaint.decode(errors="replace").strip().splitlines()
    return f"the process that unpacked it ended with status {code}: {lines[-1] if lines else 'it says nothing'}"


def _put_in_place(made: Path, into: Path) -> None:
    if os.path.lexists(into):
        raise FileExistsError(errno.EEXIST, "there is a tree already", str(into))
    made.rename(into)
    fd = os.open(into.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _may_be_zstd(blob: int) -> bool:
    """Known before it starts, the process can spare itself the reading of a library."""
    try:
        return not os.pread(blob, 2, 0).startswith(streams.GZIP)
    except OSError:
        return True  # no file that can be read twice


def _absolute(path: Path) -> str:
    return os.path.abspath(path)
