"""Images in archives and directories are read whole, checked, and ready for a store; directories become layers."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.kit.oci import (
    Made,
    directory,
    file,
    hardlink,
    image,
    index,
    layer,
    opaque,
    symlink,
    whiteout,
    write_docker_archive,
    write_layout,
    write_layout_archive,
)
from tests.kit.trees import overlaid, picture

from hawker.errors import ImageError
from hawker.images.manifest import Manifest, digest_of, read_config, read_manifest
from hawker.images.tree.archive import Archived, read_archive, read_files
from hawker.images.tree.pack import Compression, describe, pack_directory
from hawker.images.tree.unpacking import TreeLimits, merge, unpack
from hawker.images.tree.values import LayerRefused
from hawker.model.image import Image, ImageConfig, Layer, Platform

AMD64 = Platform()
MADE = image(
    [
        layer([directory("etc"), file("etc/motd", b"hello"), file("gone")]),
        layer([whiteout("gone"), symlink("sh", "bin/sh")], compression="zstd"),
    ],
    {"Cmd": ["/bin/sh"], "Env": ["A=b"]},
)
OTHER = image([layer([file("other")])], architecture="arm64")


def checked(archived: Archived) -> Image:
    """Read as a store does, with each blob's digest."""
    manifest = read_manifest("test", "", archived.manifest)
    assert isinstance(manifest, Manifest)
    for digest, blob in archived.blobs.items():
        assert digest_of(blob if isinstance(blob, bytes) else blob.read_bytes()) == digest
    assert set(archived.blobs) == {manifest.config.digest, *(each.digest for each in manifest.layers)}
    config = archived.blobs[manifest.config.digest]
    data = config if isinstance(config, bytes) else config.read_bytes()
    return read_config("test", digest_of(archived.manifest), manifest, data, AMD64)


def read(path: Path, wanted: str = "") -> Archived:
    into = path.with_name(path.name + ".into")
    into.mkdir()
    return read_archive(path, into, AMD64, wanted=wanted)


def test_a_layout_in_a_directory_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    path = write_layout(tmp_path / "layout", {"example.com/app:1": MADE})
    before = picture(path)
    archived = read(path)
    assert archived.names == ("example.com/app:1",)
    assert archived.manifest == MADE.manifest
    assert [each.diff_id for each in checked(archived).layers] == [each.diff_id for each in MADE.layers]
    assert picture(path) == before


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
def test_a_layout_in_a_tar_is_read_compressed_or_not(tmp_path: Path, compress: Any) -> None:
    path = write_layout_archive(tmp_path / "a.tar", {"latest": MADE})
    path.write_bytes(compress(path.read_bytes()))
    assert checked(read(path)).digest == MADE.digest


def test_the_image_of_this_platform_is_taken_from_an_index(tmp_path: Path) -> None:
    both = index([(OTHER, {"os": "linux", "architecture": "arm64"}), (MADE, {"os": "linux", "architecture": "amd64"})])
    path = write_layout_archive(tmp_path / "a.tar", {"latest": both})
    assert checked(read(path)).digest == MADE.digest


def test_one_of_several_images_is_taken_by_its_name(tmp_path: Path) -> None:
    path = write_layout_archive(tmp_path / "a.tar", {"one": MADE, "two": OTHER})
    assert read(path, wanted="one").manifest == MADE.manifest


def test_of_several_images_none_is_taken_without_a_name(tmp_path: Path) -> None:
    path = write_layout_archive(tmp_path / "a.tar", {"one": MADE, "two": OTHER})
    with pytest.raises(ImageError, match=r"a\.tar: it has 2 images \(one, two\)"):
        read(path)


def test_a_docker_archive_is_read_with_its_configuration_as_it_is(tmp_path: Path) -> None:
    found = read(write_docker_archive(tmp_path / "a.tar", {"example.com/app:1": MADE}))
    read_image = checked(found)
    assert found.names == ("example.com/app:1",)
    assert [each.diff_id for each in read_image.layers] == [each.diff_id for each in MADE.layers]
    assert [each.digest for each in read_image.layers] == [each.diff_id for each in MADE.layers]
    assert read_image.config.cmd == ("/bin/sh",)


def test_a_docker_archive_may_name_a_layer_by_a_link(tmp_path: Path) -> None:
    plain = write_docker_archive(tmp_path / "plain.tar", {"a": MADE})
    with tarfile.open(plain) as source, tarfile.open(tmp_path / "linked.tar", "w") as target:
        data = {member.name: source.extractfile(member) for member in source}
        names = {name: f"again/{name}" for name in data if name.endswith("layer.tar")}
        for name, content in data.items():
            assert content is not None
            body = content.read()
            if name == "manifest.json":
                body = json.dumps(
                    [{**one, "Layers": [names[n] for n in one["Layers"]]} for one in json.loads(body)]
                ).encode()
            file(name, body).add_to(target)
        for name, again in names.items():
            symlink(again, f"../../{name}").add_to(target)
    assert len(checked(read(tmp_path / "linked.tar")).layers) == 2


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
@pytest.mark.parametrize("transport", ["docker-archive", "oci-archive", "oci"])
def test_what_skopeo_writes_is_read(tmp_path: Path, transport: str) -> None:
    gzipped = image([layer([file("a", b"1")]), layer([whiteout("a")])], {"Cmd": ["/a"]})
    layout = write_layout(tmp_path / "layout", {"t": gzipped})
    target = f"{transport}:{tmp_path / 'out'}:example.com/app:1"
    done = subprocess.run(["skopeo", "copy", f"oci:{layout}:t", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "out")
    assert [each.diff_id for each in checked(found).layers] == [each.diff_id for each in gzipped.layers]
    assert found.names == ("example.com/app:1",)


def opened_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def tar(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            file(name, data).add_to(archive)
    return buffer.getvalue()


def docker(config: bytes, layers: list[str], **members: bytes) -> bytes:
    listing = json.dumps([{"Config": "c.json", "RepoTags": ["a:1"], "Layers": layers}]).encode()
    return tar(**{"manifest.json": listing, "c.json": config, **members})


def layout_of(made: Made, **changes: bytes) -> bytes:
    blobs = {f"blobs/sha256/{digest[7:]}": data for digest, data in {**made.blobs, made.digest: made.manifest}.items()}
    listing = json.dumps({"schemaVersion": 2, "manifests": [made.descriptor]}).encode()
    return tar(**{"oci-layout": b"{}", "index.json": listing, **blobs, **changes})


BLOB = f"blobs/sha256/{MADE.layers[0].digest[7:]}"
CONFIG = f"blobs/sha256/{digest_of(MADE.config)[7:]}"
BAD: dict[str, tuple[bytes, str]] = {
    "is a tar of files": (tar(f=b"x"), "it has neither index.json nor manifest.json"),
    "is no tar": (b"#!/bin/sh\n" * 200, "wrong checksum"),
    "is empty": (b"", "it has neither index.json nor manifest.json"),
    "ends in the middle": (layout_of(MADE)[:2000], "ends in the middle"),
    "has a corrupt blob": (layout_of(MADE, **{BLOB: b"other bytes"}), f"its blob {MADE.layers[0].digest} is corrupt"),
    "has an index of nonsense": (layout_of(MADE, **{"index.json": b"nonsense"}), "its index.json cannot be read"),
    "has an index without end": (layout_of(MADE, **{"index.json": b" " * (5 << 20)}), "is longer than 4194304 bytes"),
    "has an index of nothing": (
        layout_of(MADE, **{"index.json": b'{"manifests": []}'}),
        "its index.json names no image",
    ),
    "lacks the manifest": (
        layout_of(MADE, **{"index.json": json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64}]}).encode()}),
        "which is its manifest",
    ),
    "has a digest that climbs": (
        layout_of(
            MADE, **{"index.json": json.dumps({"manifests": [{"digest": "sha256:../../../etc/passwd"}]}).encode()}
        ),
        "only sha256 is known",
    ),
    "names a configuration outside": (
        tar(**{"manifest.json": b'[{"Config": "../../etc/passwd", "Layers": []}]'}),
        "it has no '../../etc/passwd'",
    ),
    "names a layer outside": (docker(b"{}", ["/etc/passwd"]), "it has no '/etc/passwd'"),
    "names a layer that is not there": (docker(b"{}", ["x/layer.tar"]), "it has no 'x/layer.tar'"),
    "compresses too well": (gzip.compress(tar(**{"manifest.json": b"[]", "zeros": bytes(300 << 20)})), "bomb"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_archive_is_refused_that(tmp_path: Path, what: str) -> None:
    data, reason = BAD[what]
    (tmp_path / "bad.tar").write_bytes(data)
    with pytest.raises(ImageError) as caught:
        read(tmp_path / "bad.tar")
    assert reason in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "bad.tar.into"]


def test_an_archive_takes_neither_memory_for_names_nor_the_room_of_others(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(tar(**{"n" * 5000: b"x"}))
    (tmp_path / "into").mkdir()
    with pytest.raises(ImageError, match="too long a name"):
        read_archive(tmp_path / "archive", tmp_path / "into", AMD64)
    (tmp_path / "archive").write_bytes(tar(large=b"x"))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        read_archive(tmp_path / "archive", tmp_path / "into", AMD64, limits=TreeLimits(free=1 << 60))


def test_of_an_archive_that_is_refused_midway_nothing_is_read_any_more(tmp_path: Path) -> None:
    threads = threading.active_count()
    (tmp_path / "archive").write_bytes(tar(**{"n" * 5000: b"x", "large": os.urandom(32 << 20)}))
    (tmp_path / "into").mkdir()
    with pytest.raises(ImageError):
        read_archive(tmp_path / "archive", tmp_path / "into", AMD64)
    assert threading.active_count() == threads
    assert not [link for link in opened_files() if link.startswith(str(tmp_path))]


def test_an_archive_with_links_out_of_it_reads_nothing_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        file("manifest.json", b'[{"Config": "c.json", "Layers": []}]').add_to(archive)
        symlink("c.json", str(secret)).add_to(archive)
    (tmp_path / "a.tar").write_bytes(buffer.getvalue())
    with pytest.raises(ImageError, match=r"it has no 'c\.json'"):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gzip", "zstd"])
async def test_a_tar_of_files_becomes_an_image_that_unpacks(tmp_path: Path, compress: Any) -> None:
    (tmp_path / "files.tar").write_bytes(compress(tar(app=b"#!/bin/sh\n")))
    (tmp_path / "into").mkdir()
    config = ImageConfig(entrypoint=("/app",), env=("A=b",), exposed=("80/tcp",), labels={"k": "v"}, user="1:1")
    archived = read_files(tmp_path / "files.tar", tmp_path / "into", config, AMD64)
    read_image = checked(archived)
    assert read_image.config == config
    one = read_image.layers[0]
    blob = archived.blobs[one.digest]
    assert isinstance(blob, Path)
    assert one.size == blob.stat().st_size


def test_a_description_says_what_it_was_given_and_is_the_same_each_time() -> None:
    config = ImageConfig(cmd=("a",), working_dir="/w", stop_signal="SIGINT")
    arm = Platform(architecture="arm64", variant="v8")
    one = Layer(
        media_type="application/vnd.oci.image.layer.v1.tar", digest=digest_of(b""), size=0, diff_id=digest_of(b"")
    )
    manifest, described = describe([one], config, arm)
    assert (manifest, described) == describe([one], config, arm)
    parsed = read_manifest("test", "", manifest)
    assert isinstance(parsed, Manifest)
    made = read_config("test", digest_of(manifest), parsed, described, arm)
    assert (made.config, made.platform, made.layers) == (config, arm, (one,))


# --- packing --------------------------------------------------------------------------------------------------------


def fill(root: Path) -> None:
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(os.urandom(10_000))
    (root / "bin/tool").chmod(0o4755)
    os.link(root / "bin/tool", root / "bin/again")
    (root / "grüße\n").write_bytes(b"x")
    (root / "link").symlink_to("/etc/passwd")
    (root / ("long" * 50)).mkdir()
    (root / ("long" * 50) / ("name" * 50)).write_bytes(b"long")
    os.mkfifo(root / "pipe", 0o600)
    os.setxattr(root / "bin/again", "user.note", b"\xff\x00=\n")
    os.utime(root / "bin/tool", ns=(1, 1_600_000_000_123_456_789))
    (root / "bin").chmod(0o750)


@pytest.mark.root
@pytest.mark.parametrize("compression", ["gzip", "zstd", ""])
async def test_a_directory_packed_and_unpacked_is_what_it_was(tmp_path: Path, compression: Compression) -> None:
    root = tmp_path / "root"
    fill(root)
    os.chown(root / "grüße\n", 3_000_000_000, 7)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    one = pack_directory(root, tmp_path / "blob", compression=compression, keep_owners=True)
    assert one.digest == digest_of((tmp_path / "blob").read_bytes())
    unpacked = await unpack(tmp_path / "blob", one.media_type, one.diff_id, tmp_path / "tree", limits=TreeLimits())
    await merge(tmp_path / "tree", unpacked, [])
    assert picture(tmp_path / "tree") == picture(root)


def test_the_same_files_give_the_same_bytes_whoever_has_them_and_whenever(tmp_path: Path) -> None:
    for name, names in (("one", ["a", "b", "c"]), ("two", ["c", "b", "a"])):
        (tmp_path / name).mkdir()
        for each in names:
            (tmp_path / name / each).write_bytes(each.encode())
            os.utime(tmp_path / name / each, (len(name + each), len(names) * hash(name) % 1000))
    one = pack_directory(tmp_path / "one", tmp_path / "1", mtime=0)
    two = pack_directory(tmp_path / "two", tmp_path / "2", mtime=0)
    assert one == two
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_files_of_an_app_can_be_put_below_a_directory_and_some_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("main.py", "main.pyc", "build/out", "src/build/kept", ".git/config"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    pack_directory(root, tmp_path / "blob", under="/srv/app/", exclude=["*.pyc", "build/*", ".git"])
    with tarfile.open(tmp_path / "blob") as archive:
        names = archive.getnames()
    assert names == [
        *("srv", "srv/app", "srv/app/build", "srv/app/main.py", "srv/app/src", "srv/app/src/build"),
        "srv/app/src/build/kept",
    ]


def test_a_directory_that_leads_out_of_the_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out of the image"):
        pack_directory(tmp_path, tmp_path / "blob", under="../up")
    assert not list(tmp_path.iterdir())


@pytest.mark.root
async def test_a_layers_tree_packed_again_is_a_layer_that_does_the_same(tmp_path: Path) -> None:
    base = [directory("d"), file("d/one"), file("d/two"), directory("e"), file("e/three"), file("f", b"1")]
    top = [whiteout("d/one"), directory("e"), opaque("e"), file("e/four"), file("f", b"2"), hardlink("g", "f")]
    trees: list[Path] = []
    pictures = []
    for name, entries in (("base", base), ("top", top)):
        made = layer(entries)
        (tmp_path / "blob").write_bytes(made.blob)
        unpacked = await unpack(tmp_path / "blob", made.media_type, made.diff_id, tmp_path / name, limits=TreeLimits())
        await merge(tmp_path / name, unpacked, trees)
        trees.insert(0, tmp_path / name)
    pictures.append(overlaid(trees))
    again = pack_directory(tmp_path / "top", tmp_path / "packed", keep_owners=True)
    unpacked = await unpack(
        tmp_path / "packed", again.media_type, again.diff_id, tmp_path / "again", limits=TreeLimits()
    )
    await merge(tmp_path / "again", unpacked, [tmp_path / "base"])
    pictures.append(overlaid([tmp_path / "again", tmp_path / "base"]))
    assert pictures[0] == pictures[1]
    assert set(pictures[0]) == {".", "d", "d/two", "e", "e/four", "f", "g"}


async def test_an_image_made_of_hostile_files_is_refused_when_it_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "files.tar").write_bytes(tar(**{"../out": b"x"}))
    (tmp_path / "into").mkdir()
    archived = read_files(tmp_path / "files.tar", tmp_path / "into", ImageConfig(), AMD64)
    one = checked(archived).layers[0]
    blob = archived.blobs[one.digest]
    assert isinstance(blob, Path)
    with pytest.raises(LayerRefused, match="would leave the root"):
        await unpack(blob, one.media_type, one.diff_id, tmp_path / "tree", limits=TreeLimits())
