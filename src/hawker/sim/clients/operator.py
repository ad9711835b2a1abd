"""The operator of a simulated fleet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from hawker.sim.clients.api import SETTLE_TRIES, Api


class Operator:
    """The operator makes the apps, cordons workers and opens them again, and retries parked runs."""

    def __init__(self, api: Api, rng: random.Random, workers: list[str], now: Callable[[], float]) -> None:
        self.api = api
        self._rng = rng
        self._workers = workers
        self._now = now

    async def make_apps(self, names: list[str]) -> None:
        for name in names:
            while True:
                answer = await self.api.ask("POST", "/v1/apps", {"app_name": name})
                if answer.status in (200, 201, 422):
                    break
                await asyncio.sleep(0.5)

    async def run(self, until_s: float) -> None:
        while self._now() < until_s:
            await asyncio.sleep(self._rng.uniform(2, 8))
            if self._rng.random() < 0.3:
                worker = self._rng.choice(self._workers)
                await self.api.ask("POST", f"/v1/hawker/workers/{worker}/cordon")
                await asyncio.sleep(self._rng.uniform(1, 5))
                await self.open_again(worker)
            await self.retry_parked()

    async def open_again(self, worker: str) -> None:
        for _ in range(SETTLE_TRIES):
            answer = await self.api.ask("POST", f"/v1/hawker/workers/{worker}/uncordon")
            if answer.status in (200, 404):
                return
            await asyncio.sleep(1)

    async def retry_parked(self) -> int:
        """Retry the parked runs of the workers that answer. Returns how many there were."""
        answer = await self.api.ask("GET", "/v1/hawker/runs?status=parked")
        runs = answer.body if answer.status == 200 and isinstance(answer.body, list) else []
        for run in runs:
            if (await self.api.ask("POST", f"/v1/hawker/runs/{run['id']}/retry")).status == 200:
                self.api.oracle.paths["a parked run was tried again"] += 1
        return len(runs)
