"""A supervisor without control groups, and the connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hawker.worker.drivers.supervisor import Supervisor


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    connection = Supervisor(tmp_path / "there", "--no-cgroups")
    await connection.open(lambda ended: None)
    yield connection
    await connection.shut_down(grace_s=0)
    await connection.close()
