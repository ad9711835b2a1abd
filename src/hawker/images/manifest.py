"""Manifests, indexes and image configurations, read and checked: bytes in, values or an `ImageError` out.

Both of the OCI image specification 1.1 (`manifest.md`, `image-index.md`, `config.md`) and of Docker's schema 2
(distribution.github.io/distribution/spec/manifest-v2-2/), which differ in media types only. What is not understood is
refused by its name; nothing is guessed but a media type that the sender left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from hawker.errors import ImageError
from hawker.model.image import Descriptor, Image, ImageConfig, Layer, Platform
from hawker.model.values import is_digest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"

ACCEPT = ", ".join((INDEX, DOCKER_LIST, MANIFEST, DOCKER_MANIFEST))

MANIFEST_BYTES_MAX = 4 << 20
"""What registries take at least and at most (distribution-spec.md, "Pushing Manifests")."""
CONFIG_BYTES_MAX = 4 << 20
PROGRAM_BYTES_MAX = 256 << 10
"""What is kept in memory of a configuration, 64 bytes for each of its words besides: environment, labels and so on."""
LAYERS_MAX = 127
"""As Docker has it."""
LAYER_BYTES_MAX = 1 << 40

_MANIFESTS = (MANIFEST, DOCKER_MANIFEST)
_INDEXES = (INDEX, DOCKER_LIST)
_CONFIGS = (CONFIG, DOCKER_CONFIG)
_LAYERS = (LAYER, f"{LAYER}+gzip", f"{LAYER}+zstd", DOCKER_LAYER, f"{DOCKER_LAYER}.gzip", f"{DOCKER_LAYER}.zstd")
_SCHEMA_1 = (
    "application/vnd.docker.distribution.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v1+prettyjws",
)
_NO_TYPE = ("", "application/json", "application/octet-stream", "text/plain", "text/html")
"""What servers send that know no better."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An image of an index. `platform` None: the index does not say."""

    descriptor: Descriptor
    platform: Platform | None


class Index(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[Entry, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` in order, the lowest first."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    urls: list[str] | None = None

    def checked(self, image: str, what: str, size_max: int) -> Descriptor:
        if not is_digest(self.digest):
            raise ImageError(image, f'{what} has the digest "{self.digest[:80]}"; only sha256 with 64 digits is known')
        if not 0 <= self.size <= size_max:
            raise ImageError(image, f"{what} is said to have {self.size} bytes; from 0 to {size_max} may be")
        return Descriptor(media_type=self.media_type, digest=self.digest, size=self.size)


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str | None = None


class _Entry(_Descriptor, frozen=True, rename="camel"):
    platform: _Platform | None = None


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    """Both kinds in one, so that a document which is both is seen (CVE-2021-41190)."""

    schema_version: int = 0
    media_type: str = ""
    manifests: list[_Entry] | None = None
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    fs_layers: Any = None


class _Program(msgspec.Struct, frozen=True, rename="pascal"):
    """Docker writes null for what is not set."""

    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    stop_signal: str | None = None
    exposed_ports: dict[str, msgspec.Raw] | None = None
    labels: dict[str, str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    type: str = "layers"
    diff_ids: list[str] | None = None


class _Config(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str | None = None
    config: _Program | None = None
    rootfs: _RootFs = _RootFs()


T = TypeVar("T")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(image: str, what: str, found: str, digest: str) -> None:
    if found != digest:
        raise ImageError(image, f"{what} is corrupt: it has the digest {found}, not {digest}")


def read_manifest(image: str, media_type: str, data: bytes) -> Manifest | Index:
    """What a registry answered when it was asked for `image`, which names it in errors. `media_type` is its
    `Content-Type` and may be ""."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise ImageError(image, f"its manifest has more than {MANIFEST_BYTES_MAX} bytes")
    media_type = media_type.partition(";")[0].strip().lower()
    if media_type in _SCHEMA_1:
        raise _schema_1(image)
    document = _decode(image, "its manifest", data, _Document)
    if document.schema_version != 2 or document.fs_layers is not None:
        if document.schema_version == 1 or document.fs_layers is not None:
            raise _schema_1(image)
        raise ImageError(image, f"its manifest has the schema version {document.schema_version}; 2 is known")
    if document.manifests is not None and (document.layers is not None or document.config is not None):
        raise ImageError(image, "its manifest is an index and a manifest at once")
    said = "" if media_type in _NO_TYPE else media_type
    if said and document.media_type and said != document.media_type:
        raise ImageError(image, f"its manifest calls itself {document.media_type} and was sent as {said}")
    kind = said or document.media_type or (INDEX if document.manifests is not None else MANIFEST)
    if kind in _INDEXES:
        return _read_index(image, document)
    if kind in _MANIFESTS:
        return _read_image(image, kind, document)
    raise ImageError(image, f"its manifest has the media type {kind[:120]}, which is not known")


def _schema_1(image: str) -> ImageError:
    return ImageError(
        image,
        "it has a manifest of schema 1, which is no longer read",
        hint="build or push it again with a recent tool",
    )


def _read_index(image: str, document: _Document) -> Index:
    if document.manifests is None:
        raise ImageError(image, "its index has no manifests")
    entries = []
    for number, entry in enumerate(document.manifests):
        descriptor = entry.checked(image, f"manifest {number} of its index", MANIFEST_BYTES_MAX)
        given = entry.platform
        platform = (
            Platform(os=given.os, architecture=given.architecture, variant=given.variant or "") if given else None
        )
        entries.append(Entry(descriptor=descriptor, platform=platform))
    return Index(entries=tuple(entries))


def _read_image(image: str, kind: str, document: _Document) -> Manifest:
    if document.config is None or document.layers is None:
        raise ImageError(image, f"its manifest has no {'config' if document.config is None else 'layers'}")
    config = document.config.checked(image, "its configuration", CONFIG_BYTES_MAX)
    if config.media_type not in _CONFIGS:
        named = config.media_type[:120] or "no media type"
        raise ImageError(image, f"its configuration has {named}: this is something else than a container image")
    if len(document.layers) > LAYERS_MAX:
        raise ImageError(image, f"it has {len(document.layers)} layers; {LAYERS_MAX} may be")
    layers = []
    for number, layer in enumerate(document.layers):
        descriptor = layer.checked(image, f"layer {number}", LAYER_BYTES_MAX)
        if descriptor.media_type not in _LAYERS:
            raise ImageError(image, f"layer {number} has the media type {descriptor.media_type[:120]}, not known here")
        layers.append(descriptor)
    return Manifest(media_type=kind, config=config, layers=tuple(layers))


def choose(image: str, index: Index, wanted: Platform) -> Descriptor:
    """The image of an index for a platform: the best variant that runs on it, the first among equals. Entries that say
    `unknown` are attestations and the like. One without a platform is taken when it is the only one."""
    best: Descriptor | None = None
    best_rank = -1
    for entry in index.entries:
        if entry.platform is None:
            continue
        rank = _rank(entry.platform, wanted)
        if rank > best_rank:
            best, best_rank = entry.descriptor, rank
    if best is None and len(index.entries) == 1 and index.entries[0].platform is None:
        best = index.entries[0].descriptor
    if best is not None:
        return best
    names = sorted({_name(entry.platform) for entry in index.entries if entry.platform and _is_known(entry.platform)})
    there = ", ".join(names[:20]) or "none at all"
    raise ImageError(image, f"it is not there for {_name(wanted)}; its platforms: {there}")


def _is_known(platform: Platform) -> bool:
    return "unknown" not in (platform.os, platform.architecture)


_VARIANTS: dict[str, tuple[str, ...]] = {
    "amd64": ("v1", "v2", "v3", "v4"),
    "arm64": ("v8", "v9"),
    "arm": ("v5", "v6", "v7", "v8"),
}
"""Of each architecture, from the lowest: what is built for one runs on those after it. The first, for arm v7, is
meant where nothing is said (containerd's `platforms` package)."""


def _rank(offered: Platform, wanted: Platform) -> int:
    """-1: does not run there; else the higher the better."""
    if offered.os != wanted.os or offered.architecture != wanted.architecture:
        return -1
    if offered.variant == wanted.variant:
        return 100
    known = _VARIANTS.get(wanted.architecture, ())
    usual = "v7" if wanted.architecture == "arm" else (known[0] if known else "")
    mine, its = wanted.variant or usual, offered.variant or usual
    if mine == its:
        return 99
    if mine in known and its in known and known.index(its) <= known.index(mine):
        return known.index(its)
    return -1


def runs_on(offered: Platform, wanted: Platform) -> bool:
    return _rank(offered, wanted) >= 0


def _name(platform: Platform) -> str:
    return "/".join(part for part in (platform.os, platform.architecture, platform.variant) if part)


def read_config(image: str, digest: str, manifest: Manifest, data: bytes, wanted: Platform) -> Image:
    """The image of a manifest whose digest is `digest`, from the bytes of its configuration, which must be for the
    platform `wanted`."""
    check_digest(image, "its configuration", digest_of(data), manifest.config.digest)
    config = _decode(image, "its configuration", data, _Config)
    platform = Platform(os=config.os, architecture=config.architecture, variant=config.variant or "")
    if not runs_on(platform, wanted):
        raise ImageError(
            image, f"it is made for {_name(platform) or 'no platform'}, and this worker is {_name(wanted)}"
        )
    diff_ids = config.rootfs.diff_ids or []
    if config.rootfs.type != "layers":
        raise ImageError(image, f"its root file system is made of {config.rootfs.type[:80]}; layers are known")
    if len(diff_ids) != len(manifest.layers):
        raise ImageError(image, f"it has {len(manifest.layers)} layers, and its configuration names {len(diff_ids)}")
    for number, diff_id in enumerate(diff_ids):
        if not is_digest(diff_id):
            raise ImageError(image, f'diff_id {number} of its configuration is "{diff_id[:80]}", which is no digest')
    layers = tuple(
        Layer(media_type=layer.media_type, digest=layer.digest, size=layer.size, diff_id=diff_id)
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
    )
    program = _program(config.config or _Program())
    words = (*program.entrypoint, *program.cmd, *program.env, *program.exposed, *program.labels)
    words = (*words, *program.labels.values(), program.user, program.working_dir, program.stop_signal)
    if (size := sum(len(word) + 64 for word in words)) > PROGRAM_BYTES_MAX:
        raise ImageError(
            image,
            f"its environment, labels and the like have {size} bytes; {PROGRAM_BYTES_MAX} may be, 64 counted for each",
        )
    return Image(digest=digest, platform=platform, config=program, layers=layers)


def _program(given: _Program) -> ImageConfig:
    return ImageConfig(
        entrypoint=tuple(given.entrypoint or ()),
        cmd=tuple(given.cmd or ()),
        env=tuple(pair for pair in given.env or () if pair.find("=") > 0),
        user=given.user or "",
        working_dir=given.working_dir or "",
        stop_signal=given.stop_signal or "",
        exposed=tuple(given.exposed_ports or ()),
        labels=given.labels or {},
    )


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """What names a layer on top of those below it (config.md, "Layer ChainID"), for each of them."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(digest_of(f"{chain[-1]} {diff_id}".encode()) if chain else diff_id)
    return chain


def _decode(image: str, what: str, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImageError(image, f"{what} cannot be read: {error}") from error
