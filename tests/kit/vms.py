"""MicroVM drivers for tests.

The kernel and the templates that one test made are there for the next: booting takes a second or two where the
processor is emulated, a restored template a fifth of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawker.host import live
from hawker.images.base import ImageSource
from hawker.init.build import program
from hawker.network.base import HostNetwork
from hawker.worker.drivers.base import Limits
from hawker.worker.drivers.microvm import disk, kernel, qemu
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.microvm.settings import Settings

STOCK = "HAWKER_TEST_GUESTS"  # names the directory for processes that a test starts
KEPT = ("kernel", "templates")


def missing() -> str:
    """Why microVMs cannot run here, "" when they can."""
    try:
        kernel.find()
    except kernel.NoKernel as error:
        return str(error)
    absent = [*([] if qemu.binary() else [qemu.PACKAGE]), *disk.missing_tools()]
    return f"needs {' '.join(absent)}" if absent else ""


def microvms(
    directory: Path, images: ImageSource, *, network: HostNetwork | None = None, settings: Settings | None = None
) -> MicrovmDriver:
    """A driver in this directory, with what is in stock."""
    stock = Path(os.environ[STOCK])
    for name in KEPT:
        if os.access(stock / name, os.R_OK) and not (directory / name).exists():
            shutil.copytree(stock / name, directory / name, copy_function=os.link)
    return MicrovmDriver(directory, images, network, live(), settings or Settings())


async def warmed(driver: MicrovmDriver, directory: Path, limits: Limits, *, network: bool = False) -> None:
    """Have a template for machines of this size, and put it into stock."""
    await driver.warm(limits, network=network)
    stock = Path(os.environ[STOCK])
    for name in KEPT:
        for path in (directory / name).glob("[!.]*"):
            target = stock / name / path.name
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, copy_function=os.link)
            else:
                os.link(path, target)


def prepared() -> kernel.Kernel:
    """What a guest boots from, in stock."""
    directory = Path(os.environ[STOCK]) / "kernel"
    return kernel.prepare(kernel.find(), program("guest", directory), directory)


@pytest.fixture(scope="session")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The stock, for all of `tests/live`. Without what microVMs need the test is skipped."""
    if problem := missing():
        pytest.skip(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STOCK, str(tmp_path_factory.mktemp("guests")))
        yield
