"""Orders whose worker fails in the middle: what is released there, what is undone, and what asking again finds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.kit.sim_worker import APP, REGION, SimWorker, a_worker, machine_config, order
from tests.kit.virtual_time import virtual_time

from hawker.broker.fleet import Fleet, WorkerLink
from hawker.broker.orders import Orders, Wanted
from hawker.client.wire import PeerUnreachable
from hawker.core.ranking import SpreadPolicy
from hawker.errors import Conflict, HawkerError, NoCapacity, StoreError, Unreachable
from hawker.model.config import check_config
from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.market import (
    Ask,
    ClaimKey,
    Confirmed,
    ConfirmOrder,
    Fate,
    FindFate,
    Offer,
    Order,
    Refusal,
    Released,
    ReleaseOrder,
    Reservation,
)
from hawker.model.op import Request
from hawker.model.request_codec import Encoded
from hawker.model.rows import ClaimRow, MachineRow
from hawker.store.tx import Tx
from hawker.telemetry import Metrics
from hawker.worker import ledger
from hawker.worker.api.market import claim
from hawker.worker.machine.writer import get_machine


class Link:
    """A link to a worker of this process. A confirmation goes wrong as `fault` says: before the worker has seen it, or
    `after` it has filled the order. From then on nothing gets through until `heal`."""

    name = "ord-1"
    region = REGION
    missed = False

    def __init__(self, worker: SimWorker, fault: HawkerError | None, *, after: bool, told: bool) -> None:
        self._worker = worker
        self._fault = fault
        self._after = after
        self._told = told  # the worker answers with the error, as against no answer
        self._down = False
        self.releases: list[bool] = []

    def heal(self) -> None:
        self._down = False

    def collect(self, request: Ask) -> asyncio.Future[Offer | Refusal]:
        answer: asyncio.Future[Offer | Refusal] = asyncio.get_running_loop().create_future()
        answer.set_result(self._worker.market.offer(request))
        return answer

    async def send(self, request: Request[Any], timeout_s: float | None = None) -> Any:
        match request:
            case Order():
                return await self.reserve(request)
            case ConfirmOrder():
                return await self.confirm(request)
            case ReleaseOrder():
                return await self._release(request)
            case FindFate():
                return Fate(fate=self._worker.market.fate(request.key))
            case ClaimKey() if request.order:
                return await claim(self._worker.store, request)
            case ClaimKey():
                return self._worker.store.read.get(ClaimRow, request.id)
        raise AssertionError(f"nothing of an order: {request}")

    async def send_unread(self, sent: Encoded, timeout_s: float) -> bytes:
        """The machine that a key's order has made."""
        return bytes(_view(get_machine(self._worker.store.read, sent.target.rpartition("/")[2])))

    async def reserve(self, order: Order) -> Reservation | Refusal:
        return await self._worker.market.reserve(order)

    async def confirm(self, item: ConfirmOrder) -> Confirmed:
        fault, self._fault = self._fault, None
        if self._after or fault is None:
            row, _, _ = await self._worker.market.confirm(item.key, item.app, item.decision)
        if fault is None:
            return Confirmed(machine=_view(row))
        self._down = True
        if self._told:
            return Confirmed(status=fault.status, error=fault.body())
        raise fault

    async def _release(self, request: ReleaseOrder) -> Released:
        if self._down:
            raise PeerUnreachable(self.name, "does not answer", sent=True)
        self.releases.append(request.undo)
        machine = await self._worker.market.release(request.key, request.cause)
        if machine and request.undo:
            await self._worker.machines.destroy(APP.name, machine, self._worker.request(), force=True)
        return Released(machine=machine)


def _view(row: MachineRow) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"id": row.id, "state": row.state}))


async def orders_over(worker: SimWorker, link: Link) -> Orders:
    """A broker's orders over one worker, which knows the app."""

    def keep(tx: Tx) -> None:
        tx.record("app.kept", APP.name, cause="a test")
        tx.put(APP)

    await worker.store.submit(keep)
    fleet = Fleet([], "token")
    fleet.links = {link.name: cast(WorkerLink, link)}
    return Orders(fleet, worker.host, SpreadPolicy(), Metrics())


def wanted(key: str) -> Wanted:
    return Wanted(order=order(""), config=check_config(machine_config()), key=key)


LOST = PeerUnreachable("ord-1", "did not answer", sent=True)
STORE = StoreError("disk I/O error")
FAULTS = [pytest.param(LOST, False, id="no-answer"), pytest.param(STORE, True, id="store-error")]
FAULTS.append(pytest.param(HawkerError("the answer does not read"), False, id="unreadable"))


def machines(worker: SimWorker) -> list[MachineRow]:
    return worker.store.read.select(MachineRow)


@pytest.mark.parametrize(("fault", "told"), FAULTS)
@virtual_time
async def test_a_keyed_order_that_was_filled_in_doubt_is_found_by_its_key_and_stays(
    fault: HawkerError, told: bool, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        link = Link(worker, fault, after=True, told=told)
        orders = await orders_over(worker, link)
        with pytest.raises(Unreachable, match="the order may be filled") as doubt:
            await orders.place(wanted("k"))
        assert doubt.value.hint == "ask again with the same key"
        found = (await orders.place(wanted("k"))).machine
        link.heal()
        await asyncio.sleep(10)  # the release comes through
        assert link.releases == [False]
        (machine,) = machines(worker)
        assert machine.state is State.started
        assert msgspec.json.decode(found)["id"] == machine.id
        await worker.machines.destroy(APP.name, machine.id, worker.request(), force=True)
        await worker.at_rest()
        again = (await orders.place(wanted("k"))).machine
        assert msgspec.json.decode(again) == {"id": machine.id, "state": "destroyed"}, "a key names one order for ever"
        await orders.releases.close()


@pytest.mark.parametrize(("fault", "told"), FAULTS)
@virtual_time
async def test_an_order_without_a_key_that_was_filled_in_doubt_is_undone(
    fault: HawkerError, told: bool, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        link = Link(worker, fault, after=True, told=told)
        orders = await orders_over(worker, link)
        with pytest.raises(Unreachable, match="the order is being undone there") as doubt:
            await orders.place(wanted(""))
        assert doubt.value.hint == "order again"
        link.heal()
        await asyncio.sleep(10)
        assert link.releases == [True]
        assert [m.state for m in machines(worker)] == [State.destroyed]
        await orders.releases.close()


@pytest.mark.parametrize("key", ["k", ""])
@pytest.mark.parametrize(("fault", "told"), FAULTS)
@virtual_time
async def test_a_reservation_that_was_not_confirmed_is_given_back_at_once_and_the_order_can_be_repeated(
    fault: HawkerError, told: bool, key: str, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        link = Link(worker, fault, after=False, told=told)
        orders = await orders_over(worker, link)
        with pytest.raises(Unreachable):
            await orders.place(wanted(key))
        link.heal()
        await asyncio.sleep(1)
        assert len(link.releases) == 1
        assert worker.store.read.query("select count(*) from reservation") == [(0,)]
        await orders.place(wanted(key))
        assert len(machines(worker)) == 1
        await orders.releases.close()


@pytest.mark.parametrize(("key", "hint"), [("k", "ask again with the same key"), ("", "order again")])
@virtual_time
async def test_a_reservation_that_lapsed_needs_no_release(key: str, hint: str, tmp_path: Path) -> None:
    class Slow(Link):
        async def confirm(self, item: ConfirmOrder) -> Confirmed:
            await asyncio.sleep(60)
            with pytest.raises(Conflict) as lapsed:
                await super().confirm(item)
            return Confirmed(status=lapsed.value.status, error=lapsed.value.body())

    async with a_worker(tmp_path) as worker:
        link = Slow(worker, None, after=False, told=True)
        orders = await orders_over(worker, link)
        with pytest.raises(Conflict, match="the reservation was lost") as lost:
            await orders.place(wanted(key))
        assert lost.value.hint == hint
        await asyncio.sleep(10)
        assert link.releases == []
        await orders.releases.close()


class Unreadable(Link):
    """Reserves, and gives an answer that does not read."""

    async def reserve(self, order: Order) -> Reservation | Refusal:
        await super().reserve(order)
        raise HawkerError("the answer does not read")


@virtual_time
async def test_a_reservation_whose_answer_was_an_error_is_given_back_at_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        link = Unreadable(worker, None, after=False, told=False)
        orders = await orders_over(worker, link)
        with pytest.raises(NoCapacity, match="ord-1"):
            await orders.place(wanted(""))
        await worker.until(lambda: link.releases == [True])
        assert ledger.held(worker.store.read) == Resources()
        await orders.releases.close()


@virtual_time
async def test_an_order_in_doubt_is_undone_where_its_worker_is_by_then(tmp_path: Path) -> None:
    """A link is replaced when its worker moves; the old one never answers again. Found by the simulator, seed 145."""
    async with a_worker(tmp_path) as worker:
        link = Link(worker, PeerUnreachable("ord-1", "does not answer", sent=True), after=True, told=False)
        orders = await orders_over(worker, link)
        with pytest.raises(Unreachable, match="being undone"):
            await orders.place(wanted(""))
        moved = Link(worker, None, after=False, told=True)
        orders._fleet.links = {"ord-1": cast(WorkerLink, moved)}
        await worker.until(lambda: moved.releases == [True])
        await orders.releases.close()


@virtual_time
async def test_an_order_that_is_abandoned_while_it_reserves_gives_the_room_back_at_once(tmp_path: Path) -> None:
    """Without a release the worker would hold the room until the reservation lapses."""

    class Slow(Link):
        async def reserve(self, order: Order) -> Reservation | Refusal:
            await super().reserve(order)
            await asyncio.sleep(60)
            raise AssertionError("nobody waits so long")

    async with a_worker(tmp_path) as worker:
        link = Slow(worker, None, after=False, told=True)
        orders = await orders_over(worker, link)
        placing = asyncio.create_task(orders.place(wanted("")))
        await worker.until(lambda: ledger.held(worker.store.read) != Resources())
        placing.cancel()
        await worker.until(lambda: link.releases == [True])
        assert ledger.held(worker.store.read) == Resources()
        await orders.releases.close()
