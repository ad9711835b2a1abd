"""A blob as the tar inside it: decompressed and hashed by a thread, ahead of whoever reads.

Decompressing, hashing and writing release the interpreter's lock, so the thread and the reader share two cores. What
the bytes are is told by their first ones, as every other unpacker does: media types lie, and the tar's digest is
checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator

from hawker.images.tree.refused import LayerRefused

READ = 1 << 18
PIECE = 1 << 18
"""Bytes of the tar that are handed over at a time: small enough to stay in the processor's cache on their way."""
AHEAD = 16
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
ZSTD_WINDOW = 128 << 20
"""What `zstd` itself takes without being told to take more."""


class Limits:
    """How many bytes may come out, and how many for each that went in once `ratio_from` of them are out."""

    __slots__ = ("bytes", "ratio", "ratio_from")

    def __init__(self, bytes: int, ratio: int, ratio_from: int) -> None:
        self.bytes = bytes
        self.ratio = ratio
        self.ratio_from = ratio_from


class Blob:
    """The compressed bytes, counted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = b""
        self.taken = 0

    def peek(self, size: int) -> bytes:
        while len(self._held) < size and (more := os.read(self._fd, READ)):
            self._held += more
        return self._held[:size]

    def read(self, size: int = READ) -> bytes:
        data, self._held = self._held[:size], self._held[size:]
        data = data or os.read(self._fd, size)
        self.taken += len(data)
        return data


class TarStream:
    """The tar, read from front to back. `digest` is there once the end was read. Who may not read to the end and lives
    on must `close` it."""

    def __init__(self, fd: int, limits: Limits) -> None:
        self._pieces: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._piece = memoryview(b"")
        self._ended = False
        self._closed = False
        self.position = 0
        self.digest = ""
        self._thread = threading.Thread(target=self._produce, args=(os.dup(fd), limits), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing of it runs any more then."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def take(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        if size <= len(self._piece):
            taken = bytes(self._piece[:size])
            self._piece = self._piece[size:]
            self.position += size
            return taken
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes, piece by piece, without a copy. Fewer at the end."""
        while size:
            if not self._piece and not self._next():
                return
            piece = self._piece[:size]
            self._piece = self._piece[len(piece) :]
            self.position += len(piece)
            size -= len(piece)
            yield piece

    def skip(self, size: int) -> int:
        """Returns how many bytes there were to skip."""
        return sum(map(len, self.pieces(size)))

    def _next(self) -> bool:
        if self._ended:
            return False
        piece = self._pieces.get()
        self._room.release()
        if isinstance(piece, Exception):
            raise piece
        self._piece = memoryview(piece)
        self._ended = not piece
        return not self._ended

    def _produce(self, fd: int, limits: Limits) -> None:
        blob = Blob(fd)
        try:
            hasher = hashlib.sha256()
            total = 0
            for piece in _tar_of(blob):
                total += len(piece)
                _check(total, blob.taken, limits)
                hasher.update(piece)
                self._put(piece)
            self.digest = f"sha256:{hasher.hexdigest()}"
            self._put(b"")
        except _Closed:
            pass
        except Exception as error:  # raised again where it is read
            with contextlib.suppress(_Closed):
                self._put(error)
        finally:
            os.close(fd)

    def _put(self, piece: bytes | Exception) -> None:
        self._room.acquire()
        if self._closed:
            raise _Closed
        self._pieces.put(piece)


class _Closed(Exception):
    """The reader has stopped reading."""


def _check(total: int, taken: int, limits: Limits) -> None:
    if total > limits.bytes:
        raise LayerRefused(f"its tar is longer than {limits.bytes} bytes")
    if total > limits.ratio_from and total > limits.ratio * taken:
        raise LayerRefused(f"its tar is more than {limits.ratio} times as long as its blob: a compression bomb")


def _tar_of(blob: Blob) -> Iterator[bytes]:
    magic = blob.peek(4)
    if magic.startswith(GZIP):
        return _gunzipped(blob)
    if magic == ZSTD or _skippable(magic):
        return _unzstd(blob)
    return iter(blob.read, b"")


def _gunzipped(blob: Blob) -> Iterator[bytes]:
    """Members one after the other (RFC 1952, 2.2), and nothing after the last."""
    data = blob.read()
    while data:
        member = zlib.decompressobj(wbits=31)
        decompress: Callable[[bytes, int], bytes] = member.decompress
        try:
            while not member.eof:
                piece = decompress(data, PIECE)
                data = member.unconsumed_tail
                if piece:
                    yield piece
                if not data and not member.eof and len(piece) < PIECE and not (data := blob.read()):
                    raise LayerRefused("its blob ends in the middle of the compressed data")
        except zlib.error as error:
            raise LayerRefused(f"its blob is no proper gzip: {error}") from None
        data = member.unused_data
        while len(data) < len(GZIP) and (more := blob.read()):
            data += more
        if data and not data.startswith(GZIP):
            raise LayerRefused("its blob goes on after the end of the compressed data")


def _skippable(magic: bytes) -> bool:
    """The first bytes of a frame that says nothing about the content (RFC 8878, 3.1.2)."""
    return len(magic) == 4 and magic[0] & 0xF0 == 0x50 and magic[1:] == b"\x2a\x4d\x18"


def _unzstd(blob: Blob) -> Iterator[bytes]:
    import zstandard  # ten milliseconds that other layers need not wait

    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    reader = decompressor.stream_reader(blob, read_size=READ, read_across_frames=True)  # type: ignore[arg-type]
    try:
        while piece := reader.read(PIECE):
            yield piece
    except zstandard.ZstdError as error:
        raise LayerRefused(f"its blob is no proper zstd: {error}") from None
