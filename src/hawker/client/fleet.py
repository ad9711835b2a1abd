"""The calls about regions, and about what operators look after, by name: see `client/api.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hawker.client.answers import QUIET_S, Object, many, one, present
from hawker.client.events import Events
from hawker.client.plain import Transport, path_of


class Fleet(Transport):
    """Regions, workers, runs and the catalog."""

    def regions(self) -> Object:
        """`Regions`, a list, and `Nearest`, a code."""
        return one(self.get("/v1/platform/regions"))

    def placements(self, body: Mapping[str, Any]) -> list[Object]:
        """Room by region for machines of a size: `body` has `compute`, `region`, `count`, ..."""
        return many(one(self.post("/v1/platform/placements", json=dict(body))).get("regions"))

    def workers(self) -> list[Object]:
        """*Extension*: workers and what they hold."""
        return many(self.get("/v1/hawker/workers"))

    def cordon_worker(self, name: str) -> Object:
        """*Extension*: the worker makes no more offers; what runs there goes on."""
        return one(self.post(path_of("hawker", "workers", name, "cordon")))

    def uncordon_worker(self, name: str) -> Object:
        """*Extension*: the worker makes offers again."""
        return one(self.post(path_of("hawker", "workers", name, "uncordon")))

    def forget_worker(self, name: str) -> Object:
        """*Extension*: give up a worker that is gone for good."""
        return one(self.post(path_of("hawker", "workers", name, "forget")))

    def runs(self, *, status: Sequence[str] = (), machine: str | None = None, limit: int | None = None) -> list[Object]:
        """*Extension*: the workers' runs, without `status` those that have not ended."""
        query = {"status": ",".join(status) or None, "machine": machine, "limit": limit}
        return many(self.get("/v1/hawker/runs", query=query))

    def run(self, run: str) -> Object:
        """*Extension*: one run."""
        return one(self.get(path_of("hawker", "runs", run)))

    def retry_run(self, run: str) -> Object:
        """*Extension*: try the step again at which it is parked. The run as it is then."""
        return one(self.post(path_of("hawker", "runs", run, "retry")))

    def cancel_run(self, run: str) -> Object:
        """*Extension*: give it up. The run as it is then."""
        return one(self.post(path_of("hawker", "runs", run, "cancel")))

    def sql(self, query: str, *, worker: str | None = None, on: str | None = None) -> Object:
        """*Extension*: a read-only query on the catalog; on every worker's own database with `on="workers"`; on one's
        with `worker`."""
        return one(self.post("/v1/hawker/sql", json=present(query=query, worker=worker, on=on)))

    def subscribe(self, query: str, *, since: str | None = None, seconds: int | None = None) -> Events:
        """*Extension*: a query's result on the catalog, then its changes. `since`: the id of the last event seen, to go
        on after it; `seconds`: end after so long."""
        asked = {"query": query, "from": since, "seconds": seconds}
        return Events(self.lines("/v1/hawker/subscribe", query=asked, quiet_s=QUIET_S))

    def members(self) -> list[Object]:
        """*Extension*: the catalog's members as the node asked sees them."""
        return many(self.get("/v1/hawker/members"))
