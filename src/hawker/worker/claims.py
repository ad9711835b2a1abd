"""The arbiter's side of a client's idempotency key: which order, on which worker, may fill it (decision 6)."""

from __future__ import annotations

from hawker.model.market import ClaimKey
from hawker.model.rows import ClaimRow
from hawker.store.db import Store
from hawker.store.tx import Tx


async def claim(store: Store, request: ClaimKey) -> ClaimRow:
    """The first claim wins; a later one only when it names the order it replaces. Returns the claim in force."""

    def change(tx: Tx) -> ClaimRow:
        there = tx.get(ClaimRow, request.id)
        if there and there.order != request.replaces:
            return there
        tx.record("claim.taken", request.id, cause=f"order {request.order}")
        row = ClaimRow(id=request.id, worker=request.worker, order=request.order, at_ms=tx.now_ms)
        tx.put(row)
        return row

    return await store.submit(change)
