"""Sends requests to another region: a proxy there chooses the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator

from hawker.core.distances import Distances
from hawker.core.routing import ANY, Wishes
from hawker.model.regions import expand
from hawker.proxy.app_table import AppTable
from hawker.proxy.apps.routed_app import RoutedApp
from hawker.proxy.backoff import Backoff
from hawker.proxy.base import Failure, Header
from hawker.proxy.catalog_view.index import Worker
from hawker.proxy.machines.remote_proxy import CROWDED_S
from hawker.proxy.settings import RouterSettings


class OtherRegions:
    """The other regions as one proxy knows them: which is near, and whose proxies are left alone for a while. Made on
    the running loop."""

    def __init__(self, app_table: AppTable, settings: RouterSettings, random: Callable[[], float]) -> None:
        self.distances = Distances(app_table.region)
        self._app_table = app_table
        self._settings = settings
        self._random = random
        self._now = asyncio.get_running_loop().time
        self._backoff: dict[str, Backoff] = {}  # of workers that failed
        self._crowded: dict[tuple[str, str], float] = {}  # until when, by app and region

    def here_first(self, routed: RoutedApp, wishes: Wishes) -> bool:
        """Whether a request that wishes for regions is for the own one before all others that have the app."""
        own = self._app_table.region
        order = [own, *self._regions(routed, ANY)]
        wanted = expand(",".join(wishes.force_regions or (*wishes.prefer_regions, "any")), order)
        return next((region for region in wanted if region in order), own) == own

    def lease(self, routed: RoutedApp, wishes: Wishes, tried: Collection[str], port: Header) -> RegionLease | None:
        """A lease of a proxy of the nearest region that has the app; that proxy chooses the machine. `port` is the
        public port as a field. If one machine must take the request, and is not here, nobody here knows where it is:
        each region is asked once."""
        asked = set()
        if wishes.force_machine:
            found = (self._app_table.index.workers.get(name) for name in tried)
            asked = {worker.region for worker in found if worker is not None}
        for region in self._regions(routed, wishes):
            if region in asked or self._is_crowded(routed, region):
                continue
            workers = self._app_table.index.workers_of(routed.app.name, region)
            open_ = [w for w in workers if w.name not in tried and not self._troubled(w.name)]
            if open_:
                worker = open_[int(self._random() * len(open_))]
                headers = (*self._app_table.backhaul(routed.app.name, ""), port, *_wished(wishes))
                return RegionLease(self, routed.app.name, worker, headers)
        return None

    def resting(self, routed: RoutedApp, wishes: Wishes) -> set[str]:
        """The workers that would be asked if they had not failed a moment ago."""
        if wishes.force_machine:
            return set()
        index = self._app_table.index
        workers = [
            worker for region in self._regions(routed, wishes) for worker in index.workers_of(routed.app.name, region)
        ]
        return {worker.name for worker in workers if self._troubled(worker.name)}

    def crowded(self, routed: RoutedApp, wishes: Wishes) -> bool:
        """Whether a region would be asked if it did not hold as many waiting requests as it may."""
        return any(self._is_crowded(routed, region) for region in self._regions(routed, wishes))

    def full(self, app: str, region: str) -> None:
        """A proxy of that region says that its machines are full: another one of that region would find the same
        machines."""
        now = self._now()
        self._crowded = {key: until for key, until in self._crowded.items() if until > now}
        self._crowded[app, region] = now + CROWDED_S

    def _is_crowded(self, routed: RoutedApp, region: str) -> bool:
        return self._crowded.get((routed.app.name, region), 0.0) > self._now()

    def answered(self, worker: str) -> None:
        self._backoff.pop(worker, None)

    def failed(self, worker: str) -> None:
        self._backoff.setdefault(worker, Backoff(self._settings.trouble_s)).failed(self._now())

    def _troubled(self, worker: str) -> bool:
        """Whether this worker's proxy is left alone for now."""
        backoff, remote_proxy = self._backoff.get(worker), self._app_table.remote_proxies.get(worker)
        return (backoff is not None and backoff.until > self._now()) or (remote_proxy is not None and remote_proxy.away)

    def _regions(self, routed: RoutedApp, wishes: Wishes) -> list[str]:
        """The regions that have the app, the best first for this request."""
        order = [region for region in self._settings.regions if region in routed.app.elsewhere]
        order += self.distances.nearest(region for region in routed.app.elsewhere if region not in order)
        if wishes.force_regions:
            return [each for each in expand(",".join(wishes.force_regions), order) if each in order]
        if wishes.prefer_regions:
            return [each for each in expand(",".join((*wishes.prefer_regions, "any")), order) if each in order]
        return order


class RegionLease:
    """A `hawker.proxy.base.Lease` of whatever machine a proxy of another region chooses; `machine` names that proxy's
    worker."""

    __slots__ = ("_answers", "_app", "_other_regions", "address", "headers", "machine", "phases", "region")

    def __init__(self, other_regions: OtherRegions, app: str, worker: Worker, headers: tuple[Header, ...]) -> None:
        self._other_regions = other_regions
        self._app = app
        self._answers = False
        self.machine = worker.name
        self.region = worker.region
        self.address = worker.host, worker.proxy_port
        self.headers = headers
        self.phases: dict[str, float] = {}

    @property
    def load(self) -> bytes:
        return b""

    @property
    def others(self) -> int:
        """How many wait is known in the other region alone."""
        return 0

    def heard(self, load: bytes) -> None:
        """The load of one of many machines tells only that their proxy is there."""
        self._answers = True

    def release(self) -> None:
        self._other_regions.answered(self.machine)

    def failed(self, how: Failure) -> None:
        if how == "crowded":
            self._other_regions.full(self._app, self.region)
        elif how != "elsewhere" and not self._answers:
            self._other_regions.failed(self.machine)


def _wished(wishes: Wishes) -> Iterator[Header]:
    """Fields for the proxy that chooses: a replay's wishes are in no header of the request."""
    for name, machine in (
        (b"fly-force-instance-id", wishes.force_machine),
        (b"fly-prefer-instance-id", wishes.prefer_machine),
    ):
        if machine:
            yield name, machine.encode("latin-1", "replace")
