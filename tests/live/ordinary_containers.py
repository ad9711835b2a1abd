"""The conformance suite for an ordinary user's containers, by crun in a user namespace. Not collected by itself:
`test_ordinary_user.py` starts pytest as such a user."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, opened
from tests.kit.unpacked import UnpackedImages
from tests.live.conformance.abilities import Talking, Telling
from tests.live.conformance.every import Conformance
from tests.live.conformance.images import Imaged
from tests.live.conformance.kills import Killed
from tests.live.conformance.releasing import Released

from hawker.worker.drivers.base import Root, StartFailed
from hawker.worker.drivers.container.driver import ContainerDriver


@functools.cache
def programs() -> Path:
    """Compiled once for all these tests."""
    return Path(tempfile.mkdtemp(prefix="programs-", dir=os.getcwd()))


def ordinary(directory: Path, images: UnpackedImages | None = None) -> ContainerDriver:
    return ContainerDriver(directory / "driver", images or UnpackedImages(directory / "images"), programs=programs())


class TestOrdinaryUser(Conformance, Telling, Talking, Imaged, Killed, Released):
    factory = "tests.live.ordinary_containers:ordinary"

    @pytest.fixture
    async def driver(self, tmp_path: Path) -> AsyncIterator[Opened]:
        images = UnpackedImages(tmp_path / "images")
        async with opened(ordinary(tmp_path, images), "busybox", images.add) as it:
            yield it

    @pytest.mark.parametrize("persist", [True])
    async def test_a_machine_that_fills_its_disk_meets_its_bound(self, driver: Opened, persist: bool) -> None:
        """There is none: what cannot be had is refused, not left out."""
        one = replace(driver.shell("true"), root=Root(size_mib=16, persist=persist))
        with pytest.raises(StartFailed, match="only a worker that runs as root can bound"):
            await driver.driver.start(one)


async def test_a_command_has_a_terminal_of_its_own_also_where_paths_are_longer_than_a_sockets_name(
    tmp_path: Path,
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    images = UnpackedImages(tmp_path / "images")
    async with opened(ordinary(deep, images), "busybox", images.add) as it:
        one = it.spec("sleep", "60")
        await it.driver.start(one)
        terminal = await it.terminals.terminal(one.key, ["tty"], tty=True)
        try:
            assert await terminal.wait() == (0, None)
        finally:
            await terminal.close()
