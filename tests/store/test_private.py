"""Databases belong to their owner alone: who else has an account on the host reads nothing of them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest
from tests.store.leases import HOST, taking

from hawker.catalog.gossip.replica import Replica
from hawker.store.connection import make_private
from hawker.store.db import Store

UMASKS = [0o000, 0o022, 0o777]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(path: Path) -> dict[str, int]:
    """Of a database and what SQLite keeps beside it, by the end of the name."""
    found = path.parent.glob(f"{path.name}*")
    return {each.name.removeprefix(path.name): stat.S_IMODE(each.stat().st_mode) for each in found}


OURS = {"": 0o600, "-wal": 0o600, "-shm": 0o600}


@pytest.mark.parametrize("mask", UMASKS)
async def test_a_workers_database_is_its_owners_alone_whatever_the_umask(path: Path, mask: int) -> None:
    with umask(mask):
        store = Store.open(path, HOST)
    await store.submit(taking("m1"))
    assert modes(path) == OURS
    await store.close()


@pytest.mark.parametrize("mask", UMASKS)
def test_a_catalogs_file_is_its_owners_alone_whatever_the_umask(path: Path, mask: int) -> None:
    with umask(mask):
        replica = Replica.open(path, HOST)
    assert modes(path) == OURS
    replica.close()


@pytest.mark.parametrize("mask", UMASKS)
def test_a_database_is_its_owners_alone_before_anything_is_in_it(path: Path, mask: int) -> None:
    with umask(mask):
        make_private(path)
    assert path.stat().st_size == 0
    assert modes(path) == {"": 0o600}


async def test_what_others_could_read_is_theirs_no_more_once_it_is_opened_again(path: Path, tmp_path: Path) -> None:
    store = Store.open(path, HOST)
    await store.submit(taking("m1"))
    store.abandon()  # a kill: the write-ahead log stays
    replica = Replica.open(tmp_path / "catalog.db", HOST)
    replica.close()
    link = tmp_path / "link.db"
    link.symlink_to("catalog.db")
    for each in (path, path.with_name("worker.db-wal"), tmp_path / "catalog.db"):
        each.chmod(0o644)
    store = Store.open(path, HOST)
    assert modes(path) == OURS
    await store.close()
    replica = Replica.open(link, HOST)
    assert modes(tmp_path / "catalog.db") == OURS
    replica.close()


def test_a_link_to_nothing_leads_to_a_database_of_its_owners(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to("catalog.db")
    with umask(0):
        Replica.open(link, HOST).close()
    assert modes(tmp_path / "catalog.db")[""] == 0o600


def test_opening_a_database_once_more_leaves_this_processs_locks_on_it(path: Path) -> None:
    """POSIX locks are a process's: closing any descriptor of the file would let all of them go."""
    writer = apsw.Connection(str(path))
    writer.execute("create table rows_of_it (id text)")
    writer.execute("begin immediate")
    path.chmod(0o644)
    make_private(path)
    assert modes(path)[""] == 0o600
    elsewhere = f"import apsw; apsw.Connection({str(path)!r}).execute('begin immediate')"
    done = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True, timeout=50)
    assert "BusyError" in done.stderr
    writer.execute("rollback")
    writer.close()
