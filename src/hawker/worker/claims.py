"""The arbiter's side of a client's idempotency key: which order, on which worker, may fill it (decision 6)."""

from __future__ import annotations

from hawker.model.rows import ClaimRow
from hawker.store.db import Store
from hawker.store.tx import Tx


async def claim(store: Store, claim_id: str, worker: str, order: str, replaces: str) -> ClaimRow:
    """Let `order` on `worker` be the one that may fill the key. The first claim wins; a later one only when it names
    the order it `replaces`. Returns the claim in force."""

    def change(tx: Tx) -> ClaimRow:
        there = tx.get(ClaimRow, claim_id)
        if there and there.order != replaces:
            return there
        tx.record("claim.taken", claim_id, cause=f"order {order}")
        row = ClaimRow(id=claim_id, worker=worker, order=order, at_ms=tx.now_ms)
        tx.put(row)
        return row

    return await store.submit(change)
