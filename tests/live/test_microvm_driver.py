"""The microVM driver: the conformance suite, and what only virtual machines have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import guests, microvms, warmed
from tests.live.driver_conformance import (
    Conformance,
    Imaged,
    Killed,
    Limited,
    Opened,
    Talking,
    Telling,
    opened,
    spec,
    word,
)

from hawker.worker.drivers.base import NotSupported, Root
from hawker.worker.drivers.microvm.driver import MicrovmDriver

__all__ = ["guests"]

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("guests")]


def elsewhere(directory: Path) -> MicrovmDriver:
    return microvms(directory / "driver", UnpackedImages(directory / "images"))


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Opened]:
    images = UnpackedImages(tmp_path / "images")
    made = microvms(tmp_path / "driver", images)
    async with opened(made, "busybox", images.add) as it:
        await warmed(made, tmp_path / "driver", spec().limits)
        yield it


class TestMicrovms(Conformance, Telling, Talking, Imaged, Killed):
    factory = "tests.live.test_microvm_driver:elsewhere"

    test_want_of_memory_is_told_apart = Limited.test_want_of_memory_is_told_apart
    test_a_fork_bomb_meets_its_limit = Limited.test_a_fork_bomb_meets_its_limit

    async def test_a_size_stays_while_a_machine_runs(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        with pytest.raises(NotSupported):
            await driver.driver.resize(one.key, replace(one.limits, memory_mib=256))

    async def test_after_a_reboot_nothing_runs_and_what_is_kept_is_there(self, driver: Opened) -> None:
        """A machine of its own has a memory of its own for what is on its way to the disk: what it has not synced is
        lost when its power fails."""
        one = replace(driver.shell("echo a > kept; sync; echo up; sleep 1000"), root=Root(persist=True))
        other = driver.shell("echo up; sleep 1000")
        for each in (one, other):
            await driver.driver.start(each)
            await driver.says(each.machine, "up")
        await self.reboot(driver, word())
        await driver.driver.open(driver.on_exit)
        assert [instance for instance in await driver.driver.recover() if instance.exit is None] == []
        for each in (one, other):
            await driver.driver.destroy(each.key, force=True)
        again = replace(driver.shell("cat kept"), root=one.root, machine=one.machine)
        assert await driver.run(again) == ["a"]

    def keeps_status(self) -> bool:
        return True  # it is told by the guest
