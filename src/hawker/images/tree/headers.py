"""The entries of a tar, of every flavour that builders of images use.

ustar and PAX: POSIX.1-2017, `pax`; GNU's long names and base-256 numbers: the manual of GNU tar, "Basic Tar Format";
attributes as `SCHILY.xattr.NAME`. Global PAX headers are read over, as Docker does. Sparse files are refused: no
builder of images writes them, and one short header can claim any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from hawker.images.tree.refused import LayerRefused, shown
from hawker.images.tree.streams import TarStream

BLOCK = 512
ZEROS = bytes(BLOCK)
FILE, LINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
CONTIGUOUS, OLD_FILE, SPARSE = b"7", b"\0", b"S"
PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = b"x", b"g", b"L", b"K"
XATTR = b"SCHILY.xattr."
MAX_ID = 2**32 - 2
"""The id above means "leave it" to chown."""

_FIELDS = Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")


class Entry:
    """One entry. `name` and `link` are as the tar has them; `size` counts the bytes that follow; times in ns."""

    __slots__ = ("gid", "kind", "link", "major", "minor", "mode", "mtime_ns", "name", "size", "uid", "xattrs")

    def __init__(
        self,
        name: bytes,
        kind: bytes,
        *,
        mode: int = 0o644,
        uid: int = 0,
        gid: int = 0,
        size: int = 0,
        mtime_ns: int = 0,
        link: bytes = b"",
        major: int = 0,
        minor: int = 0,
        xattrs: dict[bytes, bytes] | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.size = size
        self.mtime_ns = mtime_ns
        self.link = link
        self.major = major
        self.minor = minor
        self.xattrs = xattrs or {}


def entries(stream: TarStream, header_limit: int) -> Iterator[Entry]:
    """Entry by entry. Who wants a file's content takes up to `size` bytes from the stream before asking for the next.

    `header_limit`: bytes of extended headers before one entry."""
    number = 0
    while (block := _block(stream, number)) is not None:
        number += 1
        extended: dict[bytes, bytes] = {}
        held = 0
        while (kind := block[156:157]) in (PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK):
            size = _number(block[124:136], "size", block)
            held += size + BLOCK
            if held > header_limit:
                raise LayerRefused(f"entry {number} has an extended header of more than {header_limit} bytes")
            data = _data(stream, size, number)
            if kind == PAX:
                _read_pax(data, extended, number)
            elif kind == GNU_NAME:
                extended[b"path"] = data.split(b"\0", 1)[0]
            elif kind == GNU_LINK:
                extended[b"linkpath"] = data.split(b"\0", 1)[0]
            following = _block(stream, number)
            if following is None:
                raise LayerRefused(f"its tar ends between the extended header and the header of entry {number}")
            block = following
        entry = _entry(block, extended)
        end = stream.position + entry.size + -entry.size % BLOCK
        yield entry
        if stream.skip(missing := end - stream.position) < missing:
            raise LayerRefused(f"its tar ends in the middle of {shown(entry.name)}")
    while rest := stream.take(1 << 16):
        if rest.count(0) != len(rest):
            raise LayerRefused("its tar goes on after its end")


def _block(stream: TarStream, number: int) -> bytes | None:
    """The next header, None at the end: two blocks of zeros, or one, or none, as all readers of tars take it."""
    block = stream.take(BLOCK)
    if not block or block == ZEROS:
        second = stream.take(BLOCK)
        if second.count(0) != len(second):
            raise LayerRefused("its tar goes on after its end")
        return None
    if len(block) < BLOCK:
        raise LayerRefused(f"its tar ends in the middle of a header, after {number} entries")
    stored = _octal(block[148:156])
    plain = sum(block) - sum(block[148:156]) + 8 * 0x20
    if stored != plain and stored != plain - 256 * sum(byte > 127 for byte in block[:148] + block[156:]):
        raise LayerRefused(
            f"the header after {number} entries has a wrong checksum: {shown(block[:100].rstrip(ZEROS))}"
        )
    return block


def _data(stream: TarStream, size: int, number: int) -> bytes:
    data = stream.take(size)
    padding = -size % BLOCK
    if len(data) < size or stream.skip(padding) < padding:
        raise LayerRefused(f"its tar ends in the middle of the extended header of entry {number}")
    return data


def _entry(block: bytes, extended: dict[bytes, bytes]) -> Entry:
    name, mode, uid, gid, size, mtime, _, kind, link, magic, _, _, _, major, minor, prefix = _FIELDS.unpack(block)
    name = name.split(b"\0", 1)[0]
    if magic == b"ustar\0" and prefix[0]:
        name = prefix.split(b"\0", 1)[0] + b"/" + name
    name = extended.get(b"path") or name
    link = extended.get(b"linkpath") or link.split(b"\0", 1)[0]
    if kind in (OLD_FILE, CONTIGUOUS, FILE):
        kind = DIRECTORY if name.endswith(b"/") else FILE
    if kind == SPARSE or any(key.startswith(b"GNU.sparse.") for key in extended):
        raise LayerRefused(f"{shown(name)} is a sparse file, which no layer needs: pack it without --sparse")
    entry = Entry(
        name,
        kind,
        mode=_number(mode, "mode", block) & 0o7777,
        uid=_id(extended, b"uid", uid, block),
        gid=_id(extended, b"gid", gid, block),
        mtime_ns=_time(extended[b"mtime"], name) if extended.get(b"mtime") else _number(mtime, "mtime", block) * 10**9,
        link=link,
    )
    if kind in (CHAR, BLOCKDEV):
        entry.major = _number(major, "device number", block)
        entry.minor = _number(minor, "device number", block)
    elif kind == FILE:
        entry.size = (
            _decimal(extended[b"size"], "size", name) if extended.get(b"size") else _number(size, "size", block)
        )
        if entry.size < 0:
            raise LayerRefused(f"{shown(name)} has a negative size")
    if extended:
        entry.xattrs = {key[len(XATTR) :]: extended[key] for key in extended if key.startswith(XATTR)}
    return entry


def _read_pax(data: bytes, into: dict[bytes, bytes], number: int) -> None:
    """Records of `LENGTH KEY=VALUE\\n`, LENGTH counting itself in decimal."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        length = int(digits) if digits.isdigit() else 0
        end = at + length
        equals = data.find(b"=", space, end)
        if equals < 0 or end > len(data) or data[end - 1] != 0x0A:
            raise LayerRefused(f"the extended header of entry {number} is malformed")
        into[data[space + 1 : equals]] = data[equals + 1 : end - 1]
        at = end


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    if not digits:
        return 0
    digits = digits.split(b"\0", 1)[0].split(b" ", 1)[0]
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else None


def _number(field: bytes, what: str, block: bytes) -> int:
    """Octal digits, or two's complement when the first bit is set (the rest of the first byte tells the sign)."""
    if field[0] & 0x80:
        if field[0] == 0xFF:
            value = int.from_bytes(field, "big", signed=True)
        else:
            value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        octal = _octal(field)
        if octal is None:
            raise LayerRefused(f"{shown(block[:100].rstrip(ZEROS))} has a {what} that is no number")
        value = octal
    if what != "mtime" and value < 0:
        raise LayerRefused(f"{shown(block[:100].rstrip(ZEROS))} has a negative {what}")
    if abs(value) >> 62:
        raise LayerRefused(f"{shown(block[:100].rstrip(ZEROS))} has a {what} beyond all bounds")
    return value


def _id(extended: dict[bytes, bytes], key: bytes, field: bytes, block: bytes) -> int:
    text = extended.get(key)
    what = key.decode()
    value = _decimal(text, what, block[:100].rstrip(ZEROS)) if text else _number(field, what, block)
    if not 0 <= value <= MAX_ID:
        raise LayerRefused(f"{shown(block[:100].rstrip(ZEROS))} has a {what} that no user can have: {value}")
    return value


def _decimal(text: bytes, what: str, name: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise LayerRefused(f"{shown(name)} has a {what} that is no number: {shown(text)}")
    return int(text)


def _time(text: bytes, name: bytes) -> int:
    """Seconds with a fraction, exactly, to the nanosecond below."""
    whole, _, fraction = text.partition(b".")
    seconds = _decimal(whole or b"0", "mtime", name)
    if fraction and not fraction.isdigit():
        raise LayerRefused(f"{shown(name)} has an mtime that is no number: {shown(text)}")
    parts = int(fraction[:9].ljust(9, b"0"))
    return seconds * 10**9 + (-parts if whole.startswith(b"-") else parts)
