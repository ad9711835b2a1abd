"""What every part of a worker may need: its settings, and what it holds of the world."""

from __future__ import annotations

from dataclasses import dataclass

from hawker.catalog.view import RowView
from hawker.host import Host
from hawker.images.base import ImageSource
from hawker.network.base import HostNetwork
from hawker.store.db import Store
from hawker.telemetry import Metrics
from hawker.worker.driver_news import DriverNews
from hawker.worker.drivers.driver_set import DriverSet
from hawker.worker.flows.runner import Runner
from hawker.worker.settings import WorkerSettings


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """`news` is what the drivers tell. `images` is None where machines have none, `network` where they have no network
    of their own, and `catalog` in a worker that is no member of one. `token` is what agents know each other by."""

    settings: WorkerSettings
    host: Host
    store: Store
    drivers: DriverSet
    news: DriverNews
    runner: Runner
    metrics: Metrics
    images: ImageSource | None = None
    network: HostNetwork | None = None
    catalog: RowView | None = None
    token: str = ""
