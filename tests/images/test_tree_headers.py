"""The parser reads what `tarfile` reads, whatever flavour of tar, and the stream hands on what was compressed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hawker.images.tree.headers import Entry, entries
from hawker.images.tree.refused import LayerRefused
from hawker.images.tree.streams import PIECE, Limits, TarStream

LIMITS = Limits(1 << 30, 10_000, 1 << 30)


def read(blob: bytes) -> tuple[list[tuple[Entry, bytes]], str]:
    """The entries with their content, and the tar's digest."""
    with tempfile.TemporaryFile() as file:
        file.write(blob)
        file.seek(0)
        stream = TarStream(file.fileno(), LIMITS)
        found = [(entry, b"".join(stream.pieces(entry.size))) for entry in entries(stream, 1 << 20)]
    return found, stream.digest


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n/"), min_size=1, max_size=70)
PATHS = st.lists(NAMES, min_size=1, max_size=5).map("/".join)


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    kinds = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
    info = tarfile.TarInfo(draw(PATHS))
    info.type = draw(st.sampled_from(kinds))
    info.mode = draw(st.integers(0, 0o7777))
    info.uid = draw(st.one_of(st.integers(0, 70_000), st.integers(0, 2**32 - 2)))
    info.gid = draw(st.one_of(st.integers(0, 70_000), st.integers(0, 2**32 - 2)))
    info.mtime = draw(st.one_of(st.integers(0, 2**31), st.integers(0, 2**40)))
    data = draw(st.binary(max_size=1500)) if info.type == tarfile.REGTYPE else b""
    info.size = len(data)
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = draw(PATHS)
    if info.type == tarfile.CHRTYPE:
        info.devmajor, info.devminor = draw(st.integers(0, 4095)), draw(st.integers(0, 2**20 - 1))
    return info, data


@given(st.lists(members(), max_size=5), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_every_entry_is_what_tarfile_says_it_is(made: list[tuple[tarfile.TarInfo, bytes]], flavour: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=flavour) as tar:
        for info, data in made:
            tar.addfile(info, io.BytesIO(data))
    found, digest = read(buffer.getvalue())
    assert digest == "sha256:" + hashlib.sha256(buffer.getvalue()).hexdigest()
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as tar:
        expected = [(_told(member), _content(tar, member)) for member in tar]
    assert [(_found(entry), data) for entry, data in found] == expected


def _told(info: tarfile.TarInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.type,
        "mode": info.mode,
        "owner": (info.uid, info.gid),
        "mtime": int(info.mtime),
        "link": info.linkname,
        "device": (info.devmajor, info.devminor) if info.type == tarfile.CHRTYPE else None,
    }


def _found(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name.decode().rstrip("/"),
        "kind": entry.kind,
        "mode": entry.mode,
        "owner": (entry.uid, entry.gid),
        "mtime": entry.mtime_ns // 10**9,
        "link": entry.link.decode(),
        "device": (entry.major, entry.minor) if entry.kind == tarfile.CHRTYPE else None,
    }


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.isreg() else None
    return file.read() if file else b""


@given(st.binary(max_size=3000), st.data())
def test_bytes_that_are_no_tar_are_refused_or_read_but_never_anything_else(garbage: bytes, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("ü" * 80)
        info.size = 600
        tar.addfile(info, io.BytesIO(bytes(600)))
    blob = bytearray(buffer.getvalue())
    at = data.draw(st.integers(0, 2500))
    blob[at : at + len(garbage)] = garbage
    with contextlib.suppress(LayerRefused):
        read(bytes(blob))


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("1.5", 1_500_000_000),
        ("0.000000001", 1),
        ("1600000000.1234567899", 1_600_000_000_123_456_789),
        ("-1.5", -1_500_000_000),
        ("-0.25", -250_000_000),
        ("7", 7_000_000_000),
        ("7.", 7_000_000_000),
    ],
)
def test_times_are_read_to_the_nanosecond(text: str, expected_ns: int) -> None:
    info = tarfile.TarInfo("f")
    info.pax_headers = {"mtime": text}
    assert [entry.mtime_ns for entry, _ in read(_tar(info))[0]] == [expected_ns]


def _tar(*infos: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info in infos:
            tar.addfile(info)
    return buffer.getvalue()


def test_a_global_header_says_nothing_of_the_files_after_it() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", pax_headers={"path": "elsewhere", "comment": "c"}) as tar:
        tar.addfile(tarfile.TarInfo("here"))
    assert [entry.name for entry, _ in read(buffer.getvalue())[0]] == [b"here"]


def test_a_name_that_ends_in_a_slash_is_a_directory_in_old_tars() -> None:
    info = tarfile.TarInfo("old/")
    info.type = tarfile.AREGTYPE
    assert [entry.kind for entry, _ in read(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))[0]] == [b"5"]


def test_a_tar_may_end_without_its_end() -> None:
    assert [entry.name for entry, _ in read(tarfile.TarInfo("f").tobuf())[0]] == [b"f"]


BIG = _tar(tarfile.TarInfo("f")) + bytes(3 * PIECE + 17)


def frames(compress: Any) -> Iterator[bytes]:
    for start in range(0, len(BIG), 100_000):
        yield compress(BIG[start : start + 100_000])


SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


@pytest.mark.parametrize(
    "blob",
    [
        BIG,
        gzip.compress(BIG),
        b"".join(frames(gzip.compress)),
        gzip.compress(BIG) + gzip.compress(b""),
        zstandard.compress(BIG),
        b"".join(frames(zstandard.compress)),
        SKIPPABLE + zstandard.compress(BIG),
        zstandard.compress(BIG) + SKIPPABLE,
    ],
    ids=["plain", "gzip", "members", "empty member", "zstd", "frames", "skippable first", "skippable last"],
)
def test_the_tar_comes_out_of_every_way_to_compress_it(blob: bytes) -> None:
    found, digest = read(blob)
    assert [entry.name for entry, _ in found] == [b"f"]
    assert digest == "sha256:" + hashlib.sha256(BIG).hexdigest()


def test_random_bytes_go_through_whole() -> None:
    content = os.urandom(5 * PIECE + 3)
    info = tarfile.TarInfo("f")
    info.size = len(content)
    blob = gzip.compress(info.tobuf() + content + bytes(-len(content) % 512 + 1024), 1)
    assert [data for _, data in read(blob)[0]] == [content]
