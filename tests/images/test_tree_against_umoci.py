"""The unpacked and overlaid layers of an image are, file by file, what `umoci unpack` makes of the same image."""

from __future__ import annotations

import asyncio
import shutil
import struct
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from tests.kit.oci import (
    Entry,
    block_device,
    character_device,
    directory,
    fifo,
    file,
    hardlink,
    image,
    layer,
    opaque,
    symlink,
    whiteout,
    write_layout,
)
from tests.kit.tiers import costly, full
from tests.kit.trees import by_umoci, overlaid, picture

from hawker.images.tree.merging import UNCLEAR
from hawker.images.tree.unpacking import LayerRefused, TreeLimits, merge, unpack

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("umoci") is None, reason="needs umoci"),
]
NET_RAW = struct.pack("<5I", 0x0200_0001, 1 << 13, 0, 0, 0)
"""`security.capability` of revision 2 with cap_net_raw, effective (linux/capability.h)."""


async def overlay_of(layers: Sequence[Sequence[Entry]], work: Path, compression: str = "gzip") -> dict[str, Any]:
    trees: list[Path] = []
    for number, entries in enumerate(layers):
        made = layer(entries, compression)
        blob = work / f"blob{number}"
        blob.write_bytes(made.blob)
        tree = work / f"l{number}"
        unpacked = await unpack(blob, made.media_type, made.diff_id, tree, limits=TreeLimits())
        await merge(tree, unpacked, trees)
        await merge(tree, unpacked, trees)  # a second time changes nothing
        trees.insert(0, tree)
    return overlaid(trees)


def flat_of(layers: Sequence[Sequence[Entry]], work: Path, compression: str = "gzip") -> tuple[dict[str, Any], str]:
    write_layout(work / "layout", {"t": image([layer(entries, compression) for entries in layers])})
    rootfs, complaint = by_umoci(work / "layout", "t", work / "bundle")
    return ({}, complaint) if rootfs is None else (picture(rootfs), "")


def assert_same(ours: dict[str, Any], umocis: dict[str, Any], began_ns: int) -> None:
    """But for the time of directories: umoci forgets that of the root, and of those where it makes one that the layer
    has no entry for."""
    for path in ours.keys() & umocis.keys():
        if umocis[path]["mtime_ns"] >= began_ns and "links" not in ours[path]:
            umocis[path]["mtime_ns"] = ours[path]["mtime_ns"]
    every = ours | umocis
    assert not {path: (ours.get(path), umocis.get(path)) for path in every if ours.get(path) != umocis.get(path)}


async def check(layers: Sequence[Sequence[Entry]], work: Path, compression: str = "gzip") -> dict[str, Any]:
    began_ns = time.time_ns() - 10**9
    umocis, complaint = flat_of(layers, work, compression)
    assert not complaint
    ours = await overlay_of(layers, work, compression)
    assert_same(ours, umocis, began_ns)
    return ours


EVERYTHING = [
    directory("", 0o711, mtime=5),
    directory("bin", 0o755, mtime=1_500_000_000),
    file("bin/su", b"setuid", 0o4755),
    file("bin/wall", b"setgid", 0o2755, gid=5),
    file("bin/ping", b"capable", 0o755, xattrs={"security.capability": NET_RAW}),
    directory("tmp", 0o1777),
    directory("closed", 0o000, uid=7, gid=8),
    file("closed/inside", b"x", 0o000, uid=70_000, gid=80_000),
    file("empty"),
    file("big", bytes(range(256)) * 5000),
    file("grüße/ ein\tname\nmit\\allem", "ü".encode()),
    file("user", b"", xattrs={"user.mime": b"a\0b\n=c"}),
    directory("marked", xattrs={"user.dir": b"1"}),
    symlink("absolute", "/etc/passwd"),
    symlink("relative", "../../../etc/passwd", uid=3),
    symlink("dangling", "nowhere"),
    hardlink("bin/ping2", "bin/ping"),
    hardlink("dangling2", "dangling"),
    fifo("pipe", 0o640),
    character_device("null", 1, 3),
    block_device("disk", 8, 1, uid=6),
    file("a" * 150 + "/" + "b" * 200, b"long"),
    file("old", b"1", mtime=-100),
]


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
async def test_every_kind_of_file_comes_out_as_umoci_makes_it(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":  # umoci 0.4 cannot read it: what it makes of the same tar is the measure
        began_ns = time.time_ns() - 10**9
        umocis, _ = flat_of([EVERYTHING], tmp_path)
        assert_same(await overlay_of([EVERYTHING], tmp_path, "zstd"), umocis, began_ns)
        return
    seen = await check([EVERYTHING], tmp_path, compression)
    assert seen["bin/su"]["mode"] == "0o104755"
    assert seen["bin/ping"]["xattrs"] == {"security.capability": NET_RAW.hex()}
    assert seen["bin/ping"]["links"] == ["bin/ping", "bin/ping2"]
    assert seen["closed/inside"]["owner"] == "70000:80000"


BASE = [
    directory("", 0o750, uid=9),
    directory("etc", 0o750, uid=1, gid=2, mtime=1_111, xattrs={"user.kept": b"yes"}),
    file("etc/passwd", b"root"),
    file("etc/group", b"root"),
    directory("opt", 0o700),
    directory("opt/app", 0o711, uid=4),
    file("opt/app/one", b"1"),
    file("opt/app/two", b"2"),
    directory("usr"),
    directory("usr/lib", mtime=77),
    file("usr/lib/libc", b"c"),
    symlink("lib", "usr/lib"),
    file("file", b"below"),
]
ABOVE: dict[str, list[Entry]] = {
    "a whiteout": [whiteout("etc/group")],
    "a whiteout of a directory": [whiteout("opt/app")],
    "a whiteout of what is not there": [whiteout("etc/absent"), whiteout("nowhere/at/all")],
    "an opaque directory": [directory("opt/app", 0o700), opaque("opt/app"), file("opt/app/three", b"3")],
    "an opaque directory that is only implied": [opaque("opt/app"), file("opt/app/three", b"3")],
    "an opaque directory with nothing in it": [opaque("opt/app")],
    "an opaque mark after what the layer adds": [file("opt/app/three", b"3"), opaque("opt/app")],
    "an opaque directory of a directory that is not there": [opaque("nowhere")],
    "an opaque root": [opaque(""), file("new", b"")],
    "an opaque root that keeps a directory": [opaque(""), file("opt/new", b"")],
    "implied directories": [file("etc/hosts", b"h"), file("opt/app/deep/down/here", b"x")],
    "a whiteout and the same name again, a file": [whiteout("file"), file("file", b"above")],
    "a whiteout after the file of the same layer": [file("file", b"above"), whiteout("file")],
    "a whiteout and the same name again, a directory": [whiteout("opt/app"), directory("opt/app"), file("opt/app/n")],
    "a whiteout and the same name again, implied": [whiteout("opt/app"), file("opt/app/new", b"n")],
    "a whiteout after what is in the directory": [file("opt/app/new", b"n"), whiteout("opt/app")],
    "a file in the place of a directory": [file("opt", b"a file now")],
    "a link in the place of a directory": [symlink("opt", "etc")],
    "a directory in the place of a file": [directory("file", 0o700), file("file/inside", b"i")],
    "a directory in the place of a link": [directory("lib"), file("lib/own", b"own")],
    "a file and then a directory of one name": [file("opt", b"1"), directory("opt", 0o701), file("opt/x", b"2")],
    "a directory and then a file of one name": [directory("new"), file("new/in", b"1"), file("new", b"2")],
    "a file twice": [file("etc/passwd", b"first", 0o600), file("etc/passwd", b"second", 0o644)],
    "other modes for a directory": [directory("etc", 0o700, uid=5, mtime=9)],
    "a file below a link": [file("lib/libm", b"m")],
    "a whiteout below a link": [whiteout("lib/libc")],
    "an opaque directory below a link": [opaque("lib"), file("lib/other", b"")],
    "a file below a link and where it leads": [file("usr/lib/libz", b"z"), file("lib/libm", b"m")],
    "names that look like whiteouts": [file("etc/wh.passwd", b""), file("etc/.whpasswd", b"")],
    "nothing": [],
}


@pytest.mark.parametrize("what", [*list(ABOVE)[::3], *full(*(what for n, what in enumerate(ABOVE) if n % 3))])
async def test_a_layer_above_another_is_what_umoci_makes_of_both(tmp_path: Path, what: str) -> None:
    await check([BASE, ABOVE[what]], tmp_path)


@pytest.mark.slow
async def test_many_layers_that_undo_each_other_are_what_umoci_makes_of_them(tmp_path: Path) -> None:
    await check([BASE] + [each for entries in list(ABOVE.values())[::3] for each in (entries, BASE)], tmp_path)


NAMES = st.sampled_from(["a", "b", "c", "ü"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@st.composite
def some_layer(draw: st.DrawFn) -> list[Entry]:
    """Entries in any order, but what this layer itself has made a file is not used as a directory."""
    made: dict[str, str] = {}
    chosen: list[Entry] = []
    for _ in range(draw(st.integers(0, 8))):
        path = draw(PATHS)
        parts = path.split("/")
        if any(made.get("/".join(parts[:count])) == "file" for count in range(1, len(parts))):
            continue
        kind = draw(
            st.sampled_from(["file", "file", "dir", "dir", "symlink", "hardlink", "fifo", "whiteout", "opaque"])
        )
        owner: dict[str, Any] = {"uid": draw(st.integers(0, 3)), "mtime": draw(st.integers(1, 99))}
        files = sorted(name for name, what in made.items() if what == "file" and name != path)
        match kind:
            case "whiteout":
                chosen.append(whiteout(path))
                continue
            case "opaque":
                if made.get(path) != "file":
                    chosen.append(opaque(draw(st.sampled_from([path, path, path, ""]))))
                continue
            case "dir":
                chosen.append(directory(path, draw(st.sampled_from([0o755, 0o700, 0o1777])), **owner))
            case "symlink":
                chosen.append(symlink(path, draw(st.sampled_from(["a", "/b", "../c", "a/b", "nowhere"])), **owner))
            case "hardlink" if files:
                target = draw(st.sampled_from(files))
                if target.startswith(path + "/"):
                    continue
                chosen.append(hardlink(path, target))
            case "fifo":
                chosen.append(fifo(path, **owner))
            case _:
                chosen.append(file(path, draw(st.binary(max_size=3)), draw(st.sampled_from([0o644, 0o4755])), **owner))
        for name in [name for name in made if kind != "dir" and name.startswith(path + "/")]:
            del made[name]
        for count in range(1, len(parts)):
            made["/".join(parts[:count])] = "dir"
        made[path] = "dir" if kind == "dir" else "file"
    return chosen


def goes_by_order(layers: list[list[Entry]]) -> bool:
    """Whether a layer goes through a link of those below, and then says of the link that it is a directory or gone. For
    umoci that is a file behind the link and then nothing of it in its place; for us the two are one directory."""
    for number, entries in enumerate(layers):
        links = {entry.name for below in layers[:number] for entry in below if entry.kind == tarfile.SYMTYPE}
        for at, entry in enumerate(entries):
            for link in links:
                if entry.name.startswith(link + "/") and any(_says(later.name, link) for later in entries[at + 1 :]):
                    return True
    return False


def _says(name: str, link: str) -> bool:
    parent, _, base = name.rpartition("/")
    if base == ".wh..wh..opq":
        return not parent or f"{link}/".startswith(f"{parent}/")
    meant = "/".join(part for part in (parent, base.removeprefix(".wh.")) if part)
    return f"{link}/".startswith(f"{meant}/")


@pytest.mark.slow
@settings(max_examples=costly(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(layers=st.lists(some_layer(), min_size=1, max_size=4))
def test_any_image_is_what_umoci_makes_of_it(layers: list[list[Entry]]) -> None:
    assume(not goes_by_order(layers))
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        began_ns = time.time_ns() - 10**9
        umocis, complaint = flat_of(layers, work)
        ours: dict[str, Any] = {}
        refused = ""
        try:
            ours = asyncio.run(overlay_of(layers, work))
        except LayerRefused as error:
            refused = error.reason
        event(f"{'refused' if refused else 'unpacked'}; umoci {'fails' if complaint else 'unpacks'}")
        if refused:
            assert complaint or UNCLEAR in refused, refused
        elif not complaint:
            assert_same(ours, umocis, began_ns)
