"""The catalog for its readers: SQL on this node's replica, subscriptions to queries, the members and how fresh each
one's rows are, and whether this node should get traffic.

Every agent that is a member serves this, whichever roles it has.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from hawker.catalog.base import Catalog
from hawker.catalog.read.queries import Queries
from hawker.catalog.read.subscriptions import Subscriptions
from hawker.errors import Invalid, PreconditionFailed, StoreError
from hawker.host import Host
from hawker.http.app import reply
from hawker.http.call import Call
from hawker.http.events import EventStream
from hawker.http.handlers import Route, on
from hawker.model import api
from hawker.model.fleet_calls import ListMembers, RunSql, Subscribe
from hawker.model.op import Declared
from hawker.services import Service
from hawker.telemetry import Metrics


class CatalogApi(Service):
    """One member's. `routes` are for the application of each of the agent's roles; `close` before those stop
    serving, since it ends the streams that never end by themselves."""

    def __init__(self, catalog: Catalog, host: Host) -> None:
        self._catalog = catalog
        self._queries = Queries(catalog.view, host)
        self._subscriptions = Subscriptions(catalog.view, self._queries, host)

    def routes(self) -> tuple[Route, ...]:
        return (on(RunSql, self.sql), on(Subscribe, self.subscribe), on(ListMembers, self.members))

    async def close(self) -> None:
        """End the subscriptions; whoever listens is told. May be called again."""
        await self._subscriptions.close()

    # --- SQL ---------------------------------------------------------------------------------------------------------

    async def sql(self, call: Call, request: RunSql) -> Any:
        """A query on the replica. Workers' own databases are asked through a broker."""
        check_sql(request)
        if request.worker or request.on == "workers":
            raise PreconditionFailed(
                "this agent is no broker, and asks no worker for its database",
                hint="leave worker and on out to read the catalog, or ask a broker",
            )
        found = await self._queries.ask(request.query)
        return {"columns": found.columns, "rows": found.rows}

    async def subscribe(self, call: Call, request: Subscribe) -> Response:
        """A query's result and its changes, as server-sent events."""
        for_s = None if request.seconds is None else float(request.seconds)
        since = request.last_event_id or request.since
        subscription = await self._subscriptions.subscribe(request.query)
        return EventStream(self._subscriptions.events(subscription, since, for_s))

    # --- members -----------------------------------------------------------------------------------------------------

    async def members(self, call: Call, request: ListMembers) -> list[api.Member]:
        """Every node that the catalog knows of: this node, its region's, then the other regions'."""
        found = self._catalog.owners()
        home = next((m.region for m in found if m.here), "")
        return sorted(found, key=lambda m: (not m.here, m.region != home, m.region, m.name))

    # --- health and metrics ------------------------------------------------------------------------------------------

    def unfit(self) -> str:
        """Why this node should get no traffic now, "" when it may."""
        try:
            return self._catalog.unfit()
        except StoreError as error:
            return f"its replica cannot be read: {error.message}"

    def measure(self, metrics: Metrics) -> None:
        metrics.catalog_subscriptions.labels("queries").set(len(self._subscriptions))
        metrics.catalog_subscriptions.labels("listeners").set(self._subscriptions.listeners)


def health(role: str, name: str, reading: CatalogApi | None) -> Response:
    """200, or 503 with a reason: what a load balancer goes by. Without a catalog nothing is there to be behind in."""
    why = reading.unfit() if reading else ""
    return reply(api.Health(ok=not why, role=role, name=name, reason=why), 503 if why else 200)


async def no_catalog(call: Call) -> Any:
    """The handler of all of it where there is none."""
    raise PreconditionFailed(
        "this agent has a fixed list of workers, and no catalog",
        hint="leave broker.workers out of its configuration, or ask another agent",
    )


def check_sql(request: RunSql) -> None:
    """Raises `Invalid` for a worker of the catalog."""
    if request.worker and request.on == "catalog":
        raise Invalid("on", request.on, "leave it out with a worker: the catalog is this node's own")


CATALOG_CALLS: tuple[type[Declared[Any]], ...] = (RunSql, Subscribe, ListMembers)
