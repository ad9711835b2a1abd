"""A store on a disk of its own, which must verify at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.leases import HOST, freeing, slowed

from hawker.store.db import SLOW_IN_A_ROW, Store
from hawker.store.verify import verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[Store]:
    store = Store.open(path, HOST)
    yield store
    await store.close()
    assert verify(path).faults == []


@pytest.fixture(params=["quick", "slow"])
async def either(request: pytest.FixtureRequest, store: Store) -> Store:
    """The store on a quick disk, where commits are made on the loop, and on a slow one, where a thread makes them."""
    if request.param == "slow":
        threads = await slowed(store)
        await store.submit(freeing("slow"))
        assert threads == ["MainThread"] * SLOW_IN_A_ROW + ["hawker-commit_0"]
    return store
