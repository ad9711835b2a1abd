"""Whatever happens to requests, machines and rows, in whatever order: a hard limit holds, nobody waits while there is
room, everybody who waits comes to an end, no machine is put to rest under a request, and nothing stays counted.

A story is a list of steps, drawn by Hypothesis, over three machines behind the doors of one proxy. The worker is a
model of one: it starts and stops machines after a while, fails or is silent when the story says so, and shows a row
late.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Any, get_args

from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.kit.fleets import Fleet
from tests.kit.tiers import costly
from tests.kit.virtual_time import run_in_virtual_time

from hawker.core.routing import ANY, Take, Wishes
from hawker.errors import Unreachable
from hawker.model import door as words
from hawker.model.machine import State
from hawker.proxy.app_table import AppTable
from hawker.proxy.base import Failure, Lease, Refused
from hawker.proxy.catalog_view.index import CatalogIndex
from hawker.proxy.machines.calls import Declined, Released, Workers
from hawker.proxy.routing.router import ProxyRouter
from hawker.proxy.settings import RouterSettings

MACHINES = ("m1", "m2", "m3")
LIMITS = {"m1": (1, 1), "m2": (1, 2), "m3": (2, 2)}
AWAKE_MOST_S = 0.4
LET_GO = ("let go", "let go in vain")
"""A start of the model worker, its longest."""
ALL_OVER_S = 200.0
"""Longer than any deadline, start or rest."""

Step = tuple[Any, ...]


class Machine:
    """One, as it is: its row may lag behind. Its address is taken as long as it exists, and listens while it runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.soft, self.hard = LIMITS[name]
        self.extra_ports = 0
        self.there = True
        self.cordoned = False
        self.running = False
        self.instance = 0
        self.asked = ""  # what the proxy has under way at the worker: "wake" or "rest"
        self.starts = 0  # of those: one that was let go may still be under way when the next is asked for
        self.at_rest = False  # by the proxy's wish, and nobody started it since
        self._taken = socket.socket()
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._taken.bind(("127.0.0.1", 0))
        self.port: int = self._taken.getsockname()[1]
        self._listening: socket.socket | None = None

    def start(self) -> None:
        if not self.running:
            self.instance += 1
            self._listening = socket.socket()
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(("127.0.0.1", self.port))
            self._listening.listen(1024)
        self.running, self.at_rest = True, False

    def stop(self) -> None:
        self.running = False
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def close(self) -> None:
        self.stop()
        self._taken.close()


class Request:
    """One of a user's. `lease` while it is at a machine."""

    def __init__(self, story: Story, wishes: Wishes, tried: tuple[str, ...], seconds: float) -> None:
        self.story = story
        self.wishes = wishes
        self.tried = tried  # of these it wants none
        self.lease: Lease | None = None
        self.hard_most = {each.name: each.hard for each in story.machines.values()}  # since it came; 0 is no limit
        self.task = asyncio.ensure_future(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        story = self.story
        try:
            route = await story.router.load(80, "web.apps.example")
            deadline = asyncio.get_running_loop().time() + seconds
            lease = route.take(self.wishes, self.tried) or await route.obtain(
                self.wishes, self.tried, deadline=deadline
            )
        except Refused:
            return
        self.lease = lease
        story.granted(self)

    def limits_changed(self) -> None:
        for machine in self.story.machines.values():
            most = self.hard_most[machine.name]
            self.hard_most[machine.name] = max(most, machine.hard) if most and machine.hard else 0


class Story:
    def __init__(self, directory: Path, lag_s: float) -> None:
        self.lag_s = lag_s
        self.fleet = Fleet(directory)
        self.machines = {name: Machine(name) for name in MACHINES}
        self.requests: list[Request] = []
        self.rests: list[asyncio.Future[bool]] = []
        self.wrong: list[str] = []
        self.answers: list[str] = []
        self.workers_port = 4281
        self.fleet.worker("ord-1")
        self.fleet.app("web")
        self.index = CatalogIndex(self.fleet.replica, "ord")
        routing = RouterSettings(queue=6)
        random = self.fleet.host.rng.random
        calls = Workers("token", "ord-1", self)
        self.app_table = AppTable(
            self.index, calls, routing, worker="ord-1", region="ord", token="token", random=random
        )
        self.router = ProxyRouter(self.app_table, routing, domain="apps.example", claims=lambda port: "", random=random)
        for machine in self.machines.values():
            self.show(machine)
        self.app_table.load("web")

    # --- the worker --------------------------------------------------------------------------------------------------

    async def wake(self, wish: words.Wake, released: Released = lambda awake: None) -> words.Awake:
        machine = self.machines[wish.machine]
        self.must(machine.asked != "rest", f"{machine.name}: a start in the middle of a stop")
        machine.asked, machine.starts = "wake", machine.starts + 1
        try:
            before = State.started if machine.running else State.stopped
            answer = self.answers.pop(0) if self.answers else "quickly"
            await asyncio.sleep(AWAKE_MOST_S if answer == "slowly" else 0.01)
            if answer == "silent":
                raise Unreachable("no answer")
            if answer == "declined" or not machine.there:
                raise Declined(422, "start_failed", "no such program")
            machine.start()
            self.show_later(machine)
            if answer.startswith("let go"):
                released(words.Awake(before=before, instance=f"i{machine.instance}"))
                await asyncio.sleep(AWAKE_MOST_S)
            if answer == "let go in vain":
                machine.stop()
                self.show_later(machine)
                raise Declined(422, "start_failed", "it cannot be recorded")
            if answer == "silent after all":
                raise Unreachable("no answer")
            return words.Awake(before=before, instance=f"i{machine.instance}")
        finally:
            machine.starts -= 1
            machine.asked = "wake" if machine.starts else ""

    async def rest(self, wish: words.Rest) -> words.Resting:
        machine = self.machines[wish.machine]
        self.must(machine.asked != "rest", f"{machine.name}: a stop in the middle of another")
        if machine.asked == "wake":
            raise Declined(409, "busy", "it is being started")
        machine.asked = "rest"
        try:
            self.must(not self.at(machine.name), f"{machine.name} is put to rest under a request")
            if wish.instance not in ("", f"i{machine.instance}"):
                raise Declined(412, "failed_precondition", "another instance")
            await asyncio.sleep(0.02)
            machine.stop()
            machine.at_rest = True
            self.show_later(machine)
            return words.Resting(state=State.suspended if wish.how == "suspend" else State.stopped)
        finally:
            machine.asked = ""

    # --- rows --------------------------------------------------------------------------------------------------------

    def show(self, machine: Machine, *, running: bool | None = None) -> None:
        running = machine.running if running is None else running
        if not machine.there:
            self.fleet.put("ord-1", "machines", **{machine.name: None})
            self.fleet.put("ord-1", "services", **{f"{machine.name}/tcp/{machine.port}": None})
            return
        state = "started" if running else "stopped"
        self.fleet.machine(machine.name, "web", state=state, cordoned=machine.cordoned)
        extra = tuple((9000 + n, 9000 + n, ("http",)) for n in range(machine.extra_ports))
        ports = ((80, 80, ("http",)), *extra)
        self.fleet.service(
            machine.name, "web", internal=machine.port, soft=machine.soft, hard=machine.hard, ports=ports
        )

    def show_later(self, machine: Machine) -> None:
        """What is so now, after a while; rows come in order."""
        running = machine.running
        loop = asyncio.get_running_loop()
        loop.call_later(self.lag_s, lambda: self.show(machine, running=running))

    # --- requests ----------------------------------------------------------------------------------------------------

    def at(self, machine: str) -> list[Request]:
        return [each for each in self.requests if each.lease is not None and each.lease.machine == machine]

    def granted(self, request: Request) -> None:
        assert request.lease is not None
        machine = self.machines[request.lease.machine]
        self.must(machine.asked != "rest", f"{machine.name} is given to a request while it is being stopped")
        self.must(not machine.at_rest, f"{machine.name} is given to a request, and sleeps")
        most = request.hard_most[machine.name]
        count = len(self.at(machine.name))
        self.must(not most or count <= most, f"{machine.name} has {count} requests, and takes {most}")

    # --- steps -------------------------------------------------------------------------------------------------------

    async def step(self, step: Step) -> None:
        name, *arguments = step
        await getattr(self, f"do_{name}")(*arguments)

    async def do_ask(self, seconds: float, force: str, tried: str) -> None:
        wishes = Wishes(force_machine=force) if force else ANY
        self.requests.append(Request(self, wishes, (tried,) if tried else (), seconds))

    async def do_cancel(self, number: int) -> None:
        if waiting := [each for each in self.requests if not each.task.done()]:
            waiting[number % len(waiting)].task.cancel()

    async def do_end(self, number: int, how: Failure | None) -> None:
        if held := [each for each in self.requests if each.lease is not None]:
            self.end(held[number % len(held)], how)

    def end(self, request: Request, how: Failure | None) -> None:
        lease, request.lease = request.lease, None
        assert lease is not None
        self.requests.remove(request)
        if how is None:
            lease.release()
        else:
            lease.failed(how)

    async def do_rest(self, machine: str, how: Any) -> None:
        if door := self.app_table.doors.get(machine):
            self.rests.append(asyncio.ensure_future(door.rest(how)))

    async def do_user(self, machine: str, starts: bool) -> None:
        """Starts or stops it, and the proxy has no part in that."""
        it = self.machines[machine]
        if it.there and not it.asked:
            it.start() if starts else it.stop()
            self.show_later(it)

    async def do_limits(self, machine: str, soft: int, hard: int) -> None:
        it = self.machines[machine]
        it.soft, it.hard = soft, hard
        for request in self.requests:
            request.limits_changed()
        self.show(it)

    async def do_ports(self, machine: str, extra: int) -> None:
        self.machines[machine].extra_ports = extra
        self.show(self.machines[machine])

    async def do_cordon(self, machine: str, on: bool) -> None:
        self.machines[machine].cordoned = on
        self.show(self.machines[machine])

    async def do_there(self, machine: str, there: bool) -> None:
        """Destroyed, or made again, with its old name."""
        it = self.machines[machine]
        it.there = there
        if not there:
            it.stop()
        self.show(it)

    async def do_worker_moves(self) -> None:
        self.workers_port += 1
        self.fleet.worker("ord-1", port=self.workers_port)

    async def do_answers(self, answers: list[str]) -> None:
        self.answers = list(answers)

    async def do_wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # --- what holds --------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Until all has happened that is due now."""
        await asyncio.sleep(0)
        self.index.settle()
        for _ in range(20):
            await asyncio.sleep(0)

    def must(self, holds: bool, otherwise: str) -> None:
        """For what is found out in the middle of a task, where an error would go to whoever waits for it."""
        if not holds:
            self.wrong.append(otherwise)

    def check(self) -> None:
        """Holds whenever nothing is due."""
        assert self.wrong == []
        for request in self.requests:
            if request.task.done() and not request.task.cancelled():
                request.task.result()
        routed = self.app_table.find("web")
        assert routed is not None
        now = asyncio.get_running_loop().time()
        for group in set(routed.groups.values()):
            for force, queue in group.wait_queue.queues.items():
                found = group.pool.decide(now, Wishes(force_machine=force)) if queue.idle else None
                if isinstance(found, Take):
                    others = [each for each in self.requests if found.entry.machine in each.tried]
                    assert queue.idle <= len(others), f"{queue.idle} wait for {force or 'any'}, and {found} would do"
        for name in MACHINES:
            door = self.app_table.doors.get(name)
            held = len(self.at(name))
            assert (door.in_flight if door else 0) >= held or not self.machines[name].there, f"{name} has {held}"

    async def end_all(self) -> None:
        """Requests end one by one, then time passes, and nothing may be left."""
        for _ in range(1000):
            held = [each for each in self.requests if each.lease is not None]
            if not held:
                break
            self.end(held[0], None)
            await self.settle()
            self.check()
        await asyncio.sleep(ALL_OVER_S)
        self.check()
        assert all(request.task.done() for request in self.requests), "a request waits for ever"
        assert all(rest.done() for rest in self.rests), "a stop does not end"
        await asyncio.gather(*self.rests)
        for request in [each for each in self.requests if each.lease is not None]:
            self.end(request, None)
        await self.settle()
        routed = self.app_table.find("web")
        assert routed is not None
        assert not routed.busy
        for group in routed.groups.values():
            assert (group.held, group.wait_queue.count, group.wait_queue.queues) == (0, 0, {})
            for entry in group.pool.entries.values():
                assert (entry.own, entry.in_flight, entry.waking, entry.closing) == (0, 0, False, False), entry
        assert set(self.app_table.doors) == {name for name, each in self.machines.items() if each.there}

    async def close(self) -> None:
        for request in self.requests:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in self.requests), *self.rests, return_exceptions=True)
        await self.router.close()
        await self.app_table.workers.close()
        self.index.close()
        self.fleet.close()
        for machine in self.machines.values():
            machine.close()


ONE = st.sampled_from(MACHINES)
SECONDS = st.sampled_from((0.0, 0.001, 0.03, 0.3, 2.0, 10.0))
ASK = st.tuples(st.just("ask"), st.sampled_from((10.0, 2.0, 0.3)), st.just(""), st.just(""))
END = st.tuples(st.just("end"), st.integers(0, 9), st.none())
REST = st.tuples(st.just("rest"), ONE, st.sampled_from(("stop", "suspend")))
WAIT = st.tuples(st.just("wait"), SECONDS)
RARE: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("ask"), SECONDS, st.sampled_from(("", *MACHINES)), st.sampled_from(("", *MACHINES))),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(get_args(Failure))),
    st.tuples(st.just("user"), ONE, st.booleans()),
    st.tuples(st.just("limits"), ONE, st.integers(1, 3), st.sampled_from((0, 1, 2, 3))),
    st.tuples(st.just("ports"), ONE, st.integers(0, 2)),
    st.tuples(st.just("cordon"), ONE, st.booleans()),
    st.tuples(st.just("there"), ONE, st.booleans()),
    st.tuples(st.just("worker_moves")),
    st.tuples(
        st.just("answers"),
        st.lists(st.sampled_from(("quickly", "slowly", "declined", "silent", "silent after all", *LET_GO)), max_size=3),
    ),
)
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(ASK, ASK, ASK, END, END, REST, WAIT, WAIT, RARE, RARE), min_size=20, max_size=40
)


@given(steps=STEPS, lag_s=st.sampled_from((0.0, 0.005, 0.5)))
@settings(max_examples=costly(8))
def test_whatever_happens_at_doors_limits_hold_and_nobody_is_forgotten(steps: list[Step], lag_s: float) -> None:
    note(f"rows {lag_s} s late, and then: {steps}")

    async def tell() -> None:
        story = Story(Path(directory), lag_s)
        try:
            for step in steps:
                await story.step(step)
                if step[0] == "wait":  # others happen at once
                    await story.settle()
                    story.check()
                else:
                    await asyncio.sleep(0)
            await story.end_all()
        finally:
            await story.close()

    with tempfile.TemporaryDirectory() as directory:
        run_in_virtual_time(tell())
