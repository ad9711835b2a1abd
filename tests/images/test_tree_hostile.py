"""Layers made to do harm: each is refused with a sentence that names the entry, and leaves nothing anywhere."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import zstandard
from tests.kit.oci import (
    Entry,
    block_device,
    character_device,
    directory,
    file,
    hardlink,
    opaque,
    symlink,
    tar_of,
    whiteout,
)
from tests.kit.tiers import full
from tests.kit.trees import picture

from hawker.images.tree.unpacking import LayerRefused, TreeLimits, merge, unpack

pytestmark = pytest.mark.root
END = bytes(1024)
SMALL = TreeLimits(bytes=4 << 20, ratio=20, ratio_from=1 << 20, entries=100, depth=20, header=8192, xattrs=1000)


def raw(name: bytes, kind: bytes = b"0", size: bytes = b"00000000000\0", link: bytes = b"", **fields: bytes) -> bytes:
    """One header with these very bytes in its fields, and a checksum that is right."""
    block = bytearray(512)
    for at, value in (
        (0, name),
        (100, fields.get("mode", b"0000644\0")),
        (108, fields.get("uid", b"0000000\0")),
        (116, fields.get("gid", b"0000000\0")),
        (124, size),
        (136, fields.get("mtime", b"00000000000\0")),
        (148, b" " * 8),
        (156, kind),
        (157, link),
        (257, b"ustar\x0000"),
        (329, fields.get("major", b"0000000\0")),
        (337, fields.get("minor", b"0000000\0")),
        (345, fields.get("prefix", b"")),
    ):
        block[at : at + len(value)] = value
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    body = b"".join(record(each) for each in records)
    return raw(b"pax", kind, b"%011o\0" % len(body)) + padded(body)


def record(body: bytes) -> bytes:
    length = len(body) + 3
    while len(b"%d %s\n" % (length, body)) != length:
        length += 1
    return b"%d %s\n" % (length, body)


def gnu(kind: bytes, data: bytes) -> bytes:
    return raw(b"././@LongLink", kind, b"%011o\0" % len(data)) + padded(data)


def several(*entries: Entry) -> bytes:
    return tar_of(entries)


def octal(number: int) -> bytes:
    return b"%011o\0" % number


HOSTILE: dict[str, tuple[bytes, str]] = {
    "climbs with dots": (several(file("../outside/canary", b"x")), "'../outside/canary' would leave the root"),
    "climbs with dots in the middle": (several(file("a/../../outside/canary", b"x")), "would leave the root"),
    "climbs from an absolute name": (several(file("/../outside/canary", b"x")), "would leave the root"),
    "climbs with a long name": (
        gnu(b"L", b"d/" * 80 + b"../" * 90 + b"outside/canary\0") + raw(b"d") + END,
        "would leave the root",
    ),
    "climbs with an extended name": (pax(b"path=../outside/canary") + raw(b"harmless") + END, "would leave the root"),
    "climbs with a prefix": (raw(b"canary", prefix=b"../outside") + END, "would leave the root"),
    "removes by a whiteout outside": (several(file("../outside/.wh.canary")), "would leave the root"),
    "removes the directory above": (several(file("a/.wh..")), "'a/.wh..' is no whiteout"),
    "removes the directory above the root": (several(file(".wh...")), "is no whiteout"),
    "is a hard link to a file outside": (several(hardlink("h", "../outside/canary")), "would leave the root"),
    "is a hard link to an absolute name": (
        several(hardlink("h", "/etc/passwd")),
        "'h' is a hard link to '/etc/passwd'",
    ),
    "is a hard link to a file of another layer": (several(hardlink("h", "lower")), "which its layer does not have"),
    "is a hard link to a directory": (several(directory("d"), hardlink("h", "d")), "which is a directory"),
    "is a hard link to itself": (several(file("f"), hardlink("f", "f")), "which its layer does not have"),
    "links to a file outside through a link": (
        several(symlink("l", "../outside"), hardlink("h", "l/canary")),
        "which its layer does not have",
    ),
    "writes through a link": (
        several(symlink("l", "../outside"), file("l/canary", b"x")),
        "'l/canary' would be written through 'l', which is a symbolic link",
    ),
    "writes through an absolute link": (several(symlink("l", "/"), file("l/x", b"x")), "written through 'l'"),
    "makes a directory through a link": (several(symlink("l", "../outside"), directory("l/d")), "written through 'l'"),
    "writes through a link to a link": (
        several(symlink("a", "b"), symlink("b", "../outside"), file("a/canary", b"x")),
        "written through 'a'",
    ),
    "writes through a hard link to a link": (
        several(symlink("a", "../outside"), hardlink("b", "a"), file("b/canary", b"x")),
        "written through 'b'",
    ),
    "removes through a link": (several(symlink("l", "../outside"), whiteout("l/canary")), "would go through 'l'"),
    "hides through a link": (several(symlink("l", "../outside"), opaque("l")), "would go through 'l'"),
    "writes below a file": (several(file("f"), file("f/g")), "which is no directory"),
    "makes a link of the root": (
        several(symlink("./", "/etc")),
        "would make something else than a directory of the root",
    ),
    "makes a file of the root": (several(file(".", b"x")), "would make something else than a directory of the root"),
    "has a device 0:0": (several(character_device("gone", 0, 0)), "'gone' is a device 0:0"),
    "has a device number beyond all": (raw(b"d", b"3", major=b"7777777\0") + END, "device number that no device has"),
    "has a null byte in a name": (pax(b"path=a\0b") + raw(b"x") + END, "null byte in its name"),
    "has a null byte in a link": (pax(b"linkpath=a\0b") + raw(b"x", b"2") + END, "symbolic link to nowhere"),
    "has a link to nothing": (raw(b"x", b"2") + END, "symbolic link to nowhere"),
    "has a name of 300 bytes": (several(file("n" * 300)), "is too long a name"),
    "has a path of 6,000 bytes": (gnu(b"L", b"/".join([b"n" * 250] * 18) + b"\0") + raw(b"x") + END, "too long a name"),
    "is deep": (several(file("d/" * 30 + "f")), "is deeper than 20 directories"),
    "has many entries": (several(*(file(f"f{number}") for number in range(101))), "more than 100 entries"),
    "has many entries of one name": (several(*(file("f") for _ in range(101))), "more than 100 entries"),
    "is long": (several(file("zeros", os.urandom(5 << 20))), "longer than 4194304 bytes"),
    "compresses too well": (several(file("zeros", bytes(3 << 20))), "a compression bomb"),
    "has an extended header without end": (
        raw(b"pax", b"x", octal(2 << 20)) + bytes(2 << 20) + raw(b"x") + END,
        "extended header of more than 8192 bytes",
    ),
    "has one extended header after the other": (
        pax(b"comment=" + b"c" * 3000) * 4 + raw(b"x") + END,
        "extended header of more than 8192 bytes",
    ),
    "has a global header without end": (
        raw(b"g", b"g", octal(1 << 30)) + END,
        "extended header of more than 8192 bytes",
    ),
    "has a long name without end": (raw(b"L", b"L", octal(1 << 30)) + END, "extended header of more than 8192 bytes"),
    "has an extended header of nonsense": (
        raw(b"pax", b"x", octal(9)) + padded(b"nonsense\n") + raw(b"x") + END,
        "the extended header of entry 1 is malformed",
    ),
    "has a record longer than its header": (
        raw(b"pax", b"x", octal(10)) + padded(b"99 path=x\n") + raw(b"x") + END,
        "is malformed",
    ),
    "has a record of length 0": (raw(b"pax", b"x", octal(9)) + padded(b"0 path=x\n") + raw(b"x") + END, "is malformed"),
    "has an extended header and then ends": (pax(b"path=x") + END, "between the extended header and the header"),
    "has many attributes": (
        several(file("f", xattrs={f"user.{number}": b"v" * 50 for number in range(50)})),
        "attributes of more than 1000 bytes",
    ),
    "has many attributes of a directory": (
        several(directory("d", xattrs={f"user.{number}": b"v" * 50 for number in range(50)})),
        "attributes of more than 1000 bytes",
    ),
    "has a negative size": (raw(b"x", size=b"\xff" * 11 + b"\x00") + END, "'x' has a negative size"),
    "has a negative extended size": (pax(b"size=-1") + raw(b"x") + END, "'x' has a negative size"),
    "has a size beyond all bounds": (raw(b"x", size=b"\x80" + b"\x7f" * 11) + END, "size beyond all bounds"),
    "has a size of letters": (raw(b"x", size=b"hello world\0") + END, "'x' has a size that is no number"),
    "has an extended size of letters": (pax(b"size=1e3") + raw(b"x") + END, "'x' has a size that is no number"),
    "has a negative owner": (raw(b"x", uid=b"\xff" * 8) + END, "'x' has a negative uid"),
    "has an owner that leaves it as it is": (pax(b"gid=4294967295") + raw(b"x") + END, "gid that no user can have"),
    "has a time that is none": (pax(b"mtime=1.x") + raw(b"x") + END, "'x' has an mtime that is no number"),
    "claims more than it brings": (raw(b"x", size=octal(1000)) + bytes(512), "ends in the middle of 'x'"),
    "claims a terabyte": (raw(b"x", size=b"\x80" + (1 << 40).to_bytes(11, "big")) + bytes(512), "in the middle of 'x'"),
    "ends in a header": (raw(b"x") + raw(b"y")[:100], "ends in the middle of a header, after 1 entries"),
    "ends in the padding": (raw(b"x", size=octal(1)) + b"1", "ends in the middle of 'x'"),
    "has a wrong checksum": (b"y" + raw(b"x")[1:] + END, "wrong checksum: 'y'"),
    "has a checksum of letters": (raw(b"x")[:148] + b"abcdefgh" + raw(b"x")[156:] + END, "wrong checksum"),
    "goes on after its end": (raw(b"x") + END + raw(b"y"), "goes on after its end"),
    "goes on after half an end": (raw(b"x") + bytes(512) + raw(b"y") + END, "goes on after its end"),
    "is no tar": (b"#!/bin/sh\necho hello\n" * 100, "wrong checksum"),
    "has a sparse file": (raw(b"s", b"S", octal(1 << 20)) + bytes(512) + END, "'s' is a sparse file"),
    "has a sparse file in an extended header": (
        pax(b"GNU.sparse.major=1", b"GNU.sparse.realsize=999999999999") + raw(b"s") + END,
        "'s' is a sparse file",
    ),
    "has an entry of unknown type": (raw(b"v", b"V") + END, "'v' is of an unknown type: 'V'"),
    "shows a terminal what to do": (several(file("\x1b]0;owned\x07/../x")), "\\x1b]0;owned\\x07"),
}


async def refusal(work: Path, blob: bytes, limits: TreeLimits = SMALL, diff_id: str | None = None) -> str:
    """Why it is refused. Sees to it that nothing is left and nothing beside it was touched."""
    store, outside = work / "store", work / "outside"
    for each in (store, outside):
        each.mkdir()
    (outside / "canary").write_bytes(b"sings")
    before = picture(outside)
    (work / "blob").write_bytes(blob)
    with pytest.raises(LayerRefused) as caught:
        await unpack(work / "blob", "tar", diff_id or digest(gunzipped(blob)), store / "tree", limits=limits)
    assert not list(store.iterdir())
    assert picture(outside) == before
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 400
    return caught.value.reason


def digest(tar: bytes) -> str:
    return "sha256:" + hashlib.sha256(tar).hexdigest()


def gunzipped(blob: bytes) -> bytes:
    return gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_layer_is_refused_that(tmp_path: Path, what: str) -> None:
    tar, reason = HOSTILE[what]
    assert reason in await refusal(tmp_path, gzip.compress(tar, 1) if what == "compresses too well" else tar)


async def test_a_layer_with_devices_is_refused_where_they_are_not_allowed(tmp_path: Path) -> None:
    without = TreeLimits(devices=False)
    assert "'disk' is a device node" in await refusal(tmp_path, several(block_device("disk", 8, 0)), without)


async def test_the_same_devices_are_made_where_they_are_allowed(tmp_path: Path) -> None:
    tar = several(block_device("disk", 8, 0))
    (tmp_path / "blob").write_bytes(tar)
    await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / "tree", limits=TreeLimits())
    assert (tmp_path / "tree/disk").lstat().st_rdev == os.makedev(8, 0)


async def test_a_tar_of_another_digest_than_the_image_says_is_refused(tmp_path: Path) -> None:
    tar = several(file("f", b"x"))
    reason = await refusal(tmp_path, tar, diff_id="sha256:" + "0" * 64)
    assert digest(tar) in reason
    assert "0" * 64 in reason


def zstd(tar: bytes) -> bytes:
    return zstandard.compress(tar)


TAR = several(file("f", os.urandom(100_000)), symlink("l", "f"))


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (gzip.compress(TAR) + b"and more", "goes on after the end of the compressed data"),
        (gzip.compress(TAR) + bytes(100), "goes on after the end of the compressed data"),
        (gzip.compress(TAR)[:-1000], "ends in the middle"),
        (gzip.compress(TAR)[:-4], "ends in the middle"),
        (gzip.compress(TAR)[:-8] + bytes(8), "no proper gzip"),
        (gzip.compress(TAR)[:20] + bytes(200), "no proper gzip"),
        (gzip.compress(TAR) + b"\x1f", "goes on after the end of the compressed data"),
        (zstd(TAR) + b"and more", "no proper zstd"),
        (zstd(TAR)[:-1000], "where the image says"),
        (zstd(TAR)[:50] + bytes(200), "where the image says"),
        (b"", "its tar is sha256:e3b0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_damaged_blob_is_refused(tmp_path: Path, blob: bytes, reason: str) -> None:
    assert reason in await refusal(tmp_path, blob, diff_id=digest(TAR))


@pytest.mark.parametrize("compress", [lambda tar: gzip.compress(tar, 9), *full(zstd)], ids=["gzip", "zstd"])
async def test_a_quarter_of_a_gigabyte_of_zeros_in_a_small_blob_takes_neither_memory_nor_disk(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    blob = compress(raw(b"zeros", size=octal(1 << 28)) + bytes(1 << 28))
    assert len(blob) < 300_000
    little = TreeLimits(memory=200 << 20, ratio_from=1 << 24)
    assert "compression bomb" in await refusal(tmp_path, blob, little, digest(b""))


async def test_a_zstd_window_larger_than_memory_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, format=zstandard.FORMAT_ZSTD1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = compressor.compressobj()
    blob = stream.compress(TAR) + stream.flush()
    assert "no proper zstd" in await refusal(tmp_path, blob, diff_id=digest(TAR))


async def test_a_layer_that_takes_too_long_ends_with_a_reason(tmp_path: Path) -> None:
    tar = raw(b"f") * 200_000 + END
    limits = TreeLimits(cpu_s=1)
    assert "SIGKILL: too much time or memory" in await refusal(tmp_path, tar, limits)


async def test_a_directory_replaced_again_and_again_ends_as_the_last_entry_says(tmp_path: Path) -> None:
    filled = [file(f"d/{number}") for number in range(500)]
    flips: Iterable[Entry] = (each for _ in range(1000) for each in (file("d"), directory("d")))
    tar = several(*filled, *flips)
    (tmp_path / "blob").write_bytes(tar)
    await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / "tree", limits=TreeLimits(cpu_s=10))
    assert sorted(picture(tmp_path / "tree")) == [".", "d"]


async def test_attributes_that_speak_to_overlayfs_are_left_out_and_told(tmp_path: Path) -> None:
    odd = {
        "trusted.overlay.redirect": b"/etc",
        "user.overlay.opaque": b"y",
        "security.selinux": b"x",
        "user.fine": b"1",
    }
    tar = several(directory("d", xattrs=odd))
    (tmp_path / "blob").write_bytes(tar)
    unpacked = await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / "tree", limits=TreeLimits())
    assert os.listxattr(tmp_path / "tree/d") == ["user.fine"]
    assert len(unpacked.left_out) == 3
    assert "'d/': attribute 'trusted.overlay.redirect'" in unpacked.left_out


async def test_attributes_too_large_for_the_file_system_are_no_full_disk(tmp_path: Path) -> None:
    """ext4 keeps 4 KiB of them and reports no space left, others keep them all."""
    tar = several(file("f", xattrs={"user.large": b"v" * 60_000}))
    (tmp_path / "blob").write_bytes(tar)
    try:
        await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / "tree", limits=TreeLimits())
    except LayerRefused as refused:
        problem = refused.reason
    else:
        problem = ""
        assert len(os.getxattr(tmp_path / "tree/f", "user.large")) == 60_000
    assert problem in ("", "'f' has more extended attributes than the file system keeps")


async def test_names_that_leave_nothing_are_taken_below_the_root(tmp_path: Path) -> None:
    tar = several(file("/etc//./motd", b"m"), hardlink("./h", "/etc/motd"), symlink("out", "../../../etc/shadow"))
    (tmp_path / "blob").write_bytes(tar)
    await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / "tree", limits=TreeLimits())
    assert sorted(picture(tmp_path / "tree")) == [".", "etc", "etc/motd", "h", "out"]


async def test_trees_below_that_lead_out_by_links_are_not_followed_out(tmp_path: Path) -> None:
    """The lower layer has a link out of the image, the upper one writes and removes below it: inside the image."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(b"sings")
    before = picture(outside)
    target = "../" * 30 + str(outside).lstrip("/")
    store = tmp_path / "store"
    store.mkdir()
    trees: list[Path] = []
    for name, entries in (
        ("low", [symlink("l", target), symlink("a", str(outside)), symlink("circle", "circle")]),
        ("top", [file("l/canary", b"x"), file("a/new", b"x"), whiteout("l/other"), opaque("a/deep")]),
    ):
        tar = tar_of(entries)
        (tmp_path / "blob").write_bytes(tar)
        unpacked = await unpack(tmp_path / "blob", "tar", digest(tar), store / name, limits=TreeLimits())
        await merge(store / name, unpacked, trees)
        trees.insert(0, store / name)
    assert picture(outside) == before
    assert (store / "top" / str(outside).lstrip("/") / "canary").read_bytes() == b"x"
    assert (store / "top" / str(outside).lstrip("/") / "new").read_bytes() == b"x"


async def test_a_layer_that_hides_more_than_is_kept_in_memory_is_refused(tmp_path: Path) -> None:
    few = TreeLimits(lists=64 << 10)
    tar = several(*(whiteout(f"{number:03}" + "/d" * 50) for number in range(400)))
    assert "hides or implies more than 65536 bytes" in await refusal(tmp_path, tar, few)


async def test_directories_that_are_only_implied_count_as_entries(tmp_path: Path) -> None:
    tar = several(*(file(f"{number}" + "/d" * 15, b"") for number in range(10)))
    assert "more than 100 entries" in await refusal(tmp_path, tar)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("d/" * 1500, "deeper than 256 directories"), (("d" * 250 + "/") * 16 + "d" * 70, "too long")],
    ids=["deep", "long"],
)
async def test_links_below_that_lead_too_far_are_the_layer_s_fault(tmp_path: Path, target: str, reason: str) -> None:
    trees: list[Path] = []
    for name, entries in (("low", [symlink("l", target)]), ("top", [file("l/f", b"x")])):
        tar = tar_of(entries)
        (tmp_path / "blob").write_bytes(tar)
        unpacked = await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / name, limits=TreeLimits())
        if name == "top":
            with pytest.raises(LayerRefused, match=reason):
                await merge(tmp_path / name, unpacked, trees)
        else:
            await merge(tmp_path / name, unpacked, trees)
        trees.insert(0, tmp_path / name)


@pytest.mark.full
async def test_a_layer_with_much_to_hide_is_settled_by_a_process_of_its_own_and_the_same(tmp_path: Path) -> None:
    names = [f"d/{number}" for number in range(11_000)]
    trees: list[Path] = []
    for name, entries in (
        ("low", [file(each, b"") for each in names]),
        ("top", [*(whiteout(each) for each in names[1:]), file("implied/f", b"")]),
    ):
        tar = tar_of(entries)
        (tmp_path / "blob").write_bytes(tar)
        unpacked = await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / name, limits=TreeLimits())
        await merge(tmp_path / name, unpacked, trees)
        trees.insert(0, tmp_path / name)
    hidden = list((tmp_path / "top/d").iterdir())
    assert len(hidden) == len(names) - 1
    assert {each.lstat().st_rdev for each in hidden} == {0}
    assert (tmp_path / "top/implied/f").exists()


@pytest.mark.parametrize("below", [symlink("d", "d"), file("d", b"")], ids=["circle", "file"])
async def test_a_layer_that_needs_a_directory_where_those_below_have_none_is_refused(
    tmp_path: Path, below: Entry
) -> None:
    trees: list[Path] = []
    for name, entries in (("low", [below]), ("top", [file("d/f", b"x")])):
        tar = tar_of(entries)
        (tmp_path / "blob").write_bytes(tar)
        unpacked = await unpack(tmp_path / "blob", "tar", digest(tar), tmp_path / name, limits=TreeLimits())
        if name == "top":
            with pytest.raises(LayerRefused, match="'d'"):
                await merge(tmp_path / name, unpacked, trees)
        trees.insert(0, tmp_path / name)


async def test_many_layers_are_unpacked_side_by_side(tmp_path: Path) -> None:
    tars = [several(file(f"f{number}", b"x")) for number in range(8)]
    for number, tar in enumerate(tars):
        (tmp_path / f"blob{number}").write_bytes(tar)
    await asyncio.gather(
        *(
            unpack(tmp_path / f"blob{number}", "tar", digest(tar), tmp_path / f"tree{number}", limits=TreeLimits())
            for number, tar in enumerate(tars)
        )
    )
    assert all((tmp_path / f"tree{number}/f{number}").read_bytes() == b"x" for number in range(8))


def test_the_maker_of_raw_headers_makes_what_tarfile_reads() -> None:
    with tarfile.open(fileobj=io.BytesIO(pax(b"path=n", b"size=3") + raw(b"x") + padded(b"abc") + END)) as tar:
        assert [(each.name, each.size) for each in tar] == [("n", 3)]
