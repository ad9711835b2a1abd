"""Which machine a route gives, and who waits for what: over a catalog alone, and a worker that does as it is told.

In virtual time: what a test waits for is not hurried by a machine that is busy, and takes no time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.fleets import Fleet
from tests.kit.waiting import until

from hawker.core.routing import Wishes
from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.app_table import AppTable
from hawker.proxy.base import Failure, Lease, Refused
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.machines.calls import Declined, Released, Workers
from hawker.proxy.routing.router import UNKNOWN_MOST, UNKNOWN_S, ProxyRouter
from hawker.proxy.routing.routes import LOOK_AGAIN_S, ProxyRoute
from hawker.proxy.settings import RouterSettings

pytestmark = pytest.mark.virtual_time

HTTP = ("http",)
SOON_S = 0.05


class Worker:
    """The worker beside the proxy. `machines` take connections at the one address that `serve` opened."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.rested: list[str] = []
        self.answers: list[words.Awake | Declined] = []
        self.instance = "i"
        self.lets_go = False  # it tells that a program may run before it can say that it does
        self.go = asyncio.Event()
        self.go.set()

    async def wake(self, wish: words.Wake, released: Released = lambda awake: None) -> words.Awake:
        self.woken.append(wish.machine)
        if self.lets_go:
            released(words.Awake(before=State.stopped, instance="i"))
        await self.go.wait()
        answer = self.answers.pop(0) if self.answers else words.Awake(before=State.stopped, instance="i")
        if isinstance(answer, Declined):
            raise answer
        return answer

    async def rest(self, wish: words.Rest) -> words.Resting:
        self.rested.append(wish.machine)
        await self.go.wait()
        if wish.instance not in ("", self.instance):
            raise Declined(412, "failed_precondition", f"machine {wish.machine} runs as {self.instance} by now")
        return words.Resting(state=State.stopped)


class Here:
    """A proxy's router beside worker ord-1, whose machines listen at `port`."""

    def __init__(self, fleet: Fleet, port: int) -> None:
        self.fleet = fleet
        self.port = port
        self.worker = Worker()
        self.index = CatalogIndex(fleet.replica, "ord")
        settings = RouterSettings(queue=8, start_again_s=5.0)
        calls = Workers("token", "ord-1", self.worker)
        self.app_table = AppTable(
            self.index, calls, settings, worker="ord-1", region="ord", token="token", random=fleet.host.rng.random
        )
        self.router = ProxyRouter(
            self.app_table,
            settings,
            domain="apps.example",
            claims=lambda port: "",
            random=fleet.host.rng.random,
            complete=lambda: self.complete,
        )
        self.complete = True

    def machine(
        self, machine: str, *, state: str = "started", soft: int = 20, hard: int = 0, worker: str = "ord-1"
    ) -> None:
        self.fleet.machine(machine, "web", state=state, worker=worker)
        self.fleet.service(machine, "web", internal=self.port, soft=soft, hard=hard, worker=worker)

    async def route(self) -> ProxyRoute:
        return await self.router.load(80, "web.apps.example")

    async def obtain(self, seconds: float = 5.0, tried: tuple[str, ...] = ()) -> Lease:
        route = await self.route()
        return route.take(tried=tried) or await route.obtain(
            tried=tried, deadline=asyncio.get_running_loop().time() + seconds
        )


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)  # that is all that a look at a machine asks for
    fleet = Fleet(tmp_path / "fleet")
    fleet.worker("ord-1")
    fleet.worker("ord-2", port=4282, proxy=4290)
    fleet.app("web")
    here = Here(fleet, listening.getsockname()[1])
    yield here
    await here.router.close()
    await here.app_table.workers.close()
    here.index.close()
    fleet.close()
    listening.close()


async def test_a_machine_that_runs_is_given_at_once_and_counted_until_the_end(here: Here) -> None:
    here.machine("m1")
    lease = await here.obtain()
    assert (lease.machine, lease.address, lease.headers) == ("m1", ("127.0.0.1", here.port), ())
    assert lease.load == b"1/20/0"
    lease.release()
    lease.release()
    lease.failed("reset")
    assert lease.load == b"0/20/0"
    assert here.worker.woken == []


async def test_a_machine_that_serves_nothing_has_no_door(here: Here) -> None:
    """Nothing would ever take it away: there are apps whose machines come and go by the thousand."""
    here.machine("m1")
    here.fleet.machine("n1", "web")
    (await here.obtain()).release()
    here.fleet.machine("n2", "web")
    here.index.settle()
    assert set(here.app_table.doors) == {"m1"}
    here.fleet.put("ord-1", "machines", m1=None)
    here.index.settle()
    assert here.app_table.doors == {}


async def test_what_is_unknown_is_held_for_a_while_by_who_has_yet_to_catch_up_and_then_asked_to_come_again(
    here: Here,
) -> None:
    """Once it was 404, which says that there is no such app: users believe that."""
    asked = [("nobody.apps.example", "PR01"), ("web.apps.example", "PR01"), ("elsewhere.example", "PR01")]
    for complete, status, after_s in ((True, 404, 0), (False, 503, 1)):
        here.complete = complete
        for host, code in asked:
            began = asyncio.get_running_loop().time()
            with pytest.raises(Refused) as refused:
                here.router.find(80, host) or await here.router.load(80, host)
            assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (status, code, after_s)
            held_s = asyncio.get_running_loop().time() - began
            assert held_s == pytest.approx(0.0 if complete else UNKNOWN_S, abs=0.1)
    asking = asyncio.ensure_future(here.router.load(80, "web.apps.example"))
    await asyncio.sleep(UNKNOWN_S / 2)
    here.machine("m1")
    assert (await asking).app == "web"
    assert here.router.held == 0


async def test_of_those_that_wait_for_what_is_unknown_no_more_are_held_than_a_bound(here: Here) -> None:
    here.complete = False
    asking = [asyncio.ensure_future(here.router.load(80, f"{n}.apps.example")) for n in range(UNKNOWN_MOST)]
    await asyncio.sleep(SOON_S)
    assert here.router.held == UNKNOWN_MOST
    with pytest.raises(Refused) as refused:
        async with asyncio.timeout(SOON_S):
            await here.router.load(80, "more.apps.example")
    assert refused.value.status == 503
    here.complete = True
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {each.status for each in answers if isinstance(each, Refused)} == {404}


async def test_at_the_hard_limit_requests_wait_in_the_order_in_which_they_came(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    first = await here.obtain()
    order: list[int] = []

    async def one(number: int) -> None:
        lease = await here.obtain()
        order.append(number)
        await asyncio.sleep(0)
        lease.release()

    waiting = []
    for number in range(5):
        waiting.append(asyncio.ensure_future(one(number)))
        await asyncio.sleep(0)
    late = await here.route()
    assert late.take() is None
    assert first.others == 5
    first.release()
    assert first.others == 0, "there is room for one, and who is first has been told"
    assert late.take() is None  # there is room, and others were there before
    await asyncio.gather(*waiting)
    assert order == list(range(5))


async def test_who_gives_up_lets_the_next_one_have_its_turn(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    first = await here.obtain()
    waiting = [asyncio.ensure_future(here.obtain()) for _ in range(3)]
    await asyncio.sleep(SOON_S)
    first.release()
    waiting[0].cancel()
    async with asyncio.timeout(LOOK_AGAIN_S * 0.8):  # without being told it would look only then
        lease = await waiting[1]
    assert not waiting[2].done()
    lease.release()
    (await waiting[2]).release()
    assert (await here.obtain()).load == b"1/1/1"


async def test_more_than_the_queue_holds_are_refused_at_once(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    lease = await here.obtain()
    waiting = [asyncio.ensure_future(here.obtain(SOON_S)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="wait already") as refused:
        await here.obtain()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "PR04", 1)
    late = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(error.status, error.code) for error in late if isinstance(error, Refused)] == [(503, "PR03")] * 8
    lease.release()
    (await here.obtain()).release()


async def test_a_machine_that_is_full_has_another_one_started_beside_it(here: Here) -> None:
    here.machine("m1", soft=1, hard=5)
    here.machine("m2", soft=1, hard=5, state="stopped")
    leases = [await here.obtain() for _ in range(2)]
    assert [lease.machine for lease in leases] == ["m1", "m1"]  # the second did not wait for it
    await until(lambda: here.worker.woken == ["m2"])
    await until(lambda: not here.app_table.doors["m2"].opening)
    assert (await here.obtain()).machine == "m2"


async def test_a_machine_that_cannot_be_started_is_left_for_another(here: Here) -> None:
    here.machine("m1", state="stopped")
    here.machine("m2", state="stopped")
    here.worker.answers = [Declined(422, "start_failed", "machine did not start: no such program")]
    lease = await here.obtain()
    assert here.worker.woken[-1] == lease.machine
    assert sorted(here.worker.woken) == ["m1", "m2"]


async def test_a_connection_to_a_program_that_was_let_go_proves_that_it_runs(here: Here) -> None:
    here.machine("m1", state="stopped")
    here.worker.lets_go = True
    here.worker.go.clear()
    lease = await here.obtain()
    assert (lease.machine, here.app_table.doors["m1"].state) == ("m1", "started")
    here.worker.go.set()


async def test_a_start_that_failed_does_not_keep_from_waiting_for_room_elsewhere(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    here.machine("m2", state="stopped")
    here.worker.answers = [Declined(422, "start_failed", "machine did not start: no such program")]
    first = await here.obtain()
    waiting = asyncio.ensure_future(here.obtain())
    await until(lambda: here.worker.woken == ["m2"] and not here.app_table.doors["m2"].opening)
    first.release()
    assert (await waiting).machine == "m1"


async def test_one_that_is_refused_while_its_program_boots_is_waited_for(here: Here) -> None:
    here.machine("m1")
    lease = await here.obtain()
    here.worker.go.clear()
    lease.failed("refused")
    again = asyncio.ensure_future(here.obtain(tried=("m1",)))
    await asyncio.sleep(SOON_S)
    assert not again.done()
    here.worker.go.set()
    assert (await again).machine == "m1"


@pytest.mark.parametrize("how", ["refused", "reset", "timeout"])
async def test_one_that_its_user_stops_as_a_request_reaches_it_is_started_for_that_request_at_once(
    here: Here, how: Failure
) -> None:
    """It was taken for one in trouble, and left alone for a while."""
    loop = asyncio.get_running_loop()
    here.machine("m1")
    for _ in range(3):
        lease = await here.obtain()
        here.machine("m1", state="stopped")
        await until(lambda: here.app_table.doors["m1"].state == "stopped")
        lease.failed(how)
        began, woken = loop.time(), len(here.worker.woken)
        (await here.obtain(tried=("m1",))).release()
        assert len(here.worker.woken) == woken + 1
        assert loop.time() - began < SOON_S
        here.machine("m1")
        await until(lambda: here.app_table.doors["m1"].machine.state == "started")


async def test_one_that_is_stopped_before_its_checks_pass_is_started_again(here: Here) -> None:
    """It was waited for as long as a machine may take to come up, and then left alone."""

    async def becomes(state: str) -> None:
        here.machine("m1", state=state)
        await until(lambda: here.app_table.doors["m1"].machine.state == state)

    here.machine("m1", state="updating")
    here.fleet.check("m1", "web", status="warning", service=f"tcp/{here.port}")
    before = (State.updating, "old"), (State.stopped, "new")
    here.worker.answers = [words.Awake(before=state, instance=name, checked=True) for state, name in before]
    asked = asyncio.ensure_future(here.obtain(30))
    await until(lambda: here.worker.woken == ["m1"])
    for state in ("stopping", "stopped"):
        await becomes(state)
    await until(lambda: here.worker.woken == ["m1", "m1"])
    here.fleet.check("m1", "web", status="passing", service=f"tcp/{here.port}")
    for state in ("starting", "started"):
        await becomes(state)
    assert (await asked).machine == "m1"


async def test_a_request_in_the_middle_of_a_stop_waits_for_its_end_and_starts_it_again(here: Here) -> None:
    here.machine("m1")
    (await here.obtain()).release()
    door = here.app_table.doors["m1"]
    here.worker.go.clear()
    resting = asyncio.ensure_future(door.rest("stop"))
    await asyncio.sleep(0)
    asked = asyncio.ensure_future(here.obtain())
    await asyncio.sleep(SOON_S)
    assert here.worker.woken == []  # a start that overtakes a stop would be stopped
    here.worker.go.set()
    assert await resting
    assert (await asked).machine == "m1"
    assert here.worker.woken == ["m1"]


async def test_a_machine_with_a_request_is_not_put_to_rest(here: Here) -> None:
    here.machine("m1")
    lease = await here.obtain()
    assert not await here.app_table.doors["m1"].rest("stop")
    lease.release()
    assert await here.app_table.doors["m1"].rest("stop")
    assert not await here.app_table.doors["m1"].rest("stop")
    assert here.worker.rested == ["m1"]


async def test_a_program_that_was_started_again_meanwhile_is_put_to_rest_at_the_second_try(here: Here) -> None:
    here.machine("m1", state="stopped")
    (await here.obtain()).release()
    here.worker.instance = "another"
    door = here.app_table.doors["m1"]
    assert not await door.rest("stop")
    (await here.obtain()).release()  # it runs on
    assert await door.rest("stop")
    assert here.worker.woken == ["m1"]


async def test_a_machine_elsewhere_is_reached_by_its_workers_proxy(here: Here) -> None:
    here.machine("m2", worker="ord-2")
    lease = await here.obtain()
    assert lease.address == ("127.0.0.1", 4290)
    assert dict(lease.headers) == {
        b"hawker-backhaul": b"token",
        b"hawker-app": b"web",
        b"hawker-machine": b"m2",
        b"hawker-port": b"80",
    }


async def test_a_sleeping_machine_elsewhere_is_started_by_its_own_door(here: Here) -> None:
    here.machine("m2", worker="ord-2", state="stopped")
    assert (await here.obtain()).machine == "m2"
    assert here.worker.woken == []


async def test_what_another_proxy_tells_of_its_load_counts(here: Here) -> None:
    here.machine("m1", soft=2, hard=3)
    here.machine("m2", soft=2, hard=3, worker="ord-2")
    lease = await here.obtain(tried=("m1",))
    lease.heard(b"3/2/3")
    lease.heard(b"nonsense")
    others = [await here.obtain() for _ in range(3)]
    assert [other.machine for other in others] == ["m1"] * 3


async def test_a_row_that_is_wrong_is_not_believed_until_it_changes(here: Here) -> None:
    here.machine("m2", worker="ord-2")
    (await here.obtain()).failed("elsewhere")
    with pytest.raises(Refused) as refused:
        await here.obtain(SOON_S)
    assert refused.value.status == 503
    here.machine("m2", worker="ord-2", soft=21)
    assert (await here.obtain()).machine == "m2"


async def test_an_app_of_another_region_is_asked_for_there(here: Here) -> None:
    here.fleet.worker("mad-1", region="mad", host="10.2.0.1", port=4281, proxy=4290)
    here.fleet.elsewhere("web", "mad", "mad-1")
    lease = await here.obtain()
    assert (lease.region, lease.address) == ("mad", ("10.2.0.1", 4290))
    assert dict(lease.headers)[b"hawker-machine"] == b""
    lease.failed("refused")
    with pytest.raises(Refused):
        await here.obtain(SOON_S)
    lease = await here.obtain(tried=("mad-1",))
    assert lease.region == "mad"  # held until it is tried again: one failure says little of a whole worker
    assert here.app_table.load("web").held == 0  # type: ignore[union-attr]
    lease.heard(b"")
    lease.failed("reset")
    lease = await here.obtain()  # and what a machine does nothing of its proxy, which told of it
    assert lease.region == "mad"
    lease.failed("refused")
    here.machine("m1")
    await until(lambda: (app := here.index.find("web")) is not None and bool(app.machines))
    assert (await here.obtain()).machine == "m1"


async def test_a_request_that_wants_another_region_goes_there_if_the_app_is_there(here: Here) -> None:
    here.machine("m1")
    here.fleet.worker("mad-1", region="mad", host="10.2.0.1", port=4281, proxy=4290)
    here.fleet.elsewhere("web", "mad", "mad-1")
    route = await here.route()
    deadline = asyncio.get_running_loop().time() + SOON_S
    for wishes, region in (
        (Wishes(prefer_regions=("mad",)), "mad"),
        (Wishes(force_regions=("mad",)), "mad"),
        (Wishes(prefer_regions=("syd",)), "ord"),
        (Wishes(prefer_regions=("syd", "mad")), "mad"),
    ):
        lease = route.take(wishes) or await route.obtain(wishes, deadline=deadline)
        assert lease.region == region
    with pytest.raises(Refused):
        await route.obtain(Wishes(force_regions=("syd",)), deadline=deadline)


async def test_a_machine_that_must_take_it_and_is_not_here_is_asked_for_in_each_region_once(here: Here) -> None:
    here.machine("m1")
    for region in ("mad", "lhr"):
        for number in (1, 2):
            here.fleet.worker(f"{region}-{number}", region=region, host="10.2.0.1", proxy=4290)
            here.fleet.elsewhere("web", region, f"{region}-{number}")
    route = await here.route()
    wishes = Wishes(force_machine="m9")
    deadline = asyncio.get_running_loop().time() + SOON_S
    tried: list[str] = []
    for region in ("lhr", "mad"):  # as they lie from Chicago
        lease = await route.obtain(wishes, tried, deadline=deadline)
        assert (lease.region, dict(lease.headers)[b"fly-force-instance-id"]) == (region, b"m9")
        lease.failed("elsewhere")
        tried.append(lease.machine)
    with pytest.raises(Refused) as refused:
        await route.obtain(wishes, tried, deadline=deadline)
    assert (refused.value.status, refused.value.code) == (404, "PR02")
    with pytest.raises(Refused) as refused:
        await here.router.inner("web", 80, "").obtain(wishes, deadline=deadline)
    assert refused.value.code == "elsewhere"


async def test_over_the_backhaul_a_machine_of_another_worker_is_elsewhere(here: Here) -> None:
    here.machine("m1", state="stopped")
    here.machine("m2", worker="ord-2")
    await here.route()
    for machine in ("m2", "m3"):
        with pytest.raises(Refused) as refused:
            here.router.inner("web", 80, machine)
        assert refused.value.code == "elsewhere"
    route = here.router.inner("web", 80, "m1")
    lease = await route.obtain(deadline=asyncio.get_running_loop().time() + 5)
    assert (lease.machine, here.worker.woken) == ("m1", ["m1"])
    lease.release()
    here.fleet.machine("m1", "web", worker="ord-2", generation=2)
    here.fleet.service("m1", "web", internal=here.port, worker="ord-2")
    await until(lambda: (app := here.index.find("web")) is not None and app.machines["m1"].worker == "ord-2")
    assert route.take() is None  # it was given to another worker meanwhile
    with pytest.raises(Refused) as refused:
        await route.obtain(deadline=asyncio.get_running_loop().time() + 5)
    assert refused.value.code == "elsewhere"


async def test_over_the_backhaul_a_request_for_no_machine_stays_in_the_region(here: Here) -> None:
    here.machine("m2", worker="ord-2")
    here.fleet.worker("mad-1", region="mad", host="10.2.0.1", port=4281, proxy=4290)
    here.fleet.elsewhere("web", "mad", "mad-1")
    await here.route()
    route = here.router.inner("web", 80, "")
    lease = route.take()
    assert lease is not None
    assert lease.machine == "m2"
    lease.failed("elsewhere")
    with pytest.raises(Refused):
        await route.obtain(deadline=asyncio.get_running_loop().time() + SOON_S)


async def test_requests_in_flight_are_still_counted_when_services_change(here: Here) -> None:
    here.machine("m1", soft=1, hard=2)
    lease = await here.obtain()
    here.fleet.service("m1", "web", internal=here.port, soft=1, hard=2, ports=((80, 80, HTTP), (8443, 8443, HTTP)))
    here.index.settle()
    assert here.app_table.doors["m1"].in_flight == 1
    assert lease.load == b"1/1/2"
    lease.release()
    assert here.app_table.doors["m1"].in_flight == 0


async def test_an_app_that_is_deleted_is_found_no_more(here: Here) -> None:
    here.machine("m1")
    await here.route()
    assert here.router.find(80, "web.apps.example") is not None
    here.fleet.put("ord-1", "apps", web={"org": "personal", "stamp": 9, "deleted": True})
    assert here.router.find(80, "web.apps.example") is None
    with pytest.raises(Refused) as refused:
        await here.route()
    assert refused.value.status == 404


async def test_a_machine_hands_a_request_on_only_within_its_organization(here: Here) -> None:
    here.machine("m1")
    here.fleet.app("ours", org="personal")
    here.fleet.app("theirs", org="another")
    for app in ("ours", "theirs"):
        here.fleet.machine(f"m-{app}", app)
        here.fleet.service(f"m-{app}", app, internal=here.port)
    route = await here.route()
    assert (await here.router.other(route, "ours")).app == "ours"
    for app, code in (("theirs", "PA05"), ("nobody", "PA04")):
        with pytest.raises(Refused) as refused:
            await here.router.other(route, app)
        assert refused.value.code == code


async def test_a_request_that_must_wait_for_one_machine_is_in_nobodys_way(here: Here) -> None:
    here.machine("m1")
    here.machine("m2")
    here.fleet.check("m2", "web", status="critical", service=f"tcp/{here.port}")
    route = await here.route()
    await until(lambda: bool(route.routed.app.machines["m2"].failing))
    late = asyncio.get_running_loop().time() + 5
    waits = asyncio.ensure_future(route.obtain(Wishes(force_machine="m2"), deadline=late))
    await asyncio.sleep(0)
    lease = (await here.route()).take()
    assert lease is not None
    assert lease.machine == "m1"
    lease.release()
    here.fleet.check("m2", "web", status="passing", service=f"tcp/{here.port}")
    (await waits).release()


async def test_room_that_is_no_use_to_the_first_is_the_next_ones(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    here.machine("m2", soft=1, hard=1)
    first, second = await here.obtain(), await here.obtain()
    at_1, at_2 = sorted((first, second), key=lambda lease: lease.machine)
    route = await here.route()
    late = asyncio.get_running_loop().time() + 5
    picky = asyncio.ensure_future(route.obtain(Wishes(not_machine="m1"), deadline=late))
    await asyncio.sleep(0)
    anyone = asyncio.ensure_future(route.obtain(deadline=late))
    await asyncio.sleep(0)
    at_1.release()
    async with asyncio.timeout(LOOK_AGAIN_S * 0.6):
        lease = await anyone
    assert (lease.machine, picky.done()) == ("m1", False)
    at_2.release()
    async with asyncio.timeout(LOOK_AGAIN_S * 0.6):
        (await picky).release()
    lease.release()


async def test_who_looks_again_in_between_keeps_its_place(here: Here) -> None:
    here.machine("m1", soft=1, hard=1)
    first = await here.obtain()
    order: list[int] = []

    async def one(number: int) -> None:
        lease = await here.obtain()
        order.append(number)
        lease.release()

    waiting = [asyncio.ensure_future(one(0))]
    await asyncio.sleep(LOOK_AGAIN_S * 0.8)
    waiting.append(asyncio.ensure_future(one(1)))
    await asyncio.sleep(LOOK_AGAIN_S * 0.5)  # the first has looked, the second has not
    first.release()
    await asyncio.gather(*waiting)
    assert order == [0, 1]


@pytest.mark.parametrize("how", ["timeout", "unhealthy"])
async def test_the_only_machine_is_not_left_alone_for_one_answer_that_is_none(here: Here, how: Failure) -> None:
    """Who can ask for a page that breaks would take the whole app away from everybody else."""
    here.machine("m1")
    (await here.obtain()).failed(how)
    route = await here.route()
    lease = route.take()
    assert lease is not None
    here.machine("m2")
    await until(lambda: "m2" in route.routed.app.machines)
    lease.failed(how)
    leases = [await here.obtain() for _ in range(8)]
    assert {lease.machine for lease in leases} == {"m2"}
    for lease in leases:
        lease.release()


async def test_apps_that_nobody_asks_for_are_dropped_from_memory(here: Here) -> None:
    """But those with requests under way, and those with machines of this worker, which only their doors know of."""
    here.machine("m1")
    here.app_table.settings = replace(here.app_table.settings, apps=4)
    for number in range(20):
        here.fleet.app(f"app-{number}")
        here.fleet.machine(f"of-{number}", f"app-{number}", worker="ord-2")
        here.fleet.service(f"of-{number}", f"app-{number}", worker="ord-2")

    async def route(app: str) -> ProxyRoute:
        host = f"{app}.apps.example"
        return here.router.find(80, host) or await here.router.load(80, host)

    await here.route()
    door = here.app_table.doors["m1"]
    first = await route("app-0")
    lease = first.take()
    assert lease is not None
    forgotten = await route("app-1")
    for number in range(2, 20):
        await route(f"app-{number}")
    assert here.index.loaded <= 5
    assert here.app_table.doors["m1"] is door
    assert (await route("app-0")).routed is first.routed
    assert forgotten.routed.dropped
    assert forgotten.take() is None
    again = await forgotten.obtain(deadline=asyncio.get_running_loop().time() + 1)
    assert again.machine == "of-1"
    again.release()
    lease.release()
    for number in range(1, 20):
        await route(f"app-{number}")
    assert first.routed.dropped
    assert len(here.app_table.doors) == 1


@pytest.mark.parametrize("change", ["services", "worker"])
async def test_a_stop_under_way_is_not_forgotten_when_rows_change(here: Here, change: str) -> None:
    here.machine("m1")
    await here.route()
    door = here.app_table.doors["m1"]
    here.worker.go.clear()
    resting = asyncio.ensure_future(door.rest("stop"))
    await until(lambda: here.worker.rested == ["m1"])
    if change == "services":
        here.fleet.service("m1", "web", internal=here.port, ports=((80, 81, ("http",)),))
    else:
        here.fleet.worker("ord-1", port=4299)
    here.index.settle()
    route = await here.route()
    assert route.take() is None
    obtaining = asyncio.ensure_future(route.obtain(deadline=asyncio.get_running_loop().time() + 5))
    await asyncio.sleep(0)
    assert not obtaining.done()
    here.worker.go.set()
    assert await resting
    (await obtaining).release()
    assert here.worker.woken == ["m1"]


async def test_a_start_under_way_is_not_forgotten_when_rows_change(here: Here) -> None:
    here.machine("m1", state="stopped")
    obtaining = asyncio.ensure_future(here.obtain())
    here.worker.go.clear()
    await until(lambda: here.worker.woken == ["m1"])
    here.fleet.machine("m1", "web", state="started")
    here.fleet.service("m1", "web", internal=here.port, ports=((80, 81, ("http",)),))
    here.index.settle()
    assert (await here.route()).take() is None, "it runs, and does not listen yet"
    here.worker.go.set()
    (await obtaining).release()


async def test_requests_in_flight_are_still_counted_after_any_changes_of_rows(here: Here) -> None:
    here.machine("m1", soft=1, hard=2)
    first = await here.obtain()
    for number, change in enumerate(("worker", "services", "worker", "services")):
        if change == "worker":
            here.fleet.worker("ord-1", port=4300 + number)
        else:
            here.fleet.service("m1", "web", internal=here.port, soft=1, hard=2, ports=((80, 81 + number, ("http",)),))
        here.index.settle()
    assert here.app_table.doors["m1"].in_flight == 1
    second = await here.obtain()
    assert second.load == b"2/1/2"
    first.release()
    second.release()
    third = await here.obtain()
    assert third.load == b"1/1/2"
    third.release()
    assert here.app_table.doors["m1"].in_flight == 0


async def test_requests_in_flight_count_again_once_their_machine_is_back_among_the_rows(here: Here) -> None:
    here.machine("m1", soft=1, hard=2)
    lease = await here.obtain()
    here.fleet.put("ord-1", "services", **{f"m1/tcp/{here.port}": None})
    here.index.settle()
    assert "m1" not in here.app_table.doors
    here.machine("m1", soft=1, hard=2)
    here.index.settle()
    assert here.app_table.doors["m1"].in_flight == 1
    assert (await here.obtain()).load == b"2/1/2"
    lease.release()
    assert here.app_table.doors["m1"].in_flight == 1


async def test_no_more_wait_for_a_machine_that_comes_up_again_than_it_takes(here: Here) -> None:
    here.machine("m1", soft=1, hard=2)
    here.worker.go.clear()
    (await here.obtain()).failed("refused")
    waiting = [asyncio.ensure_future(here.obtain(tried=("m1",))) for _ in range(4)]
    await until(lambda: here.worker.woken == ["m1"])
    assert here.app_table.doors["m1"].in_flight == 2
    here.worker.go.set()
    for _ in range(4):
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert here.app_table.doors["m1"].in_flight <= 2
        one = done.pop()
        waiting.remove(one)
        one.result().release()
