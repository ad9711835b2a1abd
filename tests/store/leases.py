"""What tests of the store write: leases, one by one, and what is there of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from tests.kit.waiting import LIMIT_S

from hawker.errors import Conflict
from hawker.host import Host
from hawker.model.rows import LeaseRow
from hawker.store.db import SLOW_COMMIT_S, SLOW_IN_A_ROW, Store
from hawker.store.tx import Tx

HOST = Host(lambda: 1.0, random.Random(1))


def lease(machine: str, nonce: str = "n") -> LeaseRow:
    return LeaseRow(machine=machine, nonce=nonce, owner="o", description="", expires_at_ms=0)


def taking(machine: str, nonce: str = "n") -> Callable[[Tx], str]:
    def change(tx: Tx) -> str:
        tx.record("lease.taken", machine, cause="test")
        tx.put(lease(machine, nonce))
        return machine

    return change


def freeing(machine: str) -> Callable[[Tx], None]:
    def change(tx: Tx) -> None:
        tx.record("lease.freed", machine, cause="test")
        tx.delete(LeaseRow, machine)

    return change


def refused(tx: Tx) -> None:
    taking("refused")(tx)
    raise Conflict("no")


def leased(store: Store) -> list[str]:
    return [row.machine for row in store.read.select(LeaseRow, "true order by id")]


def logged(store: Store) -> list[tuple[int, str]]:
    return [(seq, resource) for seq, resource in store.read.query("select seq, resource from log order by seq")]


def make_slow(store: Store, seconds: float = 2.5 * SLOW_COMMIT_S) -> list[str]:
    """Every commit takes this long from now on; gives the names of the threads that commits were made in."""
    threads: list[str] = []

    def hook() -> bool:
        threads.append(threading.current_thread().name)
        time.sleep(seconds)
        return False

    store._db.set_commit_hook(hook)
    return threads


async def slowed(store: Store, seconds: float = 2.5 * SLOW_COMMIT_S) -> list[str]:
    """`make_slow`, and so many commits that the store knows it."""
    threads = make_slow(store, seconds)
    for _ in range(SLOW_IN_A_ROW):
        await store.submit(taking("slow"))
    assert store.slow
    return threads


async def held_up(store: Store) -> threading.Event:
    """Every commit from now on is made in a thread and waits there until this is set."""
    await slowed(store)
    go_on = threading.Event()
    store._db.set_commit_hook(lambda: not go_on.wait(LIMIT_S))
    return go_on
