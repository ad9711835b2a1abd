"""Cases for what carries WebSocket (RFC 6455), in the manner of Autobahn|Testsuite: framing, control frames between the
fragments of a message, reserved bits and opcodes, UTF-8, closing, limits, compression.

    async with echoing() as address:
        for case in cases():
            said = await told(address, "web.example", case)

A case is a list of steps. A step sends bytes as they are and waits for so many frames; in the end the connection must
be closed. What comes back is raw, so that what a proxy makes of it can be compared byte by byte.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

LIMIT_S = 20.0
MESSAGE_MOST = 4 << 20
TEXT, BINARY, CLOSE, PING, PONG, MORE = 1, 2, 8, 9, 10, 0
MASK = b"\x37\xfa\x21\x3d"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # for that key: RFC 6455, section 1.3
DEFLATE = "permessage-deflate"


class Step(msgspec.Struct, frozen=True):
    """`data` is sent in pieces of `chop` bytes, each on its own; 0: at once."""

    data: bytes
    frames: int = 0
    chop: int = 0


class Case(msgspec.Struct, frozen=True):
    """`echoes` are what comes back before the end, as opcode and payload; `code` is how the server closes."""

    category: str
    name: str
    steps: tuple[Step, ...]
    echoes: tuple[tuple[int, bytes], ...]
    code: int
    extension: str = ""


class Said(msgspec.Struct, frozen=True):
    """An answer's head without its Date, and all bytes after it until the connection's end."""

    head: tuple[str, ...]
    raw: bytes

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        return [(first & 0x0F, payload) for first, payload in parsed(self.raw)[0]]

    @property
    def code(self) -> int:
        """Of the close frame; 1005 if it has none, 1006 without such a frame."""
        closes = [payload for opcode, payload in self.frames if opcode == CLOSE]
        return 1006 if not closes else struct.unpack("!H", closes[0][:2])[0] if closes[0] else 1005


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    size = len(payload)
    mask = 0x80 if masked else 0
    if size < 126:
        head = struct.pack("!BB", first, mask | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, mask | 126, size)
    else:
        head = struct.pack("!BBQ", first, mask | 127, size)
    return head + (MASK + _masked(payload) if masked else payload)


def closing(code: int = 1000, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


def parsed(raw: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """A server's frames as first byte and payload, and what is left over."""
    frames = []
    while len(raw) >= 2:
        size, at = raw[1] & 0x7F, 2
        if size == 126:
            size, at = int.from_bytes(raw[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(raw[2:10], "big"), 10
        if len(raw) < max(at, at + size):
            break
        frames.append((raw[0], raw[at : at + size]))
        raw = raw[at + size :]
    return frames, raw


def _masked(payload: bytes) -> bytes:
    mask = MASK * (len(payload) // 4 + 1)
    return (int.from_bytes(payload, "big") ^ int.from_bytes(mask[: len(payload)], "big")).to_bytes(len(payload), "big")


# --- the cases -------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    return [
        *_framing(),
        *_pings(),
        *_reserved(),
        *_fragments(),
        *_utf8(),
        *_closing(),
        *_limits(),
        *_compression(),
    ]


def _fine(
    category: str, name: str, data: bytes, *echoes: tuple[int, bytes], chop: int = 0, extension: str = ""
) -> Case:
    """What is sent comes back, and then both close in order."""
    steps = Step(data, len(echoes), chop), Step(closing(), 1)
    return Case(category, name, steps, echoes, 1000, extension)


def _wrong(category: str, name: str, data: bytes, *echoes: tuple[int, bytes], code: int = 1002, chop: int = 0) -> Case:
    """What is sent makes the server close, perhaps after an echo."""
    return Case(category, name, (Step(data, 1 + len(echoes), chop),), echoes, code)


def _framing() -> Iterator[Case]:
    for opcode, kind in ((TEXT, "text"), (BINARY, "binary")):
        for size in (0, 1, 125, 126, 127, 128, 65535, 65536):
            payload = (b"*" if opcode == TEXT else b"\xfe") * size
            yield _fine("framing", f"{kind} of {size}", frame(opcode, payload), (opcode, payload))
        for chop in (1, 997):
            payload = b"*" * (300 if chop == 1 else 65536)
            name = f"{kind} of {len(payload)} in pieces of {chop}"
            yield _fine("framing", name, frame(opcode, payload), (opcode, payload), chop=chop)
    many = tuple((TEXT, b"message %d" % n) for n in range(50))
    yield _fine("framing", "fifty at once", b"".join(frame(*each) for each in many), *many)
    yield _wrong("framing", "not masked", frame(TEXT, b"bare", masked=False))


def _pings() -> Iterator[Case]:
    for name, payload in (("empty", b""), ("text", b"Hello"), ("binary", b"\x00\xff\xfe"), ("of 125", b"\xfe" * 125)):
        yield _fine("control frames", f"ping, {name}", frame(PING, payload), (PONG, payload))
    yield _wrong("control frames", "ping of 126", frame(PING, b"\xfe" * 126))
    yield _fine("control frames", "ping of 125 byte by byte", frame(PING, b"\xfe" * 125), (PONG, b"\xfe" * 125), chop=1)
    yield _fine("control frames", "pong unasked", frame(PONG, b"unasked"))
    yield _fine("control frames", "pong, then ping", frame(PONG, b"x") + frame(PING, b"y"), (PONG, b"y"))
    ten = tuple((PONG, b"ping %d" % n) for n in range(10))
    yield _fine("control frames", "ten pings", b"".join(frame(PING, payload) for _, payload in ten), *ten)
    yield _fine("control frames", "ten pings byte by byte", b"".join(frame(PING, p) for _, p in ten), *ten, chop=1)
    yield _wrong("control frames", "ping in fragments", frame(PING, b"a", fin=False) + frame(MORE, b"b"))


def _reserved() -> Iterator[Case]:
    for rsv in range(1, 8):
        yield _wrong("reserved bits", f"bits {rsv:03b}, text", frame(TEXT, b"Hello", rsv=rsv))
    for opcode, kind in ((PING, "ping"), (CLOSE, "close"), (BINARY, "binary")):
        yield _wrong("reserved bits", f"bits 010, {kind}", frame(opcode, b"", rsv=2))
    for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        yield _wrong("reserved opcodes", f"opcode {opcode}", frame(opcode))
        yield _wrong("reserved opcodes", f"opcode {opcode} with a payload, byte by byte", frame(opcode, b"x"), chop=1)


def _fragments() -> Iterator[Case]:
    first, last = frame(TEXT, b"one ", fin=False), frame(MORE, b"two")
    whole = (TEXT, b"one two")
    for chop in (0, 1):
        how = " byte by byte" * bool(chop)
        yield _fine("fragments", f"two{how}", first + last, whole, chop=chop)
        yield _fine(
            "fragments", f"a ping between{how}", first + frame(PING, b"p") + last, (PONG, b"p"), whole, chop=chop
        )
        yield _wrong("fragments", f"a text between{how}", first + frame(TEXT, b"again"), chop=chop)
        yield _wrong("fragments", f"no beginning{how}", frame(MORE, b"end"), chop=chop)
        yield _wrong("fragments", f"no beginning and no end{how}", frame(MORE, b"end", fin=False), chop=chop)
    yield _fine("fragments", "a pong between", first + frame(PONG, b"p") + last, whole)
    empty = frame(TEXT, b"", fin=False) + frame(MORE, b"", fin=False) + frame(MORE, b"")
    yield _fine("fragments", "three, all empty", empty, (TEXT, b""))
    middle = frame(BINARY, b"", fin=False) + frame(MORE, b"middle", fin=False) + frame(MORE, b"")
    yield _fine("fragments", "only the middle has something", middle, (BINARY, b"middle"))
    parts = [frame(MORE, b"%d," % n, fin=n == 99) + frame(PING, b"%d" % n) * (n < 99) for n in range(100)]
    pongs = [(PONG, b"%d" % n) for n in range(99)]
    text = (TEXT, b"".join(b"%d," % n for n in range(100)))
    data = frame(TEXT, b"", fin=False) + b"".join(parts)
    yield _fine("fragments", "a hundred, a ping after each", data, *pongs, text)
    steps: tuple[Step, ...] = (Step(first), Step(frame(PING, b"p"), 1), Step(last, 1), Step(closing(), 1))
    yield Case("fragments", "a ping between, answered before the rest is sent", steps, ((PONG, b"p"), whole), 1000)
    steps = (Step(first), Step(closing(), 1))
    yield Case("fragments", "closed in the middle", steps, (), 1002)


VALID = (
    "κόσμε",
    "Hello-µ@ßöäüàá-UTF-8!!",
    "\x00\x7f\x80߿ࠀ￿",
    "\U00010000\U0010ffff",
    "\ud7ff\ue000\ufffd",
    "\ufffe\uffff\U0001fffe",
)
INVALID = (
    (b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80edited", "a surrogate"),
    (b"\xf4\x90\x80\x80", "above U+10FFFF"),
    (b"\xc0\xaf", "overlong, two bytes"),
    (b"\xe0\x80\xaf", "overlong, three bytes"),
    (b"\xf0\x80\x80\xaf", "overlong, four bytes"),
    (b"\xf8\x88\x80\x80\x80", "five bytes"),
    (b"\xfc\x84\x80\x80\x80\x80", "six bytes"),
    (b"\x80", "a continuation alone"),
    (b"\xbf\xbf", "two continuations"),
    (b"\xce", "cut off after one of two"),
    (b"\xe1\xbd", "cut off after two of three"),
    (b"\xf0\x9f\x98", "cut off after three of four"),
    (b"\xfe", "FE"),
    (b"\xff", "FF"),
    (b"\xed\xa0\x80\xed\xb0\x80", "a pair of surrogates"),
    (b"good \xc3\x28 bad", "a wrong continuation"),
)


def _utf8() -> Iterator[Case]:
    for text in VALID:
        data = text.encode()
        name = ascii(text)
        yield _fine("UTF-8", f"{name}", frame(TEXT, data), (TEXT, data))
        cut = b"".join(frame(TEXT if not n else MORE, data[n : n + 1], fin=False) for n in range(len(data)))
        yield _fine("UTF-8", f"{name}, a frame for each byte", cut + frame(MORE), (TEXT, data))
        yield _fine("UTF-8", f"{name}, byte by byte", frame(TEXT, data), (TEXT, data), chop=1)
    for data, name in INVALID:
        yield _wrong("UTF-8", name, frame(TEXT, data), code=1007)
        yield _wrong("UTF-8", f"{name}, byte by byte", frame(TEXT, data), code=1007, chop=1)
        half = len(data) // 2
        yield _wrong(
            "UTF-8", f"{name}, in two", frame(TEXT, data[:half], fin=False) + frame(MORE, data[half:]), code=1007
        )


def _closing() -> Iterator[Case]:
    yield Case("closing", "at once", (Step(closing(), 1),), (), 1000)
    yield Case("closing", "without a code", (Step(frame(CLOSE), 1),), (), 1005)
    yield Case("closing", "twice", (Step(closing() + closing(), 1),), (), 1000)
    yield Case("closing", "and a ping after it", (Step(closing() + frame(PING, b"late"), 1),), (), 1000)
    yield Case("closing", "and a text after it", (Step(closing() + frame(TEXT, b"late"), 1),), (), 1000)
    yield _fine("closing", "after a text", frame(TEXT, b"Hello"), (TEXT, b"Hello"))
    yield _wrong("closing", "a payload of one byte", frame(CLOSE, b"\x03"))
    yield Case("closing", "a reason", (Step(closing(1000, "bye ✓".encode()), 1),), (), 1000)
    yield Case("closing", "a reason of 123", (Step(closing(1000, b"*" * 123), 1),), (), 1000)
    yield _wrong("closing", "a reason of 124", closing(1000, b"*" * 124))
    yield _wrong("closing", "a reason that is not UTF-8", closing(1000, b"\xce\xba\xe1\xed\xa0\x80"), code=1007)
    for code in (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999):
        yield Case("closing", f"code {code}", (Step(closing(code), 1),), (), code)
    for code in (0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999, 65535):
        yield _wrong("closing", f"code {code}", closing(code))


def _limits() -> Iterator[Case]:
    for opcode, kind in ((TEXT, "text"), (BINARY, "binary")):
        for kib in (64, 256, 1024, 4096):
            payload = b"*" * (kib << 10)
            yield _fine("limits", f"{kind} of {kib} KiB", frame(opcode, payload), (opcode, payload))
        payload = b"*" * (1 << 20)
        for size in (1024, 4096, 65536):
            pieces = [payload[n : n + size] for n in range(0, len(payload), size)]
            data = b"".join(frame(opcode if not n else MORE, each, fin=False) for n, each in enumerate(pieces))
            yield _fine("limits", f"{kind} of 1 MiB in frames of {size}", data + frame(MORE), (opcode, payload))
        data = frame(opcode, payload)
        yield _fine("limits", f"{kind} of 1 MiB in pieces of 1399", data, (opcode, payload), chop=1399)
    yield _wrong("limits", "over the server's limit", frame(BINARY, b"*" * (MESSAGE_MOST + 1)), code=1009)
    yield _wrong("limits", "a length of 2^64 - 1", b"\x82\xff" + b"\xff" * 8 + MASK, code=1009)
    steps = tuple(Step(frame(TEXT, b"%d" % n), 1) for n in range(200))
    echoes = tuple((TEXT, b"%d" % n) for n in range(200))
    yield Case("limits", "200 one after another", (*steps, Step(closing(), 1)), echoes, 1000)


def _compression() -> Iterator[Case]:
    for size in (16, 1024, 65536, 1 << 20):
        payload = bytes(range(32, 96)) * (size // 64 + 1)
        packer = zlib.compressobj(wbits=-15)
        packed = (packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]
        steps: tuple[Step, ...] = (
            Step(frame(TEXT, packed, rsv=4), 1),
            Step(frame(TEXT, payload), 1),
            Step(closing(), 1),
        )
        yield Case("compression", f"text of {len(payload)}", steps, ((TEXT, payload),) * 2, 1000, DEFLATE)
    extension = f"{DEFLATE}; client_max_window_bits; server_no_context_takeover"
    steps = (Step(frame(TEXT, b"plain"), 1), Step(closing(), 1))
    yield Case("compression", "no context kept", steps, ((TEXT, b"plain"),), 1000, extension)
    yield Case("compression", "an extension nobody knows", steps, ((TEXT, b"plain"),), 1000, "x-unknown; a=b")


# --- the two ends ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[str, int]]:
    """A server that says every message back, in one frame. It asks for nothing by itself."""

    async def echo(connection: ServerConnection) -> None:
        try:
            async for message in connection:
                await connection.send(message)
        except ConnectionClosed:
            pass  # many cases are about that

    options = {"max_size": MESSAGE_MOST, "ping_interval": None, "close_timeout": 5, "server_header": None}
    async with serve(echo, "127.0.0.1", 0, compression="deflate", **options) as server:  # type: ignore[arg-type]
        address: tuple[str, int] = next(iter(server.sockets)).getsockname()[:2]
        yield address


async def told(address: tuple[str, int], host: str, case: Case) -> Said:
    """What a server, or what is before it, answers in a case."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*address, limit=8 << 20)
        try:
            extension = f"Sec-WebSocket-Extensions: {case.extension}\r\n" if case.extension else ""
            writer.write(
                f"GET /chat HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\n{extension}\r\n".encode()
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            raw, rest = bytearray(), bytearray()
            for step in case.steps:
                await asyncio.gather(_send(writer, step), _receive(reader, raw, rest, step.frames))
            raw += rest
            while data := await reader.read(1 << 20):
                raw += data
        finally:
            writer.close()
    return Said(_kept(head), bytes(raw))


async def _send(writer: asyncio.StreamWriter, step: Step) -> None:
    """A peer that has closed already takes no more: what it said is what counts."""
    size = step.chop or len(step.data) or 1
    try:
        for at in range(0, len(step.data), size):
            writer.write(step.data[at : at + size])
            await writer.drain()
            if step.chop:
                await asyncio.sleep(0)
    except ConnectionError:
        pass


async def _receive(reader: asyncio.StreamReader, raw: bytearray, rest: bytearray, frames: int) -> None:
    """So many frames to `raw`; what is left over stays in `rest`."""
    while frames > 0:
        found, left = parsed(bytes(rest))
        if not found:
            data = await reader.read(1 << 20)
            if not data:
                return
            rest += data
            continue
        frames -= len(found)
        size = len(rest) - len(left)
        raw += rest[:size]
        del rest[:size]


def _kept(head: str) -> tuple[str, ...]:
    """The status and the fields of the protocol, whatever else hops have added."""
    first, *lines = head.strip().split("\r\n")
    own = sorted(line.lower().replace(ACCEPT.lower(), ACCEPT) for line in lines if line.lower().startswith("sec-"))
    return (first, *own)
