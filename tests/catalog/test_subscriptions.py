"""Subscriptions: a snapshot, then changes; resumable, bounded, and one result for all who ask the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.catalog.owners import Owner, machine
from tests.kit.tiers import costly
from tests.kit.virtual_time import run_in_virtual_time, virtual_host

from hawker.catalog.gossip.replica import Replica
from hawker.catalog.read import subscriptions as limits
from hawker.catalog.read.queries import Queries
from hawker.catalog.read.subscriptions import Subscription, Subscriptions
from hawker.core.results import RowChange
from hawker.errors import Invalid, TooManyRequests, Unreachable
from hawker.http.events import KEEP_ALIVE
from hawker.store.sql import TEXT_MAX, Found

STATES = "select id, state from machines order by id"


class Event(msgspec.Struct, frozen=True):
    name: str
    data: Any
    id: str | None = None


class Listener:
    """Reads a subscription's events as a client would."""

    def __init__(self, stream: AsyncGenerator[bytes, None], last_id: str = "") -> None:
        self._stream = stream
        self._held: list[Event] = []
        self.last_id = last_id

    async def next(self) -> Event:
        while not self._held:
            piece = await anext(self._stream)
            if piece != KEEP_ALIVE:
                self._held = [parsed(text) for text in piece.decode().split("\n\n") if text]
        event = self._held.pop(0)
        if event.id is not None:
            self.last_id = event.id
        return event

    async def until(self, name: str) -> list[Event]:
        """Events up to the first of this name, with it."""
        found = [await self.next()]
        while found[-1].name != name:
            found.append(await self.next())
        return found

    async def ended(self) -> list[Event]:
        """All that is still to come."""
        found = []
        with suppress(StopAsyncIteration):
            while True:
                found.append(await self.next())
        return found

    async def close(self) -> None:
        await self._stream.aclose()


def parsed(text: str) -> Event:
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return Event(fields["event"], json.loads(fields["data"]), fields.get("id"))


class World:
    """A replica, one owner of rows in it, and its subscriptions."""

    def __init__(self, directory: Path) -> None:
        host = virtual_host()
        self.replica = Replica.open(directory / "catalog.db", host)
        self.owner = Owner(self.replica, "ord-1")
        self.queries = Queries(self.replica, host)
        self.subscriptions = Subscriptions(self.replica, self.queries, host)

    async def listen(self, query: str = STATES, since: str = "", for_s: float | None = None) -> Listener:
        subscription = await self.subscriptions.subscribe(query)
        return Listener(self.subscriptions.events(subscription, since, for_s), since)

    def put(self, **rows: Any) -> None:
        self.owner.put("machines", **rows)


@asynccontextmanager
async def world_in(directory: Path) -> AsyncIterator[World]:
    world = World(directory)
    try:
        yield world
    finally:
        await world.subscriptions.close()
        world.replica.close()


def in_world(tmp_path: Path, test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run a test in virtual time."""

    async def run() -> None:
        async with world_in(tmp_path) as world:
            await test(world)

    run_in_virtual_time(run())


def change(kind: str, row: int, *values: Any) -> dict[str, Any]:
    return {"kind": kind, "row": row, "values": list(values)}


def test_a_listener_gets_a_snapshot_and_then_every_change(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine(), m2=machine("stopped"))
        listener = await world.listen()
        snapshot = await listener.until("end")
        assert [(e.name, e.data) for e in snapshot] == [
            ("columns", ["id", "state"]),
            ("row", {"row": 1, "values": ["m1", "started"]}),
            ("row", {"row": 2, "values": ["m2", "stopped"]}),
            ("end", {"rows": 2}),
        ]
        assert [e.id is not None for e in snapshot] == [False, False, False, True]
        world.put(m1=machine("stopped"), m2=None, m3=machine())
        changes = [await listener.next() for _ in range(3)]
        assert {e.name for e in changes} == {"change"}
        assert [e.data for e in changes] == [
            change("delete", 2, "m2", "stopped"),
            change("update", 1, "m1", "stopped"),
            change("insert", 3, "m3", "started"),
        ]
        assert [str(e.id).partition("/")[2] for e in changes] == ["1", "2", "3"]
        await listener.close()

    in_world(tmp_path, test)


def test_many_changes_in_a_short_time_are_told_as_one_and_no_change_as_none(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine())
        listener = await world.listen()
        await listener.until("end")
        for state in ("stopping", "stopped", "starting", "started", "stopping"):
            world.put(m1=machine(state, name=f"was {state}"))
        assert (await listener.next()).data == change("update", 1, "m1", "stopping")
        world.put(m1=machine("stopping", name="another"))
        await asyncio.sleep(10)
        world.put(m1=machine("stopped"))
        event = await listener.next()
        assert (event.data, event.id) == (change("update", 1, "m1", "stopped"), listener.last_id)
        assert listener.last_id.endswith("/2")
        await listener.close()

    in_world(tmp_path, test)


def test_who_comes_back_gets_what_was_missed_and_nothing_twice(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine())
        listener = await world.listen()
        await listener.until("end")
        world.put(m2=machine())
        await listener.next()
        await listener.close()
        world.put(m3=machine())
        await asyncio.sleep(1)
        world.put(m1=None)
        await asyncio.sleep(1)
        again = await world.listen(since=listener.last_id)
        assert [(e.name, e.data) for e in [await again.next() for _ in range(3)]] == [
            ("columns", ["id", "state"]),
            ("change", change("insert", 3, "m3", "started")),
            ("change", change("delete", 1, "m1", "started")),
        ]
        world.put(m4=machine())
        assert (await again.next()).data == change("insert", 4, "m4", "started")
        await again.close()

    in_world(tmp_path, test)


@pytest.mark.parametrize(
    "since", ["elsewhere/1", "x", "/", "{name}/99", "{name}/-1", "{name}/" + "9" * 5000, "{name}/\u0661"]
)
def test_who_comes_back_from_a_place_that_is_not_known_here_gets_a_reset_and_a_snapshot(
    tmp_path: Path, since: str
) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine())
        subscription = await world.subscriptions.subscribe(STATES)
        listener = await world.listen(since=since.replace("{name}", subscription.name))
        names = [(e.name, e.id) for e in await listener.until("end")]
        assert names[:2] == [("columns", None), ("reset", "")], "the id is taken back: half a snapshot is no place"
        assert [name for name, _ in names[2:]] == ["row", "end"]
        await listener.close()

    in_world(tmp_path, test)


def test_who_comes_back_later_than_a_result_is_kept_gets_a_reset(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listener = await world.listen()
        await listener.until("end")
        await listener.close()
        assert len(world.subscriptions) == 1
        await asyncio.sleep(limits.IDLE_S + 1)
        assert len(world.subscriptions) == 0
        again = await world.listen(since=listener.last_id)
        assert (await again.until("end"))[1].name == "reset"
        await again.close()

    in_world(tmp_path, test)


def test_one_result_is_held_however_many_listen_and_however_they_space_the_query(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listeners = await asyncio.gather(*(world.listen(STATES + end) for end in ("", ";", " ", " ; ", "\n")))
        for listener in listeners:
            await listener.until("end")
        assert (len(world.subscriptions), world.subscriptions.listeners) == (1, 5)
        world.put(m1=machine())
        ids = {(await listener.next()).id for listener in listeners}
        assert len(ids) == 1
        for listener in listeners:
            await listener.close()
        assert (len(world.subscriptions), world.subscriptions.listeners) == (1, 0)

    in_world(tmp_path, test)


def test_only_changes_of_tables_that_a_query_reads_run_it_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine())  # an owner's first range is about all its tables
        subscription = await world.subscriptions.subscribe(STATES)
        others = await world.subscriptions.subscribe("select worker, memory from capacity")
        assert (subscription.tables, others.tables) == (frozenset({"machines"}), frozenset({"capacity"}))
        await asyncio.sleep(1)
        world.put(m1=machine("stopped"))
        assert (subscription.dirty.is_set(), others.dirty.is_set()) == (True, False)

    in_world(tmp_path, test)


def test_what_the_replica_does_not_tell_of_is_looked_at_now_and_then(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listener = await world.listen("select name, status from members")
        await listener.until("end")
        world.replica.keep_member(
            "b", region="ord", host="h", port=1, roles="", status="alive", incarnation=0, born_ms=1, changed_ms=1
        )
        assert (await listener.next()).data == change("insert", 1, "b", "alive")
        await listener.close()

    in_world(tmp_path, test)


def test_a_query_is_run_again_only_when_there_may_be_something_new(tmp_path: Path) -> None:
    class Counted(Queries):
        runs = 0

        def read(self, query: str, text_max: int = TEXT_MAX) -> Found:
            self.runs += 1
            return super().read(query, text_max)

    async def test(world: World) -> None:
        queries = Counted(world.replica, virtual_host())
        subscriptions = Subscriptions(world.replica, queries, virtual_host())
        world.put(m1=machine())
        await subscriptions.subscribe(STATES)
        await asyncio.sleep(20)
        assert queries.runs == 1
        for n in range(10):
            world.put(m1=machine(name=str(n)))
        await asyncio.sleep(20)
        assert queries.runs == 2
        for n in range(10):
            world.put(m1=machine(name=str(n)))
            await asyncio.sleep(limits.DEBOUNCE_S / 20)
        await asyncio.sleep(20)
        assert queries.runs == 4, "the first at once, the others together"
        await subscriptions.close()

    in_world(tmp_path, test)


def test_a_listener_that_stays_long_goes_on_hearing(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listener = await world.listen()
        await listener.until("end")
        await asyncio.sleep(10 * limits.IDLE_S)
        world.put(m1=machine())
        assert (await listener.next()).data == change("insert", 1, "m1", "started")
        await listener.close()

    in_world(tmp_path, test)


def test_a_listener_that_hears_nothing_is_told_that_somebody_is_there(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        subscription = await world.subscriptions.subscribe(STATES)
        stream = world.subscriptions.events(subscription)
        pieces = [await anext(stream) for _ in range(4)]
        assert pieces[2:] == [KEEP_ALIVE, KEEP_ALIVE]
        assert asyncio.get_running_loop().time() == pytest.approx(2 * limits.KEEP_ALIVE_S)
        await stream.aclose()

    in_world(tmp_path, test)


def test_a_stream_ends_after_the_time_it_was_asked_for(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine())
        at_once = await world.listen(for_s=0)
        assert [e.name for e in await at_once.ended()] == ["columns", "row", "end"]
        later = await world.listen(for_s=40)
        assert [e.name for e in await later.ended()] == ["columns", "row", "end"]
        assert asyncio.get_running_loop().time() == pytest.approx(40, abs=1)

    in_world(tmp_path, test)


def test_a_slow_listener_is_cut_off_and_may_resume(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        subscription = await world.subscriptions.subscribe(STATES)
        slow = Listener(world.subscriptions.events(subscription))
        await slow.until("end")
        batch = [RowChange("insert", n, (f"m{n}", "started")) for n in range(limits.KEPT_MOST // 2)]
        for _ in range(2):
            subscription.add(batch)
        assert subscription.after(0) is not None, "as much as is kept"
        subscription.add(batch[:1])
        (error,) = await slow.ended()
        assert (error.name, error.data["status"]) == ("error", "too_slow")
        again = await world.listen(since=slow.last_id)
        assert (await again.until("end"))[1].name == "reset"
        await again.close()

    in_world(tmp_path, test)


def test_a_query_that_cannot_be_answered_any_more_ends_its_subscription_and_no_other(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(m1=machine(memory_mib=1))
        listener = await world.listen("select id, abs(memory_mib - 9223372036854775807 - 1) from machines")
        other = await world.listen()
        await listener.until("end")
        await other.until("end")
        world.put(m1=machine("stopped", memory_mib=0))
        (error,) = await listener.ended()
        assert (error.name, error.id) == ("error", None)
        assert "integer overflow" in error.data["error"]
        assert (await other.next()).data == change("update", 1, "m1", "stopped")
        assert len(world.subscriptions) == 1
        await other.close()

    in_world(tmp_path, test)


def test_a_result_that_grows_too_large_ends_its_subscription_with_an_error(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.put(**{f"m{n}": machine() for n in range(101)})
        squared = "select a.id, b.id from machines_all a, machines_all b where a.state = 'started' and b.cordoned = 0"
        with pytest.raises(Invalid, match="more than 10000 rows"):
            await world.listen(squared)
        assert len(world.subscriptions) == 0
        world.put(m0=None, m1=None)
        listener = await world.listen(squared)
        assert (await listener.until("end"))[-1].data == {"rows": 99 * 99}
        world.put(m0=machine(), m1=machine())
        (error,) = await listener.ended()
        assert error.name == "error"
        assert "more than 10000 rows" in error.data["error"]
        assert len(world.subscriptions) == 0

    in_world(tmp_path, test)


@pytest.mark.parametrize("query", ["", " ; ", "selec", "delete from machines_of", "select 1; select 2", "select x"])
def test_a_query_that_cannot_be_answered_is_refused_before_anything_is_sent(tmp_path: Path, query: str) -> None:
    async def test(world: World) -> None:
        with pytest.raises(Invalid):
            await world.subscriptions.subscribe(query)
        assert len(world.subscriptions) == 0

    in_world(tmp_path, test)


def test_one_more_query_takes_the_place_of_one_that_nobody_listens_to_or_is_refused(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listeners = []
        for n in range(limits.SUBSCRIPTIONS_MOST):
            listeners.append(await world.listen(f"select {n}"))
            await listeners[-1].until("end")
        with pytest.raises(TooManyRequests, match="64 different queries"):
            await world.listen("select 'one more'")
        same = await world.listen("select 1")
        await same.until("end")
        await listeners[5].close()
        more = await world.listen("select 'one more'")
        await more.until("end")
        assert len(world.subscriptions) == limits.SUBSCRIPTIONS_MOST
        for listener in (*listeners, same, more):
            await listener.close()

    in_world(tmp_path, test)


def test_listeners_are_told_when_the_agent_stops(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        listener = await world.listen()
        await listener.until("end")
        await world.subscriptions.close()
        (error,) = await listener.ended()
        assert (error.name, error.data["error"]) == ("error", "this agent stops")
        with pytest.raises(Unreachable):
            await world.listen()
        assert world.replica.on_applied == []

    in_world(tmp_path, test)


ROWS = st.dictionaries(
    st.sampled_from(["m1", "m2", "m3"]), st.one_of(st.none(), st.sampled_from(["started", "stopped"])), min_size=1
)
STEPS = st.lists(st.one_of(ROWS, st.just("break"), st.floats(0.01, 0.3)), max_size=12)


@given(STEPS)
@settings(max_examples=costly(10), deadline=None)
def test_who_follows_the_events_and_resumes_holds_what_the_query_gives(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    async def test(world: World) -> None:
        held: dict[int, list[Any]] = {}

        def take(event: Event) -> None:
            match event.name:
                case "reset":
                    held.clear()
                case "row":
                    held[event.data["row"]] = event.data["values"]
                case "change" if event.data["kind"] == "delete":
                    del held[event.data["row"]]
                case "change":
                    assert (event.data["row"] in held) == (event.data["kind"] == "update")
                    held[event.data["row"]] = event.data["values"]

        listener = await world.listen(for_s=0)
        for event in await listener.ended():
            take(event)
        for step in (*steps, 10.0, "break"):
            if step == "break":
                listener = await world.listen(since=listener.last_id, for_s=0)
                for event in await listener.ended():
                    take(event)
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                world.put(**{key: machine(state) if state else None for key, state in step.items()})
        expected = (await world.queries.ask(STATES)).rows
        assert sorted(held.values()) == sorted(map(list, expected))

    in_world(tmp_path_factory.mktemp("followed"), test)


def test_a_subscription_keeps_the_latest_changes_whatever_their_size() -> None:
    async def test() -> None:
        subscription = Subscription("select 1", "S")
        subscription.add([RowChange("insert", 1, ("x" * limits.KEPT_BYTES,))])
        assert len(subscription.after(0) or []) == 1
        subscription.add([RowChange("insert", 2, ("y",))])
        assert subscription.after(0) is None
        assert len(subscription.after(1) or []) == 1

    run_in_virtual_time(test())
