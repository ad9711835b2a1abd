"""OCI images made in memory, byte for byte the same each time: layers from entries, images, indexes, layouts, archives.

```
base = layer([directory("etc"), file("etc/motd", b"hello")])
top = layer([whiteout("etc/motd")], compression="zstd")
made = image([base, top], config={"Cmd": ["/bin/sh"]})
write_layout(path, {"latest": made})       # a directory as skopeo's `oci:` and umoci take it
```

`Made.blobs` is all that a registry needs; `Made.manifest` and `Made.digest` name it. `busybox_image()` is the smallest
image with a shell, for whoever needs a container that runs.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"

MTIME = 1_600_000_000


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One entry of a layer's tar, as it is written there: nothing is checked or made right."""

    name: str
    kind: bytes
    data: bytes = b""
    target: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = MTIME
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[str, bytes] = field(default_factory=dict)

    def add_to(self, tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(self.name)
        info.type = self.kind
        info.linkname = self.target
        info.mode = self.mode
        info.uid, info.gid = self.uid, self.gid
        info.mtime = self.mtime
        info.devmajor, info.devminor = self.device
        info.size = len(self.data)
        info.pax_headers = {
            f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in self.xattrs.items()
        }
        tar.addfile(info, io.BytesIO(self.data))


def file(name: str, data: bytes = b"", mode: int = 0o644, **more: Any) -> Entry:
    return Entry(name, tarfile.REGTYPE, data=data, mode=mode, **more)


def directory(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return Entry(name, tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str, **more: Any) -> Entry:
    return Entry(name, tarfile.SYMTYPE, target=target, mode=0o777, **more)


def hardlink(name: str, target: str, **more: Any) -> Entry:
    return Entry(name, tarfile.LNKTYPE, target=target, **more)


def fifo(name: str, mode: int = 0o644, **more: Any) -> Entry:
    return Entry(name, tarfile.FIFOTYPE, mode=mode, **more)


def character_device(name: str, major: int, minor: int, mode: int = 0o666, **more: Any) -> Entry:
    return Entry(name, tarfile.CHRTYPE, device=(major, minor), mode=mode, **more)


def block_device(name: str, major: int, minor: int, mode: int = 0o660, **more: Any) -> Entry:
    return Entry(name, tarfile.BLKTYPE, device=(major, minor), mode=mode, **more)


def whiteout(name: str) -> Entry:
    """Removes `name` of the layers below."""
    parent, _, base = name.rpartition("/")
    return file(f"{parent}/.wh.{base}" if parent else f".wh.{base}", mode=0)


def opaque(name: str) -> Entry:
    """Hides everything that the layers below have in the directory `name`."""
    return file(f"{name}/.wh..wh..opq" if name else ".wh..wh..opq", mode=0)


def tar_of(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for entry in entries:
            entry.add_to(tar)
    return buffer.getvalue()


@dataclass(frozen=True)
class MadeLayer:
    blob: bytes
    media_type: str
    diff_id: str

    @property
    def digest(self) -> str:
        return digest_of(self.blob)

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.blob)}


def layer(entries: Iterable[Entry] | bytes, compression: str = "gzip", docker: bool = False) -> MadeLayer:
    """A layer from entries, or from the bytes of a tar. `compression`: `gzip`, `zstd` or `` for none."""
    tar = entries if isinstance(entries, bytes) else tar_of(entries)
    match compression:
        case "gzip":
            blob = gzip.compress(tar, compresslevel=1, mtime=0)
        case "zstd":
            blob = zstandard.ZstdCompressor(level=1).compress(tar)
        case _:
            blob = tar
    media_type = DOCKER_LAYER if docker else LAYER + (f"+{compression}" if compression else "")
    return MadeLayer(blob, media_type, digest_of(tar))


@dataclass(frozen=True)
class Made:
    """An image or an index: its manifest, and all blobs by digest, those of the manifests in an index too."""

    manifest: bytes
    media_type: str
    blobs: Mapping[str, bytes]
    manifests: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)  # of an index: digest -> type, bytes
    layers: Sequence[MadeLayer] = ()
    config: bytes = b""

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.manifest)}


def image(
    layers: Sequence[MadeLayer],
    config: Mapping[str, Any] | None = None,
    *,
    architecture: str = "amd64",
    variant: str = "",
    os: str = "linux",
    docker: bool = False,
    diff_ids: Sequence[str] | None = None,
) -> Made:
    """`config` is what the image configuration has under that name: `Cmd`, `Env`, `User`, ... `diff_ids` in place of
    the true ones, for images that lie."""
    body: dict[str, Any] = {
        "architecture": architecture,
        "os": os,
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids or [one.diff_id for one in layers])},
        "history": [{"created_by": "test"} for _ in layers],
    }
    if variant:
        body["variant"] = variant
    config_bytes = _json(body)
    media_type = DOCKER_MANIFEST if docker else MANIFEST
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": {
                "mediaType": DOCKER_CONFIG if docker else CONFIG,
                "digest": digest_of(config_bytes),
                "size": len(config_bytes),
            },
            "layers": [one.descriptor for one in layers],
        }
    )
    blobs = {digest_of(config_bytes): config_bytes} | {one.digest: one.blob for one in layers}
    return Made(manifest, media_type, blobs, layers=tuple(layers), config=config_bytes)


def index(images: Sequence[tuple[Made, Mapping[str, str]]], docker: bool = False) -> Made:
    """An index of images with the platform of each: `(image, {"os": "linux", "architecture": "arm64"})`."""
    media_type = DOCKER_LIST if docker else INDEX
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": media_type,
            "manifests": [{**made.descriptor, "platform": dict(platform)} for made, platform in images],
        }
    )
    blobs: dict[str, bytes] = {}
    manifests: dict[str, tuple[str, bytes]] = {}
    for made, _ in images:
        blobs.update(made.blobs)
        manifests[made.digest] = made.media_type, made.manifest
    return Made(manifest, media_type, blobs, manifests)


def write_layout(path: Path, tagged: Mapping[str, Made]) -> Path:
    """An OCI image layout (image-layout.md) with these tags. For an empty tag the image has no name in it."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    entries = []
    for tag, made in tagged.items():
        names = {"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {}
        entries.append({**made.descriptor, **names})
        every = dict(made.blobs) | {digest: data for digest, (_, data) in made.manifests.items()}
        for digest, data in (every | {made.digest: made.manifest}).items():
            (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    (path / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    (path / "index.json").write_bytes(_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}))
    return path


def write_layout_archive(path: Path, tagged: Mapping[str, Made]) -> Path:
    """The layout as one tar, as `skopeo copy ... oci-archive:` and `docker buildx` write it."""
    layout = path.with_name(path.name + ".layout")
    write_layout(layout, tagged)
    with tarfile.open(path, "w") as tar:
        for each in sorted(layout.rglob("*")):
            tar.add(each, each.relative_to(layout).as_posix(), recursive=False)
    shutil.rmtree(layout)
    return path


def write_docker_archive(path: Path, tagged: Mapping[str, Made]) -> Path:
    """What `docker save` wrote until version 25: `manifest.json`, a configuration and uncompressed layers."""
    with tarfile.open(path, "w") as tar:
        listing = []
        for name, made in tagged.items():
            config_name = digest_of(made.config).removeprefix("sha256:") + ".json"
            names = []
            file(config_name, made.config).add_to(tar)
            for one in made.layers:
                raw = _uncompressed(one)
                names.append(f"{digest_of(raw).removeprefix('sha256:')}/layer.tar")
                file(names[-1], raw).add_to(tar)
            listing.append({"Config": config_name, "RepoTags": [name], "Layers": names})
        file("manifest.json", _json(listing)).add_to(tar)
    return path


def _uncompressed(one: MadeLayer) -> bytes:
    if one.media_type.endswith("gzip"):
        return gzip.decompress(one.blob)
    if one.media_type.endswith("zstd"):
        return zstandard.ZstdDecompressor().decompressobj().decompress(one.blob)
    return one.blob


@functools.cache
def busybox_layer(compression: str = "gzip") -> MadeLayer:
    """/bin with a static busybox (Debian's busybox-static) and a link for each of its programs, /etc with users and
    groups, /tmp, /root, empty mount points. Skips the test where busybox is not installed."""
    path = shutil.which("busybox")
    if path is None:
        pytest.skip("needs busybox (Debian: busybox-static)")
    program = Path(path).read_bytes()
    if b"/ld-linux" in program or b"/ld-musl" in program:
        pytest.skip("needs a static busybox (Debian: busybox-static)")
    applets = subprocess.run([path, "--list"], check=True, capture_output=True, text=True).stdout.split()
    entries = [directory(name) for name in ("bin", "dev", "etc", "home", "home/user", "proc", "root", "run", "sys")]
    entries += [directory("usr"), directory("usr/bin"), directory("var"), directory("var/log")]
    entries += [directory("tmp", 0o1777), symlink("sbin", "bin"), symlink("usr/sbin", "bin")]
    entries.append(file("bin/busybox", program, 0o755))
    entries += [symlink(f"bin/{name}", "busybox") for name in sorted(applets) if name != "busybox"]
    entries.append(file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"))
    entries.append(file("etc/group", b"root:x:0:\nuser:x:1000:\nextra:x:2000:user\n"))
    entries.append(symlink("usr/bin/env", "../../bin/env"))
    return layer(entries, compression)


@functools.cache
def _busybox_image(compression: str) -> Made:
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return image([busybox_layer(compression)], {"Cmd": ["/bin/sh"], "Env": [path]})


def busybox_image(
    *above: MadeLayer, compression: str = "gzip", config: Mapping[str, Any] | None = None, **more: Any
) -> Made:
    """The busybox layer, and these above it. `config` replaces that of the image: `Cmd` `/bin/sh`, `Env` a `PATH`."""
    if not above and config is None and not more:
        return _busybox_image(compression)
    plain = json.loads(_busybox_image(compression).config)["config"]
    return image([busybox_layer(compression), *above], plain if config is None else config, **more)


def tree_of(path: Path) -> dict[str, str]:
    """A tree in words, for comparing: `{"etc": "d755", "etc/motd": "f644 hello", "sh": "l busybox"}`. Sockets and
    devices by their type and number."""
    found = {}
    for each in sorted(path.rglob("*")):
        about = each.lstat()
        name = each.relative_to(path).as_posix()
        mode = f"{stat.S_IMODE(about.st_mode):o}"
        if stat.S_ISLNK(about.st_mode):
            found[name] = f"l {each.readlink()}"
        elif stat.S_ISDIR(about.st_mode):
            found[name] = f"d{mode}"
        elif stat.S_ISREG(about.st_mode):
            found[name] = f"f{mode} {each.read_bytes().decode('utf-8', 'backslashreplace')}"
        else:
            found[name] = f"{stat.S_IFMT(about.st_mode):o} {mode} {about.st_rdev}"
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
