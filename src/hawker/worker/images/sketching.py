"""Keeping the sketch of a worker's images in its database, from where the catalog gets it.

It is written when it has changed, at most once in `SKETCH_S`: a fetch of ten layers, or a hundred images collected at
once, is one change.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawker.core.sketch import Sketch, sketch
from hawker.errors import StoreError
from hawker.model.rows import SketchRow
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import get_logger

if TYPE_CHECKING:
    from hawker.worker.images.stock import Shelf

SKETCH_S = 3.0


class Sketching:
    """Call `changed` when the images have. `close` before the store."""

    def __init__(self, store: Store, images: Shelf) -> None:
        self._store = store
        self._images = images
        self._written: Sketch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._not_before_s = 0.0

    def changed(self) -> None:
        if self._timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._not_before_s, loop.time()), self._begin)

    async def close(self) -> None:
        self._closed = True
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        self._timer = None
        if self._task and not self._task.done():  # a slow disk
            self._not_before_s = asyncio.get_running_loop().time() + SKETCH_S
            self.changed()
            return
        self._task = asyncio.get_running_loop().create_task(self._write(), name="sketch of the images")

    async def _write(self) -> None:
        self._not_before_s = asyncio.get_running_loop().time() + SKETCH_S
        now = sketch(self._images.all())
        if now == self._written:
            return

        def change(tx: Tx) -> None:
            row = SketchRow(names=now.names, layers=now.layers)
            if tx.get(SketchRow, row.key) != row:
                tx.record("images.changed", row.key, cause="local rule: what is kept has changed")
                tx.put(row)

        try:
            await self._store.submit(change)
        except StoreError as error:  # a full disk: the next change tells
            _logger.warning("sketch.not_written", error=error.message, cause="local rule: what is kept has changed")
        else:
            self._written = now


_logger = get_logger()
