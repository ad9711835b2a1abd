"""A worker's images put together with all that asks them: the market, the API, other workers, the catalog."""

from __future__ import annotations

import asyncio

from hawker.catalog.view import View
from hawker.host import Host
from hawker.http.handlers import Route
from hawker.images.base import ImageSource
from hawker.images.service import Images
from hawker.services import Service
from hawker.store.db import Store
from hawker.worker.images.api import ImageApi, no_images
from hawker.worker.images.peers import TIMES, Peers
from hawker.worker.images.sketching import Sketching
from hawker.worker.images.stock import Stock
from hawker.worker.images.uploads import Uploads
from hawker.worker.settings import WorkerSettings

TIDY_S = 600.0


class Shelving(Service):
    """In a worker without images of its own everything is there and says so."""

    def __init__(
        self,
        settings: WorkerSettings,
        host: Host,
        store: Store,
        images: ImageSource | None,
        catalog: View | None,
        token: str,
    ) -> None:
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
        self._sketching = Sketching(store, images)
        if catalog is not None:
            self._peers = Peers(settings.name, settings.region, catalog, token, host)

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
