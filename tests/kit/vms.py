"""MicroVM drivers for tests: a fixture that opens them over images of the test's own.

The kernel and the templates that one test made are there for the next: booting takes a second or two where the
processor is emulated, a restored template a fifth of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.images import have
from tests.kit.images import opened as opened_images
from tests.kit.oci import Made, busybox_image

from hawker.host import live
from hawker.network.base import HostNetwork
from hawker.worker.drivers.microvm import disk, kernel, qemu
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.settings import Settings

KEPT = ("kernel", "templates")


def missing() -> str:
    """Why microVMs cannot run here, "" when they can."""
    try:
        kernel.find()
    except kernel.NoKernel as error:
        return str(error)
    absent = [*([] if qemu.binary() else [qemu.PACKAGE]), *disk.missing_tools()]
    return f"needs {' '.join(absent)}" if absent else ""


class Shop:
    """Where drivers find kernel and templates of those before them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def stock(self, driver: Path) -> None:
        for name in KEPT:
            if (self._directory / name).exists():
                shutil.copytree(self._directory / name, driver / name, copy_function=_link, dirs_exist_ok=True)

    def keep(self, driver: Path) -> None:
        for name in KEPT:
            for path in (driver / name).glob("[!.]*"):
                target = self._directory / name / path.name
                if target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, target, copy_function=_link)
                else:
                    _link(path, target)


def _link(source: str | Path, target: str | Path) -> None:
    os.link(source, target)


@asynccontextmanager
async def driver_of(
    directory: Path, shop: Shop, *, network: HostNetwork | None = None, settings: Settings | None = None, **made: Made
) -> AsyncIterator[MicrovmDriver]:
    """A driver that is not open yet, over images by their names; without any, `busybox` is one."""
    shop.stock(directory)
    async with opened_images(directory / "images") as images:
        for name, image in (made or {"busybox": busybox_image()}).items():
            await have(images, image, name)
        yield MicrovmDriver(directory, images, network, live(), settings or Settings())
    shop.keep(directory)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """To be imported by name."""
    if problem := missing():
        pytest.skip(problem)
    return Shop(tmp_path_factory.mktemp("vms"))
