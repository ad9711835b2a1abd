"""A store on a disk of its own, which must verify at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.leases import HOST, freeing, make_slow, taking

from hawker.store.db import Store
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
        threads = make_slow(store)
        await store.submit(taking("first"))
        await store.submit(freeing("first"))
        assert threads == ["MainThread", "hawker-commit_0"]
        assert store.slow
    return store
