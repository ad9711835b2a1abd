"""A host's images for tests: an `Images` in a directory of its own that asks no registry but those a test makes.

```
async def test_something(images: Images) -> None:
    image = await have(images, busybox_image(), "bb")
```
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.oci import Made, file, image, layer

from hawker.host import Host
from hawker.images.service import Images
from hawker.images.settings import ImageSettings
from hawker.model.image import Image, Platform

AMD64 = Platform(os="linux", architecture="amd64")


def settings(**more: Any) -> ImageSettings:
    """Nobody's credentials, and little patience."""
    defaults: dict[str, Any] = {
        "docker_config": "",
        "backoff_s": 0.01,
        "attempts": 3,
        "read_timeout_s": 5.0,
        "free_mib_least": 0,
    }
    return ImageSettings(**{**defaults, **more})


class Clock:
    """Unix seconds that a test sets."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def opened(
    directory: Path, *, clock: Callable[[], float] | None = None, platform: Platform = AMD64, **more: Any
) -> AsyncIterator[Images]:
    """`more` goes into the settings. Opening the same directory again is a restart."""
    host = Host(clock or Clock(), random.Random(1))
    images = await Images(directory, settings(**more), host, platform=platform).open()
    try:
        yield images
    finally:
        await images.close()


@pytest.fixture
async def images(tmp_path: Path) -> AsyncIterator[Images]:
    """To be imported by name, or by `pytest_plugins`."""
    async with opened(tmp_path / "images") as opening:
        yield opening


async def have(images: Images, made: Made, name: str) -> Image:
    """Put an image made in memory there, unpacked, under this name; of an index, the one for amd64."""
    manifest = made.manifest
    if made.manifests:
        (manifest,) = [data for _, data in made.manifests.values() if b'"amd64"' in made.blobs[_config_of(data)]]
    return await images.add(name, manifest, dict(made.blobs))


def _config_of(manifest: bytes) -> str:
    digest: str = json.loads(manifest)["config"]["digest"]
    return digest


NOISE = bytes(range(256)) * 4096
"""A mebibyte."""


def plain_image(data: bytes = NOISE) -> Made:
    """One file, `noise`, in one layer that is not compressed: some more bytes than it has."""
    return image([layer([file("noise", data)], compression="")])


def left(images: Images) -> list[str]:
    """What is in a store: its files and trees, by name."""
    return sorted(path.name for path in images.directory.rglob("*") if path.is_file() or path.parent.name == "trees")
