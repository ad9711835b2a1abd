"""What a broker makes of workers that answer with an error, or that it does not know: nothing is taken for done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.kit.sim_worker import machine_config, order

from hawker.broker.api import Broker
from hawker.broker.apps import Apps, KnownApp
from hawker.broker.directory import Directory
from hawker.broker.fleet import Fleet, PeerError, WorkerLink
from hawker.broker.order_errors import no_capacity
from hawker.broker.orders import Wanted
from hawker.broker.relay import Relay
from hawker.broker.replacement import Replacement
from hawker.catalog.gossip.replica import Replica
from hawker.client.connection import PeerUnreachable, Response
from hawker.core.ranking import SpreadPolicy
from hawker.errors import Conflict, DiskFull, HawkerError, Invalid, Unreachable
from hawker.host import live
from hawker.http.call import Call
from hawker.model.config import check_config
from hawker.model.fingerprint import Fingerprint
from hawker.model.fleet_calls import ForgetWorker
from hawker.model.guest import Resources
from hawker.model.machine_calls import CreateMachine, ShowMachine
from hawker.model.market import Done, Located, Reason, Refusal, Seen, WorkerStatus
from hawker.model.op import Request
from hawker.model.rows import AppRow
from hawker.telemetry import Metrics

MACHINE = "1234567890abcd"
ROW = AppRow(name="web", id="web", org="personal", network="default", number=7, created_at_ms=1, stamp_ms=1)


def wanting(**more: Any) -> Wanted:
    return Wanted(order=order(""), config=check_config(machine_config()), **more)


class Says:
    """A link to a worker that answers every call alike."""

    region = "ord"
    name = ""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def ask(self, request: Request[Any], timeout_s: float | None = None) -> Any:
        if isinstance(self._answer, HawkerError):
            raise self._answer
        return self._answer

    send = ask


def fleet_of(**links: Says) -> Fleet:
    fleet = Fleet([], "token")
    for name, link in links.items():
        link.name = name
    fleet.links = {name: cast(WorkerLink, link) for name, link in links.items()}
    return fleet


@pytest.mark.parametrize("catalog", [False, True], ids=["fixed-list", "catalog"])
async def test_an_app_that_no_worker_could_delete_is_not_deleted(catalog: bool, tmp_path: Path) -> None:
    replica = Replica.open(tmp_path / "catalog.db", live())
    directory = Directory(replica, Fleet([], "token")) if catalog else None
    apps = Apps(fleet_of(one=Says(DiskFull("the disk is full"))), live(), directory)
    with pytest.raises(DiskFull):
        await apps.delete(KnownApp(row=ROW, machines=0))
    assert apps.known("web") is None
    replica.close()


async def test_with_a_fixed_list_every_worker_must_take_the_deletion() -> None:
    apps = Apps(fleet_of(one=Says(ROW), two=Says(DiskFull("the disk is full"))), live())
    with pytest.raises(DiskFull):
        await apps.delete(KnownApp(row=ROW, machines=0))


async def test_a_machine_is_not_replaced_whose_worker_the_broker_does_not_know_yet() -> None:
    seen = Seen(worker="ord-1", app="web", name="a", region="ord", generation=1)
    wanted = wanting(replaces=MACHINE)
    with pytest.raises(Unreachable, match=f"machine {MACHINE} is on ord-1, which this broker does not know"):
        await Replacement(fleet_of(two=Says(seen))).resolve(wanted, named=False, placed=False)


FULL = PeerError(Response(507, {}, b'{"error": "the disk is full"}'))
SILENT = PeerUnreachable("two", "does not answer", sent=False)


NO_CALL = cast(Call, SimpleNamespace())


def status(name: str) -> WorkerStatus:
    nothing = Resources()
    return WorkerStatus(
        name=name,
        region="ord",
        version="1",
        cordoned=False,
        disk_full=False,
        disk_failed=False,
        capacity=nothing,
        held=nothing,
        machines={},
        driver=Fingerprint(driver="process", healthy=True),
        parked_runs=0,
    )


def forgetting(fleet: Fleet) -> Any:
    broker = Broker("broker", fleet, live(), SpreadPolicy(), Metrics(), "ord")
    return broker.forget(NO_CALL, ForgetWorker("one"))


async def test_a_worker_whose_address_another_one_has_by_now_is_forgotten() -> None:
    assert await forgetting(fleet_of(one=Says(status("two")), two=Says(status("two"))))


async def test_a_worker_that_answers_is_not_forgotten() -> None:
    with pytest.raises(Conflict, match="worker one answers: it is not gone"):
        await forgetting(fleet_of(one=Says(status("one")), two=Says(status("two"))))


async def test_any_worker_that_can_tells_the_catalog_who_is_gone() -> None:
    assert await forgetting(fleet_of(one=Says(SILENT), two=Says(FULL), three=Says(Done())))
    with pytest.raises(PeerError, match="the disk is full"):
        await forgetting(fleet_of(one=Says(SILENT), two=Says(FULL), three=Says(SILENT)))
    with pytest.raises(Unreachable, match="no other worker answers that could tell the catalog"):
        await forgetting(fleet_of(one=Says(SILENT), two=Says(SILENT)))


async def test_an_order_that_replaces_a_machine_takes_no_key() -> None:
    """It was dropped without a word: asked again with it, the order was refused."""
    config = {"image": "host", "init": {"exec": ["sleep", "1"]}}
    order = CreateMachine("web", config=config, replaces=MACHINE, key="k")
    broker = Broker("broker", fleet_of(), live(), SpreadPolicy(), Metrics(), "ord")
    with pytest.raises(Invalid, match=r"Idempotency-Key: .*leave it out"):
        await broker.create_machine(NO_CALL, order)


class Has(Says):
    """A link to a worker that has a machine of this generation and answers its calls with `passed`."""

    def __init__(self, name: str, generation: int, passed: Response | HawkerError) -> None:
        super().__init__(Located("web", generation))
        self.name, self.peer, self._passed = name, self, passed

    async def request(self, *args: Any, **options: Any) -> Response:
        if isinstance(self._passed, HawkerError):
            raise self._passed
        return self._passed


@pytest.mark.parametrize("first", [SILENT, Response(404, {}, b"")], ids=["away", "back"])
async def test_a_call_finds_the_worker_that_a_machine_was_ordered_anew_on(first: Response | HawkerError) -> None:
    """Also a broker that remembers the one before, which may be away for ever."""
    fleet = fleet_of(one=Has("one", 1, first), two=Has("two", 2, Response(200, {}, b"{}")))
    relay = Relay(fleet)
    relay.remember(MACHINE, "one")
    assert (await relay.machine_call(ShowMachine, a_get())).status_code == 200
    assert (await relay.locate(MACHINE)).name == "two"


async def test_a_machine_whose_only_worker_is_away_is_unreachable() -> None:
    relay = Relay(fleet_of(one=Has("one", 1, SILENT), two=Says(PeerError(Response(404, {}, b"{}")))))
    relay.remember(MACHINE, "one")
    with pytest.raises(Unreachable):
        await relay.machine_call(ShowMachine, a_get())


def a_get() -> Call:
    scope = {"raw_path": b"/v1/apps/web/machines/" + MACHINE.encode(), "query_string": b"", "path": "/"}
    request = SimpleNamespace(method="GET", scope=scope, headers={})
    return cast(Call, SimpleNamespace(path=lambda part: MACHINE, request=request, body=b"", id="r", owner="o"))


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (Refusal(worker="b", region="ord", reason=Reason.disk_full), "; make room on the disk of a, b"),
        (
            Refusal(worker="b", region="ord", reason=Reason.disk_failed),
            "; make room on the disk of a; look at the disk of b",
        ),
        (
            Refusal(worker="b", region="ord", reason=Reason.full, resource="cpus_shared", wanted=1, free=0),
            "; worker.cpu_overcommit of the workers' configuration may be raised; make room on the disk of a",
        ),
    ],
)
def test_a_refused_order_is_told_what_to_change_and_where(refusal: Refusal, remedy: str) -> None:
    full = Refusal(worker="a", region="ord", reason=Reason.disk_full)
    told = no_capacity("ord", wanting().config.guest, ["ord"], [full, refusal]).hint
    assert told == f"hawker workers shows what is free; try a smaller guest or another region{remedy}"
