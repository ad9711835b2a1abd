"""Images: pulled, unpacked and packed beside skopeo, umoci and tar: `python -m bench.images [--quick] [--json FILE]`.

One image in two layers, of files that this host has; Debian's docker-registry on loopback. Every way is taken once per
round, one after the other, so that a busy machine is busy for all; rows are medians, and ratios are medians of the
rounds' ratios. Hawker gives a tree per layer, on disk and checked; umoci gives one tree and leaves writing it to the
system. `--on` says where: memory (/dev/shm) by default, as the first touch of a disk's blocks can cost more than the
work.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter

import msgspec
from tests.kit.registry import DockerRegistry

from bench.command import Table, options, say_machine, told
from hawker.host import live
from hawker.images.manifest import digest_of
from hawker.images.service import Images
from hawker.images.settings import ImageSettings
from hawker.images.tree.pack import Compression, describe, pack_directory
from hawker.images.tree.unpacking import TreeLimits, merge, remove, unpack
from hawker.model.image import ImageConfig, Layer, Platform

MB = 1_000_000
FROM = ("/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/perl", "/usr/lib/git-core", "/usr/bin", "/usr/share/doc")
SHARE = 0.75
"""Of the bytes, in the lower layer."""


class Sizes(msgspec.Struct, frozen=True):
    rounds: int
    bytes: int


FULL = Sizes(rounds=7, bytes=105 * MB)
QUICK = Sizes(rounds=1, bytes=MB)
Way = Callable[[Path], Awaitable[None]]


class Packed(msgspec.Struct, frozen=True):
    """`layers` with their blobs in `directory`, by digest; `bytes` of the files."""

    directory: Path
    layers: tuple[Layer, ...]
    manifest: bytes
    config: bytes

    def blob(self, layer: Layer) -> Path:
        return self.directory / layer.digest.removeprefix("sha256:")


def gather(into: Path, wanted: int) -> tuple[int, int]:
    """Copy files of this host. Returns their number and bytes."""
    count = total = 0
    for top in FROM:
        for directory, _, names in os.walk(top):
            for name in sorted(names):
                source = Path(directory) / name
                if source.is_symlink() or not source.is_file() or source.stat().st_size > wanted // 10:
                    continue
                layer = "lower" if total < wanted * SHARE else "upper"
                target = into / layer / str(source).lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                count += 1
                total += target.stat().st_size
                if total >= wanted:
                    return count, total
    return count, total


def packed(files: Path, directory: Path, compression: Compression) -> Packed:
    directory.mkdir()
    layers = []
    for name in ("lower", "upper"):
        layer = pack_directory(files / name, directory / name, compression=compression)
        (directory / name).rename(directory / layer.digest.removeprefix("sha256:"))
        layers.append(layer)
    manifest, config = describe(layers, ImageConfig(cmd=("/bin/true",)), Platform())
    return Packed(directory=directory, layers=tuple(layers), manifest=manifest, config=config)


def write_layout(made: Packed, path: Path) -> None:
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for layer in made.layers:
        shutil.copyfile(made.blob(layer), blobs / layer.digest[7:])
    for data in (made.manifest, made.config):
        (blobs / digest_of(data)[7:]).write_bytes(data)
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": digest_of(made.manifest),
        "size": len(made.manifest),
        "annotations": {"org.opencontainers.image.ref.name": "t"},
    }
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))


async def run(*argv: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(*map(str, argv), stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0, argv


async def timed(way: Way, home: Path) -> float:
    """Seconds, in a directory of its own that is gone afterwards."""
    place = Path(tempfile.mkdtemp(dir=home))
    began = perf_counter()
    await way(place)
    took = perf_counter() - began
    await remove(place)
    return took


async def compare(table: Table, what: str, ways: dict[str, Way], home: Path, rounds: int, size: int) -> None:
    """One row per way; the first is ours, and those after it say how many times its time they take."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + (rounds > 1)):
        for name, way in ways.items():
            took = await timed(way, home)
            if number or rounds == 1:  # the first round warms the caches
                times[name].append(took)
    ours = next(iter(ways))
    for name, taken in times.items():
        ratios = [mine / its for mine, its in zip(times[ours], taken, strict=True)]
        note = f"{statistics.median(taken):.3f} s"
        if name != ours:
            note += f"; Hawker takes {statistics.median(ratios):.2f} times that"
        table.add(f"{what}: {name}", size / MB / statistics.median(taken), "MB/s", "", note)


async def unpacked(made: Packed, place: Path) -> None:
    """Side by side, as a pull does it, and joined from below."""
    found = await asyncio.gather(
        *(
            unpack(made.blob(layer), layer.media_type, layer.diff_id, place / layer.diff_id[7:], limits=TreeLimits())
            for layer in made.layers
        )
    )
    trees: list[Path] = []
    for layer, one in zip(made.layers, found, strict=True):
        await merge(place / layer.diff_id[7:], one, trees)
        trees.insert(0, place / layer.diff_id[7:])


async def tarred(made: Packed, place: Path, how: str) -> None:
    for layer in made.layers:
        (place / layer.diff_id[7:]).mkdir()
        await run("tar", how, "-xf", made.blob(layer), "-C", place / layer.diff_id[7:])


async def pulled(reference: str, place: Path) -> None:
    images = await Images(place / "images", ImageSettings(docker_config=""), live()).open()
    try:
        await images.pull(reference)
    finally:
        await images.close()


async def copied_and_unpacked(reference: str, place: Path) -> None:
    await run("skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{reference}", f"oci:{place}/layout:t")
    await run("umoci", "unpack", "--image", f"{place}/layout:t", place / "bundle")


async def repacked(files: Path, place: Path) -> None:
    for name in ("lower", "upper"):
        await asyncio.to_thread(pack_directory, files / name, place / name, compression="gzip", mtime=0)


async def tar_made(files: Path, place: Path) -> None:
    for name in ("lower", "upper"):
        await run("tar", "--sort=name", "-czf", place / name, "-C", files / name, ".")


async def measure(table: Table, sizes: Sizes, home: Path) -> None:
    files = home / "files"
    count, size = gather(files, sizes.bytes)
    gzip = packed(files, home / "gzip", "gzip")
    zstd = packed(files, home / "zstd", "zstd")
    sent = sum(layer.size for layer in gzip.layers)
    table.add("the image: files", count, "", "", f"{size / MB:.0f} MB in two layers, {sent / MB:.0f} MB as they travel")
    write_layout(gzip, home / "layout")
    registry = DockerRegistry(home / "registry")
    registry.start()
    try:
        reference = f"{registry.host}/bench:t"
        await run(*("skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{home}/layout:t", f"docker://{reference}"))

        async def umoci(place: Path) -> None:
            await run("umoci", "unpack", "--image", f"{home}/layout:t", place / "bundle")

        pull: dict[str, Way] = {
            "Hawker": lambda place: pulled(reference, place),
            "skopeo copy, umoci unpack": lambda place: copied_and_unpacked(reference, place),
        }
        await compare(table, "pull and unpack", pull, home, sizes.rounds, size)
        from_gzip: dict[str, Way] = {
            "Hawker": lambda place: unpacked(gzip, place),
            "umoci unpack": umoci,
            "tar -xz": lambda place: tarred(gzip, place, "-z"),
        }
        await compare(table, "unpack gzip", from_gzip, home, sizes.rounds, size)
        from_zstd: dict[str, Way] = {
            "Hawker": lambda place: unpacked(zstd, place),
            "tar -x --zstd": lambda place: tarred(zstd, place, "--zstd"),
        }
        await compare(table, "unpack zstd", from_zstd, home, sizes.rounds, size)
        packing: dict[str, Way] = {
            "Hawker": lambda place: repacked(files, place),
            "tar -cz": lambda place: tar_made(files, place),
        }
        await compare(table, "pack gzip", packing, home, max(1, sizes.rounds // 2), size)
    finally:
        registry.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--on", type=Path, default=Path("/dev/shm"), help="the directory to work in")
    given = parser.parse_args(arguments)
    table = Table()
    say_machine()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-", dir=given.on) as directory:
        asyncio.run(measure(table, QUICK if given.quick else FULL, Path(directory)))
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
