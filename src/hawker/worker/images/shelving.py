"""A worker's images put together with all that asks them: the market, the API, other workers, the catalog."""

from __future__ import annotations

import asyncio

from hawker.core.sketch import Sketch, sketch
from hawker.errors import StoreError
from hawker.http.handlers import Route
from hawker.images.service import Images
from hawker.model.rows import SketchRow
from hawker.services import Service
from hawker.store.db import Store
from hawker.store.tx import Tx
from hawker.telemetry import get_logger
from hawker.worker.context import WorkerContext
from hawker.worker.images.api import ImageApi, no_images
from hawker.worker.images.peers import TIMES, Peers
from hawker.worker.images.stock import Shelf, Stock
from hawker.worker.images.uploads import Uploads

SKETCH_S = 3.0
TIDY_S = 600.0


class Sketching:
    """Keeps the sketch of a worker's images in its database, from where the catalog gets it. It is written when it has
    changed, at most once in `SKETCH_S`: a fetch of ten layers, or a hundred images collected at once, is one change.
    Call `changed` when the images have. `close` before the store."""

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


class Shelving(Service):
    """In a worker without images of its own everything is there and says so."""

    def __init__(self, context: WorkerContext) -> None:
        settings, host, images = context.settings, context.host, context.images
        self.stock: Stock | None = None
        self._api: ImageApi | None = None
        self._peers: Peers | None = None
        self._sketching: Sketching | None = None
        self._tidying: asyncio.Task[None] | None = None
        if not isinstance(images, Images):
            return
        self._images = images
        self.stock = Stock(images)
        self._uploads = Uploads(images.directory / "uploads", host)
        self._api = ImageApi(images, self._uploads, settings.name, settings.region)
        self._sketching = Sketching(context.store, images)
        if context.catalog is not None:
            self._peers = Peers(settings.name, settings.region, context.catalog, context.token, host)

    async def open(self) -> None:
        if self._sketching:
            self._tidying = asyncio.get_running_loop().create_task(self._tidy(), name="tidy images")
            self._images.on_change.append(self._sketching.changed)
            self._sketching.changed()
        if self._peers:
            self._images.fetchers += [self._peers] * TIMES
            self._images.namers.append(self._peers.resolve)

    def routes(self) -> tuple[Route, ...]:
        return self._api.routes() if self._api else no_images()

    def all_held(self) -> None:
        """Whatever machines and offers need is held: the rest may go."""
        if self.stock:
            self._images.begin_collecting()

    async def _tidy(self) -> None:
        """Now and then remove uploads that nobody came back for. Images are collected by themselves once `all_held`."""
        while True:
            await asyncio.sleep(TIDY_S)
            self._uploads.sweep()

    async def close(self) -> None:
        if self._tidying:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)
        if self._sketching:
            self._images.on_change.remove(self._sketching.changed)
            await self._sketching.close()
        if self._api:
            await self._api.close()
        if self._peers:
            images, peers = self._images, self._peers
            images.fetchers[:] = [fetcher for fetcher in images.fetchers if fetcher is not peers]
            images.namers[:] = [namer for namer in images.namers if namer != peers.resolve]
            await self._peers.close()


_logger = get_logger()
