"""What a guest boots from: found, unpacked, put together."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import subprocess
from pathlib import Path

import pytest
import zstandard

from hawker.worker.drivers.microvm import kernel
from hawker.worker.drivers.microvm.kernel import NoKernel

ELF = b"\x7fELF" + bytes(range(256)) * 300


def bz_image(payload: bytes) -> bytes:
    """A kernel image of four sectors of set-up and this payload, 100 bytes into what follows."""
    head = bytearray(5 * 512)
    head[0x1F1] = 4
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", head, 0x206, 0x20F)
    struct.pack_into("<II", head, 0x248, 100, len(payload))
    return bytes(head) + bytes(100) + payload + b"more"


def sized(compressed: bytes) -> bytes:
    return compressed + struct.pack("<I", len(ELF))


def lz4(data: bytes) -> bytes:
    """As the kernel is compressed: the legacy frame, here of blocks that only have literals (lz4_Block_format.md)."""
    block = b""
    length = len(data) - 15
    block += b"\xf0" + b"\xff" * (length // 255) + bytes([length % 255]) + data
    return b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block


@pytest.mark.parametrize(
    "payload",
    [
        sized(lz4(ELF)),
        sized(gzip.compress(ELF)),
        sized(lzma.compress(ELF)),
        sized(zstandard.ZstdCompressor().compress(ELF)),
    ],
    ids=["lz4", "gzip", "xz", "zstd"],
)
def test_a_kernel_is_unpacked_as_distributions_compress_it(payload: bytes) -> None:
    assert kernel.vmlinux(bz_image(payload)) == ELF


def test_an_unpacked_kernel_is_taken_as_it_is() -> None:
    assert kernel.vmlinux(ELF) == ELF


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (bytes(4096), "neither ELF nor a bzImage"),
        (bz_image(b"BZh9nothing"), "unknown way: 425a6839"),
        (bz_image(sized(gzip.compress(b"no kernel"))), "is not ELF"),
        (bz_image(b"\x02\x21\x4c\x18" + struct.pack("<I", 8) + b"\xff" * 8 + bytes(3) + b"\1"), "corrupt"),
    ],
)
def test_what_is_no_kernel_is_refused(image: bytes, why: str) -> None:
    with pytest.raises(NoKernel, match=why):
        kernel.vmlinux(image)


def module(path: Path, depends: str, signed: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0"
    if signed:
        raw += b"signature" + bytes(8) + struct.pack(">I", 9) + b"~Module signature appended~\n"
    path.write_bytes(raw)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    root = tmp_path / "lib/modules/6.1-cloud-amd64"
    module(root / "kernel/a/virtio_ring.ko", "")
    module(root / "kernel/b/virtio.ko", "virtio_ring", signed=True)
    module(root / "kernel/b/net-failover.ko", "failover")
    module(root / "kernel/c/failover.ko", "")
    module(root / "kernel/d/virtio_net.ko", "virtio_ring,virtio,net_failover")
    (root / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\nkernel/crypto/crc32c-generic.ko\n")
    return root


def test_modules_come_after_what_they_need_and_what_is_built_in_is_left_out(modules: Path) -> None:
    found = kernel.in_order(("virtio", "ext4", "crc32c_generic", "virtio_net"), modules)
    assert [path.name for path in found] == [
        "virtio_ring.ko",
        "virtio.ko",
        "failover.ko",
        "net-failover.ko",
        "virtio_net.ko",
    ]
    with pytest.raises(NoKernel, match="no module erofs"):
        kernel.in_order(("erofs",), modules)


def test_signatures_are_taken_off_modules(modules: Path) -> None:
    signed = (modules / "kernel/b/virtio.ko").read_bytes()
    bare = kernel.unsigned(signed)
    assert signed.startswith(bare)
    assert bare.endswith(b"name=x\0")
    assert kernel.unsigned(bare) == bare


def test_the_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    files = {"init": (b"#!x", 0o100755), "a": (b"", 0o100644), "with.ko": (b"12345", 0o100644)}
    archive = b"".join(kernel.entry(name, data, mode) for name, (data, mode) in files.items())
    archive += kernel.entry("TRAILER!!!", b"", 0)
    done = subprocess.run(["busybox", "cpio", "-i"], cwd=tmp_path, input=archive, capture_output=True, check=True)
    assert done.stderr.endswith(b"blocks\n")
    there = {path.name: (path.read_bytes(), path.stat().st_mode) for path in tmp_path.iterdir()}
    assert there == files


def test_the_newest_kernel_of_a_directory_is_found(tmp_path: Path) -> None:
    for version in ("6.1.0-9", "6.1.0-56", "6.1.0-10"):
        (tmp_path / "boot").mkdir(exist_ok=True)
        (tmp_path / f"boot/vmlinuz-{version}-cloud-amd64").touch()
        (tmp_path / f"usr/lib/modules/{version}-cloud-amd64").mkdir(parents=True)
    (tmp_path / "boot/vmlinuz-7.0.0-1-cloud-amd64").touch()  # its modules are not there
    assert kernel.find(tmp_path).version == "6.1.0-56-cloud-amd64"


def test_a_missing_kernel_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoKernel, match=f"{tmp_path}/boot; install Debian's package linux-image-cloud-amd64"):
        kernel.find(tmp_path)
    monkeypatch.setenv(kernel.ENVIRONMENT, str(tmp_path / "elsewhere"))
    with pytest.raises(NoKernel, match="elsewhere/boot"):
        kernel.find()


def test_what_was_prepared_is_not_made_again(modules: Path, tmp_path: Path) -> None:
    image = tmp_path / "vmlinuz"
    image.write_bytes(ELF)
    for name in (*kernel.MODULES, *kernel.VSOCK_MODULES):
        module(modules / f"kernel/all/{name}.ko", "")
    init = tmp_path / "init-1"
    init.write_bytes(b"init")
    source = kernel.Source(image=image, modules=modules, version="6.1")
    first = kernel.prepare(source, init, tmp_path / "cache")
    before = [os.stat(path).st_mtime_ns for path in (first.vmlinux, first.initrd)]
    assert kernel.prepare(source, init, tmp_path / "cache") == first
    assert [os.stat(path).st_mtime_ns for path in (first.vmlinux, first.initrd)] == before
    other = kernel.prepare(source, init.rename(tmp_path / "init-2"), tmp_path / "cache")
    assert other.vmlinux == first.vmlinux
    assert other.digest != first.digest
    assert Path(other.initrd).read_bytes() == Path(first.initrd).read_bytes()


def test_workers_of_a_host_share_what_was_prepared_until_none_of_them_has_it(modules: Path, tmp_path: Path) -> None:
    image, init, shared = tmp_path / "vmlinuz", tmp_path / "init-1", tmp_path / "shared"
    image.write_bytes(ELF)
    init.write_bytes(b"init")
    shared.mkdir()
    for name in (*kernel.MODULES, *kernel.VSOCK_MODULES):
        module(modules / f"kernel/all/{name}.ko", "")
    source = kernel.Source(image=image, modules=modules, version="6.1")
    one, other = (kernel.prepare(source, init, tmp_path / name, shared) for name in ("one", "other"))
    assert one.digest == other.digest
    for first, second in ((one.vmlinux, other.vmlinux), (one.initrd, other.initrd)):
        assert os.path.samefile(first, second)
    newer = kernel.Source(image=image, modules=modules, version="6.2")
    made = kernel.prepare(newer, init, tmp_path / "one", shared)
    kernel.forget_others(tmp_path / "one", [made.vmlinux, made.initrd])
    assert Path(other.vmlinux).read_bytes() == ELF
    assert len(list(shared.iterdir())) == 4
    kernel.forget_others(tmp_path / "other", [])
    newest = kernel.Source(image=image, modules=modules, version="6.3")
    kernel.prepare(newest, init, tmp_path / "one", shared)
    assert len(list(shared.iterdir())) == 4  # what only the other had has gone


def test_what_older_kernels_left_is_removed_but_not_what_machines_were_started_with(tmp_path: Path) -> None:
    for name in ("vmlinux-1", "initrd-1", "vmlinux-2", "initrd-2", "initrd-3", "guest-1"):
        (tmp_path / name).touch()
    kernel.forget_others(tmp_path, [str(tmp_path / name) for name in ("vmlinux-2", "initrd-3")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["guest-1", "initrd-3", "vmlinux-2"]
