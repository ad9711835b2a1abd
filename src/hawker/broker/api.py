"""The broker's handlers of the public API: orders, lists over all workers, apps, the platform.

What belongs to one machine is passed on to its worker (`hawker.broker.relay`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import msgspec
from msgspec.structs import asdict
from starlette.responses import Response
from starlette.types import ASGIApp

from hawker.broker.app_deletion import destroy_all
from hawker.broker.apps import Apps
from hawker.broker.directory import Directory
from hawker.broker.fleet import Fleet, PeerError, ask_each, gather_named, unreachable
from hawker.broker.image_hints import ImageHints
from hawker.broker.images import ImageRelay
from hawker.broker.machine_names import machine_name
from hawker.broker.orders import Orders, Wanted
from hawker.broker.relay import Relay, answer, ask_lists, query_of
from hawker.broker.replacement import Replacement
from hawker.catalog.read.api import CATALOG_CALLS, CatalogApi, check_sql, health, no_catalog
from hawker.core.ranking import Policy
from hawker.errors import Conflict, Invalid, NameTaken, NotBuilt, Refused, Unreachable
from hawker.host import Host
from hawker.http.app import Serving, Tokens
from hawker.http.call import Call
from hawker.http.handlers import Route, on, unread
from hawker.http.openapi import document
from hawker.model import api, views
from hawker.model import fleet_calls as calls
from hawker.model.agent_calls import ShowHealth
from hawker.model.app_calls import CreateApp, DeleteApp, ListApps, ShowApp
from hawker.model.call_bases import OfApp
from hawker.model.calls import ShowOpenApi
from hawker.model.config import accept_config
from hawker.model.guest import RESOURCES, Guest, Resources, check_guest
from hawker.model.machine_calls import CreateMachine, ListMachines
from hawker.model.market import Ask, DescribeWorker, LocateMachine, Offer, Order, Query, SetCordon, TellGone
from hawker.model.regions import expand, place
from hawker.model.unbuilt_calls import UNBUILT_CALLS, empty
from hawker.model.values import HOST_IMAGE, check_app_name, check_label, is_machine_id
from hawker.telemetry import Metrics

KEY_CHARACTERS_MAX = 255
BUILDER_ROLE = "remote-docker-builder"
FORGET_S = 2.0


class Broker:
    """One broker in this process. Holds connections and hints, nothing that lasts."""

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        host: Host,
        policy: Policy,
        metrics: Metrics,
        region: str,
        directory: Directory | None = None,
        reading: CatalogApi | None = None,
        urls: Mapping[str, str] | None = None,
    ) -> None:
        """`urls`: where apps are served, by public port, with "{app}" for an app's name."""
        self._name = name
        self._urls = urls or {}
        self._fleet = fleet
        self._host = host
        self._metrics = metrics
        self._region = region
        self._apps = Apps(fleet, host, directory)
        self._orders = Orders(fleet, host, policy, metrics, self._apps, ImageHints(directory))
        self._directory = directory
        self._relay = Relay(fleet, directory)
        self._images = ImageRelay(fleet, self._relay, host, policy)
        self._reading = reading
        self._replacing = Replacement(fleet)

    def app(self, tokens: Tokens, routes: Iterable[Route] = ()) -> ASGIApp:
        """The ASGI application: the whole public API, and `routes`."""
        catalog = self._reading.routes() if self._reading else [unread(kind, no_catalog) for kind in CATALOG_CALLS]
        served = (
            on(CreateMachine, self.create_machine),
            unread(ListMachines, self.list_machines),
            on(ListApps, self.list_apps),
            on(CreateApp, self.create_app),
            on(ShowApp, self.show_app),
            on(DeleteApp, self.delete_app),
            unread(calls.ListRegions, self.regions),
            on(calls.FindRoom, self.placements),
            unread(calls.ListWorkers, self.workers),
            on(calls.CordonWorker, partial(self._set_cordoned, True)),
            on(calls.UncordonWorker, partial(self._set_cordoned, False)),
            on(calls.ForgetWorker, self.forget),
            unread(calls.ListRuns, self.runs),
            on(calls.RunSql, self.sql),
            *(route for route in catalog if route.kind is not calls.RunSql),
            *self._images.routes(),
            *self._relay.routes(),
            *(on(kind, partial(self._empty, empty(kind))) for kind in UNBUILT_CALLS),
            unread(ShowHealth, self.health),
            unread(ShowOpenApi, self.openapi),
        )
        serving = Serving(self._host, tokens, self._metrics, self._region)
        return serving.app((*served, *routes))

    @property
    def releasing(self) -> int:
        """How many orders are being given up on a worker that has not acknowledged it yet."""
        return len(self._orders.releases)

    async def close(self) -> None:
        await self._orders.releases.close()
        await self._fleet.close()
        if self._directory:
            self._directory.close()

    # --- machines ----------------------------------------------------------------------------------------------------

    async def create_machine(self, call: Call, body: CreateMachine) -> Any:
        if body.min_secrets_version:
            raise NotBuilt("min_secrets_version", body.min_secrets_version, "secrets are not built yet")
        key = body.key
        if len(key) > KEY_CHARACTERS_MAX:
            raise Invalid("Idempotency-Key", key, f"at most {KEY_CHARACTERS_MAX} characters")
        if key and body.replaces:
            remedy = "leave it out: of the orders that replace a machine with one generation one is filled in any case"
            raise Invalid("Idempotency-Key", key, remedy)
        name = check_label("name", body.name) if body.name else machine_name(self._host.rng)
        config = accept_config(body.config)
        order = Order(
            key="",
            app=body.app_name,
            region=body.region or "any",
            name=name,
            config=config.raw,
            resources=config.resources(),
            skip_launch=bool(body.skip_launch),
            cordoned=bool(body.skip_service_registration),
            lease_ttl_s=body.lease_ttl or 0,
            owner=call.owner,
            request=call.id,
            trace=call.trace,
            image_timeout_s=body.image_timeout or 0,
        )
        wait = body.wait and not body.skip_launch
        wanted = Wanted(
            order=order, config=config, key=key, claimant=call.owner, wait=wait, replaces=body.replaces or ""
        )
        if wanted.replaces:
            wanted = await self._replacing.resolve(wanted, named=bool(body.name), placed=bool(body.region))
        if body.name and not key and not body.replaces:  # with a key it may be the machine that this order has made
            self._refuse_taken(body.app_name, body.name)
        fill = await self._orders.place(wanted)
        if wanted.order.machine:
            self._relay.remember(wanted.order.machine, fill.worker)
        response = Response(fill.machine, media_type="application/json")
        if fill.timings_ms:
            timing = ", ".join(f"{name};dur={ms:g}" for name, ms in fill.timings_ms.items())
            response.headers["server-timing"] = timing
        return response

    def _refuse_taken(self, app: str, name: str) -> None:
        """Two machines of one name could not be told apart. Machines of other regions, and those of the last
        milliseconds, are not seen here."""
        if self._directory and (there := self._directory.machine_named(app, name)):
            raise NameTaken(
                f"machine {there} of app {app} has the name {name}",
                hint="give another name, or none: the market finds one",
            )

    async def list_machines(self, call: Call) -> Any:
        """The machines of an app on every worker that answers; the others are named in a header of ours."""
        name = call.path("app_name")
        machines, silent = await self._lists(call)
        if not machines:
            await self._apps.get(name)
        return answer(machines, silent)

    async def _lists(self, call: Call) -> tuple[list[msgspec.Raw], list[str]]:
        """What every worker lists under this path, and who did not answer. Raises what a worker that answered
        refused."""
        answers, errors = await ask_lists(call, self._fleet.links.values())
        silent = unreachable(errors)
        for worker, error in errors.items():
            if worker not in silent:
                raise error
        return [entry for answer in answers.values() for entry in answer], silent

    # --- apps --------------------------------------------------------------------------------------------------------

    async def list_apps(self, call: Call, request: ListApps) -> Any:
        org, role = request.org_slug, request.app_role
        apps, silent = await self._apps.all()
        found = [
            views.app_view(app.row, app.machines, self._urls)
            for app in apps
            if org in (None, app.row.org) and role in ("", app.row.role)
        ]
        return answer(api.Apps(total_apps=len(found), apps=found), silent)

    async def create_app(self, call: Call, body: CreateApp) -> Any:
        name = body.name or body.app_name
        if not name:
            raise Invalid("app_name", name, "give the app a name")
        if body.app_role_id == BUILDER_ROLE:
            raise NotBuilt("app_role_id", body.app_role_id, "remote builders are not built; build images elsewhere")
        check_app_name(name)
        org = check_label("org_slug", body.org_slug or "personal")
        network = check_label("network", body.network or "default")
        row = await self._apps.create(name, org, network, body.app_role_id or "")
        return views.app_view(row, 0, self._urls)

    async def show_app(self, call: Call, request: ShowApp) -> Any:
        name = request.app_name
        if is_machine_id(name):
            return await self._article(call, name)
        app = await self._apps.get(name)
        return views.app_view(app.row, app.machines, self._urls)

    async def delete_app(self, call: Call, request: DeleteApp) -> Any:
        name = request.app_name
        if is_machine_id(name):
            return await self._article(call, name)
        app = await self._apps.get(name)
        if app.machines:
            await destroy_all(self._fleet, call, name, force=request.force)
        await self._apps.delete(app)
        return api.Ok()

    async def _empty(self, what: Any, call: Call, request: OfApp[Any]) -> Any:
        """A list of what is not built yet, of an app that is there."""
        await self._apps.get(request.app_name)
        return what

    async def _article(self, call: Call, machine: str) -> Any:
        """The article's paths: a machine by its id alone. Asked of its worker under the full path."""
        link = await self._relay.locate(machine)
        where = await link.send(LocateMachine(machine_id=machine))
        return await self._relay.send(link, call, f"/v1/apps/{where.app}/machines/{machine}{query_of(call)}")

    # --- the platform ------------------------------------------------------------------------------------------------

    async def regions(self, call: Call) -> Any:
        links, regions = self._fleet.links, self._fleet.regions()
        answers, errors = await self._fleet.ask_all(DescribeWorker())
        smallest = Guest().resources()
        room: dict[str, int] = dict.fromkeys(regions, 0)
        for name, worker in answers.items():
            room[links[name].region] += _fits(worker.capacity - worker.held, smallest)
        shown = [
            api.Region(
                code=code,
                name=(at := place(code)).name,
                latitude=at.latitude,
                longitude=at.longitude,
                gateway_available=False,
                requires_paid_plan=False,
                deprecated=False,
                capacity=capacity,
                geo_region=at.geo,
            )
            for code, capacity in room.items()
        ]
        nearest = regions[0] if shown else ""
        return answer(api.Regions(Regions=shown, Nearest=nearest), unreachable(errors))

    async def placements(self, call: Call, body: calls.FindRoom) -> Any:
        if body.volume_name or body.volume_size_bytes:
            raise NotBuilt("volume_name", body.volume_name, "volumes are not built yet; leave the field out")
        raw = (body.compute or {}).get("guest", body.compute) or {}
        wanted = check_guest(raw, "compute").resources()
        left = body.count or None
        found = []
        silent: list[str] = []
        for region in expand(body.region or "any", self._fleet.regions()):
            ask = Ask(app="", region=region, image=HOST_IMAGE, resources=wanted)
            answers, errors = await gather_named({link.name: link.send(ask) for link in self._fleet.in_region(region)})
            silent += unreachable(errors)
            count = sum(_fits(answer.free, wanted) for answer in answers.values() if isinstance(answer, Offer))
            count = count if left is None else min(count, left)
            left = None if left is None else left - count
            if count:
                found.append(api.PlacementRegion(region=region, count=count, concurrency=count))
        return answer(api.PlacementReply(regions=found), silent)

    async def workers(self, call: Call) -> Any:
        """Every worker that is known; one that does not answer says so."""
        links = self._fleet.links
        answers, errors = await self._fleet.ask_all(DescribeWorker())
        return [
            {"reachable": True, **asdict(answers[name])}
            if name in answers
            else {"reachable": False, "name": name, "region": link.region, "error": errors[name].message}
            for name, link in links.items()
        ]

    async def _set_cordoned(
        self, cordoned: bool, call: Call, request: calls.CordonWorker | calls.UncordonWorker
    ) -> api.Ok:
        await self._fleet.link(request.name).send(SetCordon(cordoned=cordoned))
        return api.Ok()

    async def forget(self, call: Call, request: calls.ForgetWorker) -> Any:
        """Any worker that answers and has room tells the catalog. One that answers itself is not gone; another may have
        its address by now."""
        name = request.name
        gone = self._fleet.link(name)
        try:
            answering = (await gone.send(DescribeWorker(), FORGET_S)).name
        except Unreachable:
            answering = ""
        if answering == name:
            raise Conflict(f"worker {name} answers: it is not gone", hint=f"hawker workers cordon {name}")
        refusal: PeerError | None = None
        for link in [link for other, link in self._fleet.links.items() if other != name]:
            try:
                await link.ask(TellGone(name=name), FORGET_S)
            except PeerError as error:  # it has no room, or has not heard of that worker
                refusal = error
            except Unreachable:
                pass
            else:
                return api.Ok()
        raise refusal or Unreachable("no other worker answers that could tell the catalog", hint="hawker workers")

    async def runs(self, call: Call) -> Any:
        entries, silent = await self._lists(call)
        return answer(entries, silent)

    async def sql(self, call: Call, body: calls.RunSql) -> Any:
        """A query on this node's replica of the catalog; or the same on every worker or one, each row led by the
        worker's name."""
        check_sql(body)
        if not body.worker and body.on != "workers":
            return await (self._reading.sql(call, body) if self._reading else no_catalog(call))
        asked = [self._fleet.link(body.worker)] if body.worker else list(self._fleet.links.values())
        answers, errors = await ask_each(asked, Query(query=body.query))
        for error in errors.values():
            if not unreachable({"": error}):
                raise Refused(error.message)
        columns: list[str] = next((answer.columns for answer in answers.values() if answer.columns), [])
        rows = [[name, *row] for name, answer in answers.items() for row in answer.rows]
        return {"columns": ["worker", *columns], "rows": rows, "unreachable": unreachable(errors)}

    async def health(self, call: Call) -> Response:
        return health("broker", self._name, self._reading)

    async def openapi(self, call: Call) -> Response:
        return Response(_openapi(), media_type="application/json")


@cache
def _openapi() -> bytes:
    """Made when it is first asked for: 10 ms, which no start of an agent needs to wait."""
    return msgspec.json.encode(document())


def _fits(free: Resources, wanted: Resources) -> int:
    """How many of `wanted` fit into `free`."""
    counts = [getattr(free, name) // need for name in RESOURCES if (need := getattr(wanted, name))]
    return max(0, min(counts, default=0))
