"""What a host's other users see of machines: nothing, whatever umask the worker was started with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import opened, spec
from tests.kit.private import open_to_others, umask
from tests.kit.tiers import full
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import microvms, warmed
from tests.kit.waiting import eventually
from tests.live.test_container_driver import programs

from hawker.images.base import ImageSource
from hawker.worker.drivers.base import File
from hawker.worker.drivers.container.driver import ContainerDriver
from hawker.worker.drivers.microvm.driver import MicrovmDriver
from hawker.worker.drivers.process import ProcessDriver

pytestmark = [pytest.mark.root, pytest.mark.slow]

Made = ProcessDriver | ContainerDriver | MicrovmDriver
Make = Callable[[Path, ImageSource], Made]


def crun(directory: Path, images: ImageSource) -> Made:
    return ContainerDriver(directory, images, runtime="crun", programs=programs())


def runc(directory: Path, images: ImageSource) -> Made:
    return ContainerDriver(directory, images, runtime="runc", programs=programs())


def root_of_the_host(directory: Path, images: ImageSource) -> Made:
    return ContainerDriver(directory, images, user_namespaces=False, programs=programs())


def microvm(directory: Path, images: ImageSource) -> MicrovmDriver:
    return microvms(directory, images)


def tree(directory: Path, images: ImageSource) -> Made:
    return ProcessDriver(directory, images=images, programs=programs())


@pytest.mark.parametrize("mask", [0, 0o077], ids=["no-umask", "strict"])
@pytest.mark.parametrize("make", [crun, tree, *full(runc, root_of_the_host)])
async def test_a_container_and_its_commands_keep_their_environment_and_files_to_themselves(
    make: Make, mask: int, tmp_path: Path
) -> None:
    with umask(mask):
        await keeps_to_itself(make, tmp_path)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("guests")
@pytest.mark.parametrize("mask", [0, *full(0o077)], ids=["no-umask", "strict"])
async def test_a_microvm_keeps_its_disk_and_files_to_itself(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        await keeps_to_itself(microvm, tmp_path)


async def keeps_to_itself(make: Make, place: Path) -> None:
    images = UnpackedImages(place / "images")
    driver = make(place / "driver", images)
    async with opened(driver, "busybox", images.add) as it:
        if isinstance(driver, MicrovmDriver):
            await warmed(driver, place / "driver", spec().limits)
        secret = File(path="/etc/secret", content=b"for the machine alone\n", mode=0o644)
        one = replace(it.shell("cat /etc/secret; sleep 1000", TOKEN="x"), files=[secret])
        await driver.start(one)
        await it.says(one.machine, "for the machine alone")
        memory = (driver.supervisor.directory / "run").resolve()  # a link in memory
        found: list[str] = []
        looking = asyncio.create_task(look(found, place / "driver", memory), name="look")
        try:
            for _ in range(3):
                said = await driver.exec(one.key, ["sh", "-c", "echo $TOKEN $MORE"], env={"MORE": "y"}, timeout_s=30)
                assert said.stdout == b"x y\n"
            talk = await driver.terminal(one.key, ["cat"], tty=True, env={"MORE": "z"})
            await talk.close()

            async def looked() -> bool:
                return "looked" in found

            await eventually(looked, "somebody has looked")
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        assert set(found) == {"looked"}


async def look(found: list[str], *places: Path) -> None:
    """Again and again: a command's files are there for some milliseconds."""
    while True:
        for place in places:
            found += open_to_others(place)
        found.append("looked")
        await asyncio.sleep(0.001)
