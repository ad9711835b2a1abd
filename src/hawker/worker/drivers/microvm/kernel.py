"""What a guest boots from: Debian's cloud kernel, uncompressed, and an initial file system with our init and the kernel
modules that a guest needs.

A kernel as distributed (bzImage) unpacks itself, slowly where the processor is emulated, and Firecracker does not take
it at all. The boot protocol says where in the file the compressed kernel is (Documentation/arch/x86/boot.rst,
`payload_offset`). Debian's is compressed with LZ4, which Python cannot read: that is left to liblz4, which apt itself
needs.
"""

from __future__ import annotations

import ctypes
import hashlib
import lzma
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from hawker.init.place import alone

MODULES = ("virtio_mmio", "virtio_console", "virtio_blk", "virtio_net", "crc32c_intel", "erofs", "overlay")
"""The guest loads them in this order, each after those it depends on."""

VSOCK_MODULES = ("vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport")
"""Loaded only by a guest whose agent is there, see `init/guest_console.c`."""

PACKAGE = "linux-image-cloud-amd64"
ENVIRONMENT = "HAWKER_GUEST_KERNEL"
PLACES = (Path("/var/lib/hawker/guest"), Path("/"))
_FORMAT = 4  # of what is made; another number makes it anew


class NoKernel(Exception):
    """There is no kernel for guests here; the text says what was looked for and how to get it."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel as distributed: the compressed image and the directory of its modules."""

    image: Path
    modules: Path
    version: str


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What the hypervisor loads, two files. `digest` changes with the kernel, the init, and what is made of them."""

    vmlinux: str
    initrd: str
    version: str
    digest: str


def find(configured: Path | None = None) -> Source:
    """The newest cloud kernel under a directory laid out like a root (`boot`, `lib/modules`): the configured one, else
    what $HAWKER_GUEST_KERNEL names, else the host's own. Raises `NoKernel`."""
    named = configured or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    places = (named,) if named else PLACES
    for place in places:
        found = []
        for image in place.glob("boot/vmlinuz-*-cloud-amd64"):
            version = image.name.removeprefix("vmlinuz-")
            modules = next(
                (m for m in (place / "lib/modules", place / "usr/lib/modules") if (m / version).is_dir()), None
            )
            if modules:
                found.append(Source(image=image, modules=modules / version, version=version))
        if found:
            return max(found, key=lambda source: [int(n) for n in re.findall(r"\d+", source.version)])
    looked = ", ".join(str(place / "boot") for place in places)
    raise NoKernel(
        f"no kernel for guests: looked for vmlinuz-*-cloud-amd64 in {looked}; "
        f"install Debian's package {PACKAGE}, or unpack it somewhere and name that directory in ${ENVIRONMENT}"
    )


def prepare(source: Source, init: Path, cache: Path, shared: Path | None = None) -> Kernel:
    """Make both files, once for each kernel and init. Takes a second, then nothing. Raises `NoKernel`. Where `shared`
    is on the same file system the files are made there, and `cache` has links: workers of a host have them once."""
    about = source.image.stat()
    cache.mkdir(parents=True, exist_ok=True)
    elf = cache / f"vmlinux-{_digest(source.version, about.st_size, about.st_mtime_ns)}"
    initrd = cache / f"initrd-{_digest(elf.name, init.name, MODULES, VSOCK_MODULES, _FORMAT)}"
    _have(elf, shared, lambda: [vmlinux(source.image.read_bytes())])
    _have(initrd, shared, lambda: initial_files(init, source.modules))
    return Kernel(vmlinux=str(elf), initrd=str(initrd), version=source.version, digest=initrd.name)


def _have(target: Path, shared: Path | None, make: Callable[[], Iterator[bytes] | Sequence[bytes]]) -> None:
    if target.exists():
        return
    if shared is None or shared.stat().st_dev != target.parent.stat().st_dev:
        _put(target, make())
        return
    with alone(shared):
        made = shared / target.name
        if not made.exists():
            for old in shared.glob(f"{target.name.partition('-')[0]}-*"):
                if old.stat().st_nlink == 1:  # no worker has it any more
                    old.unlink()
            _put(made, make())
        try:
            os.link(made, target)
            return
        except OSError:  # the same file system, mounted at two places
            if made.stat().st_nlink == 1:
                made.unlink()
    _put(target, make())


def forget_others(cache: Path, needed: Iterable[str]) -> None:
    """Remove what was prepared from older kernels and inits, but not these files: a suspended machine goes on with
    those that it was started with."""
    kept = set(needed)
    for path in [*cache.glob("vmlinux-*"), *cache.glob("initrd-*")]:
        if str(path) not in kept:
            path.unlink(missing_ok=True)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def vmlinux(image: bytes) -> bytes:
    """The uncompressed kernel, an ELF file, inside a bzImage; one that is uncompressed already as it is."""
    if image[:4] == b"\x7fELF":
        return image
    if image[0x202:0x206] != b"HdrS" or struct.unpack_from("<H", image, 0x206)[0] < 0x208:
        raise NoKernel("the kernel image is neither ELF nor a bzImage of boot protocol 2.08 or newer")
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    elf = _decompress(image[start : start + length])
    if elf[:4] != b"\x7fELF":
        raise NoKernel("what the kernel image unpacks to is not ELF")
    return elf


def _decompress(data: bytes) -> bytes:
    """The last four bytes of a payload are its length unpacked."""
    room = struct.unpack("<I", data[-4:])[0]
    if data[:4] == b"\x02\x21\x4c\x18":
        return _lz4_legacy(data[4:-4], room)
    if data[:2] == b"\x1f\x8b":
        return zlib.decompressobj(wbits=31).decompress(data)
    if data[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor().decompress(data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    raise NoKernel(f"the kernel is compressed in an unknown way: {data[:4].hex()}")


_LZ4_BLOCK = 8 << 20  # what a block of the legacy format unpacks to at most (lz4_Frame_format.md)


def _lz4_legacy(data: bytes, room: int) -> bytes:
    try:
        library = ctypes.CDLL("liblz4.so.1")
    except OSError as error:
        raise NoKernel(f"the kernel is compressed with LZ4: install Debian's package liblz4-1 ({error})") from error
    out = bytearray()
    buffer = ctypes.create_string_buffer(_LZ4_BLOCK)
    at = 0
    while at + 4 <= len(data) and len(out) < room:
        (size,) = struct.unpack_from("<I", data, at)
        block = data[at + 4 : at + 4 + size]
        done = library.LZ4_decompress_safe(block, buffer, len(block), _LZ4_BLOCK)
        if done < 0:
            raise NoKernel("the kernel image is corrupt: an LZ4 block cannot be read")
        out += memoryview(buffer)[:done]
        at += 4 + size
    return bytes(out)


def initial_files(init: Path, modules: Path) -> Iterator[bytes]:
    """A cpio archive (format newc, Documentation/driver-api/early-userspace/buffer-format.rst). The same files give the
    same bytes."""
    chosen = in_order(MODULES, modules)
    vsock = [path for path in in_order(VSOCK_MODULES, modules) if path not in chosen]
    yield entry("init", init.read_bytes(), 0o100755)
    yield entry("modules", "".join(f"/{path.name}\n" for path in chosen).encode())
    yield entry("modules.vsock", "".join(f"/{path.name}\n" for path in vsock).encode())
    for path in (*chosen, *vsock):
        yield entry(path.name, unsigned(path.read_bytes()))
    yield entry("TRAILER!!!", b"", 0)


def entry(name: str, content: bytes, mode: int = 0o100644) -> bytes:
    """One file of a newc archive."""
    path = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + path
    return _padded(head) + _padded(content)


def unsigned(module: bytes) -> bytes:
    """A module without its signature (Documentation/admin-guide/module-signing.rst). Checking one takes an emulated
    processor 50 ms, and here it proves nothing: whoever can change a module can change the kernel beside it."""
    mark = b"~Module signature appended~\n"
    if not module.endswith(mark):
        return module
    (length,) = struct.unpack_from(">I", module, len(module) - len(mark) - 4)
    return module[: len(module) - len(mark) - 12 - length]


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def in_order(names: Sequence[str], modules: Path) -> list[Path]:
    """The files of modules, each after those it depends on. What is built into the kernel needs none."""
    files = {_name(path): path for path in modules.rglob("*.ko")}
    builtin = {_name(Path(line)) for line in (modules / "modules.builtin").read_text().split()}
    chosen: list[Path] = []

    def add(name: str) -> None:
        if name in builtin:
            return
        path = files.get(name)
        if path is None:
            raise NoKernel(f"the kernel in {modules} has no module {name}")
        if path not in chosen:
            for needed in _needed(path):
                add(needed)
            chosen.append(path)

    for name in names:
        add(name)
    return chosen


def _needed(module: Path) -> list[str]:
    """From the module's own section `.modinfo`: what depmod reads."""
    found = re.search(rb"\0depends=([^\0]*)\0", module.read_bytes())
    return [n.replace("-", "_") for n in found.group(1).decode().split(",") if n] if found else []


def _name(path: Path) -> str:
    return path.name.removesuffix(".ko").replace("-", "_")


def _put(target: Path, chunks: Iterator[bytes] | Sequence[bytes]) -> None:
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(fd, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.rename(name, target)
    except BaseException:
        os.unlink(name)
        raise
