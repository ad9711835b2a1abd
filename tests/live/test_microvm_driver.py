"""The microVM driver: the conformance suite, and what only a virtual machine has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.vms import Shop, driver_of, shop
from tests.live.driver_conformance import Opened, opened, shell

__all__ = ["shop"]

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
async def driver(tmp_path: Path, shop: Shop) -> AsyncIterator[Opened]:
    async with driver_of(tmp_path / "driver", shop) as made, opened(made) as it:
        yield it


async def test_first(driver: Opened) -> None:
    one = shell("exit 7")
    started = await driver.driver.start(one)
    assert (started.key, started.machine) == (one.key, one.machine)
    ended = await driver.driver.wait(one.key)
    assert (ended.code, ended.signal, ended.oom_killed, ended.status) == (7, None, False, 7)
    assert (await driver.driver.inspect(one.key)).exit == ended
    await driver.driver.destroy(one.key)
