"""A replica in a file of its own, and the clock that it goes by."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.catalog.versions import Clock

from hawker.catalog.gossip.replica import Replica
from hawker.host import Host


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host(clock: Clock) -> Host:
    return Host(lambda: clock.ms / 1000, random.Random(1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def replica(path: Path, host: Host) -> Iterator[Replica]:
    replica = Replica.open(path, host)
    yield replica
    replica.close()
