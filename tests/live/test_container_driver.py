"""The container driver: the conformance suite with crun and runc, and what only containers have."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.unpacked import UnpackedImages
from tests.live.driver_conformance import (
    Conformance,
    Imaged,
    Killed,
    Limited,
    Opened,
    Talking,
    Telling,
    opened,
)

from hawker.worker.drivers.container.driver import ContainerDriver

pytestmark = pytest.mark.root


@functools.cache
def programs() -> Path:
    """Compiled once for all these tests."""
    place = Path(tempfile.mkdtemp(prefix="programs-"))
    atexit.register(shutil.rmtree, place)
    return place


def driver_of(directory: Path, runtime: str) -> tuple[ContainerDriver, UnpackedImages]:
    images = UnpackedImages(directory / "images")
    return ContainerDriver(directory / "driver", images, runtime=runtime, programs=programs()), images


def crun(directory: Path) -> ContainerDriver:
    return driver_of(directory, "crun")[0]


def runc(directory: Path) -> ContainerDriver:
    return driver_of(directory, "runc")[0]


class Containers(Conformance, Telling, Talking, Limited, Imaged, Killed):
    pass


class TestCrun(Containers):
    factory = "tests.live.test_container_driver:crun"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        made, images = driver_of(tmp_path, "crun")
        async with opened(made, "busybox", images.add) as it:
            yield it


class TestRunc(Containers):
    factory = "tests.live.test_container_driver:runc"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        made, images = driver_of(tmp_path, "runc")
        async with opened(made, "busybox", images.add) as it:
            yield it
