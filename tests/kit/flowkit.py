"""Runs a scenario on a worker again and again: cut off at every point, with every step failing and repeated.

A *scenario* is what clients do and how programs behave. Its uncut run gives the reference: how many *points* there are
(before and after every commit and every outside effect), which *acts* (the outside half of a step), and the end state.
Every other run must end in the same state, and with every invariant intact:

- cut off at each point, and at each pair of points: after a cut the worker is opened again over the same files and the
  same world, and clients repeat what was not acknowledged;
- each act failing once, before or after its effect: with a retry, an unexpected error, or parked until a person looks;
- each act done twice.

`explore` is for each change: single cuts, and of the faults those that differ most. `explore_more` has the rest.

An act that aborts changes the end: those runs get a reference of their own, are themselves cut at every point, and
afterwards a forced destroy must leave nothing.

    explore(Scenario("stop", script, {"serve": Program()}), directory)
"""

from __future__ import annotations

import asyncio
import difflib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import apsw
from tests.kit.end_state import describe
from tests.kit.sim_client import Client
from tests.kit.sim_worker import ROOMY, SimWorker, a_world
from tests.kit.virtual_time import run_in_virtual_time, virtual_host

from hawker.errors import Abort, Broken, Retry, StoreError
from hawker.model.guest import Resources
from hawker.sim.hosts.world import Program, World
from hawker.store.db import Store
from hawker.worker.flows.flow import Act, Done, Flow, Step, StepContext
from hawker.worker.kinds import Kinds
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.parts import FlowsOf

T = TypeVar("T")

Kind = Literal[
    "abort before",
    "abort after",
    "abort once",
    "retry before",
    "retry after",
    "error before",
    "error after",
    "broken before",
    "broken after",
    "twice",
]
"""What is done to an act, before or after its effect. Both `abort before` and `abort after` hold for every attempt,
`twice` too; the others for the first."""

HARMLESS: tuple[Kind, ...] = (
    "retry before",
    "retry after",
    "error before",
    "error after",
    "broken before",
    "broken after",
    "twice",
)
"""Faults after which a run ends as if nothing had happened."""

UNDO_FAULTS: tuple[Kind, ...] = ("retry after", "error after", "broken after", "abort once", "twice")
"""Faults of a final step that must end as if it had gone well at once."""

MOST_TELLING: tuple[Kind, ...] = ("retry after", "error before", "broken after")
"""Each way to fail once, and both moments. All acts at once are done twice beside them."""

MISSED_MOST = 0.05
LOG_BYTES = 16 << 20
"""Of the write-ahead log's file, of which a run uses little: what is not written takes no room."""

Script = Callable[[Client], Awaitable[None]]
SCRIPT_S = 3600.0  # of virtual time


class Cut(BaseException):
    """The process ends here."""


@dataclass(frozen=True)
class Scenario:
    """`script` is what clients do. `kinds` are those beside machines, whose things are in the given world. `down_s`:
    how long a worker that was cut off stays away. `long`: each of its acts fails in shorter scenarios, so in this one
    it does so in the full run alone."""

    name: str
    script: Script
    programs: Mapping[str, Program] = field(default_factory=dict)
    capacity: Resources = ROOMY
    down_s: float = 0.2
    flows: FlowsOf = MachineFlows.all
    kinds: Callable[[World], Kinds] = lambda world: ()
    long: bool = False


@dataclass(frozen=True)
class Plan:
    """What goes wrong in a run. The n-th of `cuts` ends the n-th life of the worker at that point; `faults` are by act,
    e.g. "run1 machine.create/launch"."""

    cuts: tuple[int, ...] = ()
    faults: Mapping[str, Kind] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `points` by life of the worker, `acts` in the order they came, `wrong` what must not be."""

    end: list[str]
    points: list[int]
    acts: list[str]
    met: frozenset[str]  # the acts whose fault happened
    wrong: list[str]


@dataclass
class Count:
    """What was run of one scenario."""

    name: str
    points: int = 0
    acts: int = 0
    singles: int = 0
    pairs: int = 0
    faults: int = 0
    aborts: int = 0
    aborts_cut: int = 0
    missed: int = 0  # runs that ended before their last cut: a commit that was slow has joined two others

    def line(self) -> str:
        return (
            f"{self.name}: {self.points} points: {self.singles} single cuts, {self.pairs} pairs; {self.acts} acts: "
            f"{self.faults} runs with a fault, {self.aborts} with an abort, {self.aborts_cut} with an abort and a cut, "
            f"{self.missed} cuts missed"
        )


COUNTS: list[Count] = []
"""Of every exploration in this process; the test report ends with them."""


def explore(scenario: Scenario, directory: Path) -> Count:
    """A scenario cut off once at every point and, unless it is long, with every act failing in the most telling ways
    and repeated, and with every abort.

    Raises `AssertionError` at the first run that does not end as it should.
    """
    count, reference = _begin(scenario, directory)
    for first in range(1, count.points + 1):
        _cut(scenario, directory, Plan(cuts=(first,)), reference.end, count)
        count.singles += 1
    if not scenario.long:
        for act in reference.acts:
            _fail(scenario, directory, act, MOST_TELLING, reference, count)
        _repeat_all(scenario, directory, reference, count)
        for act in _undone(reference):
            _explore_abort(scenario, directory, act, MOST_TELLING, count)
    return _end(count)


def explore_more(scenario: Scenario, directory: Path, part: int, parts: int) -> Count:
    """A scenario cut off at every pair of points, each abort cut off at every point, and every other fault: of all this
    the part of this number, from 0. Raises as `explore` does."""
    count, reference = _begin(scenario, directory)
    for first in range(1 + part, count.points + 1, parts):
        outcome = _cut(scenario, directory, Plan(cuts=(first,)), reference.end, count)
        count.singles += 1
        for second in range(1, outcome.points[-1] + 1):
            _cut(scenario, directory, Plan(cuts=(first, second)), reference.end, count)
            count.pairs += 1
    others = tuple(kind for kind in HARMLESS if scenario.long or kind not in MOST_TELLING)
    if scenario.long and part == 0:
        _repeat_all(scenario, directory, reference, count)
    for act in reference.acts[part::parts]:
        _fail(scenario, directory, act, others, reference, count)
    for act in _undone(reference)[part::parts]:
        _explore_abort(scenario, directory, act, UNDO_FAULTS, count)
        aborted: dict[str, Kind] = {act: "abort after"}
        after = _fault(scenario, directory, aborted, None)
        for cut in range(1, after.points[0] + 1):
            _cut(scenario, directory, Plan(cuts=(cut,), faults=aborted), after.end, count)
            count.aborts_cut += 1
    return _end(count)


def _begin(scenario: Scenario, directory: Path) -> tuple[Count, Outcome]:
    """The reference, twice: no run is random."""
    reference = trial(scenario, directory, Plan())
    _expect(scenario, Plan(), reference, reference.end)
    _expect(scenario, Plan(), trial(scenario, directory, Plan()), reference.end)
    return Count(scenario.name, points=reference.points[0], acts=len(reference.acts)), reference


def _end(count: Count) -> Count:
    cuts = count.singles + count.pairs + count.aborts_cut
    assert count.missed <= MISSED_MOST * cuts, f"{count.missed} of {cuts} cuts never came"
    COUNTS.append(count)
    return count


def _undone(reference: Outcome) -> list[str]:
    """Nothing undoes the undoing."""
    return [act for act in reference.acts if not act.endswith("/settle")]


def _fail(
    scenario: Scenario, directory: Path, act: str, kinds: Sequence[Kind], reference: Outcome, count: Count
) -> None:
    undo = act.endswith("/settle")  # why it was parked joins the reason of the end: another text
    for kind in (kind for kind in kinds if not (undo and kind.startswith("broken"))):
        _fault(scenario, directory, {act: kind}, reference.end)
        count.faults += 1


def _repeat_all(scenario: Scenario, directory: Path, reference: Outcome, count: Count) -> None:
    _fault(scenario, directory, dict.fromkeys(reference.acts, "twice"), reference.end)
    count.faults += 1


def _explore_abort(scenario: Scenario, directory: Path, act: str, kinds: Sequence[Kind], count: Count) -> None:
    """A step gives up before or after its effect. Its undo fails in those of `kinds` that an undo can fail in, and is
    repeated."""
    before = _fault(scenario, directory, {act: "abort before"}, None)
    after = _fault(scenario, directory, {act: "abort after"}, None)
    count.aborts += 2
    aborted_by_us = any("injected" in line for line in after.end)  # parking adds its reason to any other
    for undo in (name for name in before.acts if name.endswith("/settle")):
        for kind in (
            kind
            for kind in UNDO_FAULTS
            if kind in kinds and (aborted_by_us or kind not in ("broken after", "abort once"))
        ):
            _fault(scenario, directory, {act: "abort after", undo: kind}, after.end)
            count.aborts += 1


def _cut(scenario: Scenario, directory: Path, plan: Plan, reference: list[str], count: Count) -> Outcome:
    outcome = trial(scenario, directory, plan)
    _expect(scenario, plan, outcome, reference)
    count.missed += len(outcome.points) != len(plan.cuts) + 1
    return outcome


def _fault(scenario: Scenario, directory: Path, faults: Mapping[str, Kind], reference: list[str] | None) -> Outcome:
    plan = Plan(faults=faults)
    outcome = trial(scenario, directory, plan)
    _expect(scenario, plan, outcome, outcome.end if reference is None else reference)
    assert outcome.met == faults.keys(), f"{scenario.name}: {plan}: these did not happen: {faults.keys() - outcome.met}"
    return outcome


def _expect(scenario: Scenario, plan: Plan, outcome: Outcome, reference: list[str]) -> None:
    if outcome.wrong:
        raise AssertionError("\n".join([f"{scenario.name}: {plan}", *outcome.wrong, "", *outcome.end]))
    if outcome.end != reference:
        diff = difflib.unified_diff(reference, outcome.end, "reference", "this run", lineterm="", n=1)
        raise AssertionError("\n".join([f"{scenario.name}: {plan} ended otherwise than the reference", *diff]))


def trial(scenario: Scenario, directory: Path, plan: Plan) -> Outcome:
    """One run, in a directory of its own that is removed again."""
    place, template = directory / "trial", directory / "template.db"
    if not template.exists():
        run_in_virtual_time(_make(template))
    place.mkdir()
    shutil.copyfile(template, place / "worker.db")
    with open(place / "worker.db-wal", "wb") as log:  # empty, and so long that the store need not lengthen it
        log.truncate(LOG_BYTES)
    try:
        return run_in_virtual_time(_Trial(scenario, place, plan).run())
    except Exception as error:
        raise AssertionError(f"{scenario.name}: {plan}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(place)


async def _make(template: Path) -> None:
    """An empty database, made once and copied for each run."""
    await Store.open(template, virtual_host()).close()


class _Life:
    """One worker, from its start to its end."""

    def __init__(self, number: int, cut_at: int) -> None:
        self.number = number
        self.cut_at = cut_at
        self.points = 0
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.worker: SimWorker

    @property
    def dead(self) -> bool:
        return self.died.done()


class _Trial:
    def __init__(self, scenario: Scenario, directory: Path, plan: Plan) -> None:
        self.scenario = scenario
        self.plan = plan
        self._directory = directory
        self._lives: list[_Life] = []
        self._acts: list[str] = []
        self._met: set[str] = set()
        self._unhandled: list[str] = []

    async def run(self) -> Outcome:
        asyncio.get_running_loop().set_exception_handler(self._on_unhandled)
        self.world = a_world(self.scenario.programs)
        self._kinds = self.scenario.kinds(self.world)
        aborting = any(kind.startswith("abort") for kind in self.plan.faults.values())
        client = Client(self.ask, self.world, tolerant=aborting)
        async with asyncio.timeout(SCRIPT_S):
            await self.scenario.script(client)
            await client.rest()
            wrong, end = await self.ask(self._look)
            if aborting:
                wrong += await self._clean(client)
        await self._lives[-1].worker.close()
        return Outcome(
            end=end,
            points=[life.points for life in self._lives],
            acts=self._acts,
            met=frozenset(self._met),
            wrong=wrong + self._unhandled,
        )

    async def ask(self, ask: Callable[[SimWorker], Awaitable[T]]) -> T:
        """Ask the worker that is there. One that dies before it answers is asked again when it is back."""
        while True:
            life = await self._alive()
            asking = asyncio.ensure_future(ask(life.worker))
            answer: set[asyncio.Future[Any]] = {asking, life.died}
            await asyncio.wait(answer, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() or asking.cancelled():
                continue
            error = asking.exception()
            if error is None:
                return asking.result()
            if not life.dead:
                raise error

    async def _look(self, worker: SimWorker) -> tuple[list[str], list[str]]:
        return worker.wrong(), describe(worker)

    async def _clean(self, client: Client) -> list[str]:
        """Whatever failed: a forced destroy of every machine leaves nothing."""
        for name in list(client.machines):
            await client.destroy(name, force=True)
        await client.rest()
        wrong, end = await self.ask(self._look)
        world = self.world
        if world.instances or world.directories:
            wrong.append(f"after a forced destroy: {list(world.instances)}, directories {world.directories}")
        return wrong + (end if wrong else [])

    # --- lives -------------------------------------------------------------------------------------------------------

    async def _alive(self) -> _Life:
        while not self._lives or self._lives[-1].dead:
            if self._lives:
                await self._lives[-1].worker.die()
                await asyncio.sleep(self.scenario.down_s)
            await self._open()
        return self._lives[-1]

    async def _open(self) -> None:
        number = len(self._lives)
        life = _Life(number, self.plan.cuts[number] if number < len(self.plan.cuts) else 0)
        self._lives.append(life)
        scenario = self.scenario
        life.worker = worker = SimWorker(
            self._directory,
            self.world,
            scenario.capacity,
            scenario.flows,
            kinds=self._kinds,
            alter=self._instrument,
        )
        worker.open_store(lambda when: self._point(life, f"{when} commit"))
        # A killed process loses nothing that it wrote; losing power is the store's own test.
        worker.store._db.execute("pragma synchronous = off")
        self.world.point = lambda when, effect: self._effect_point(life, f"{when} {effect}")
        opening = asyncio.ensure_future(worker.start(sweeping=False))
        await asyncio.wait({opening, life.died}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done() and not life.dead:
            opening.result()

    def _point(self, life: _Life, what: str) -> None:
        if life.dead:
            return
        life.points += 1
        if life.points == life.cut_at:
            life.died.set_result(None)
            life.worker.driver.die()
            raise Cut(what)

    def _effect_point(self, life: _Life, what: str) -> None:
        try:
            self._point(life, what)
        except Cut:
            life.worker.cut_off()
            raise

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        died = any(life.dead for life in self._lives)
        if not (died and isinstance(error, Cut | StoreError | apsw.ConnectionClosedError)):
            self._unhandled.append(f"unhandled: {context['message']}: {error!r}")

    # --- acts --------------------------------------------------------------------------------------------------------

    def _instrument(self, flow: Flow) -> Flow:
        def wrapped(step: Step) -> Step:
            if step.act is None:
                return step
            act = step.act

            async def tapped(context: StepContext) -> Done:
                return await self._act(act, context)

            return Step(step.name, tapped, step.commit, step.attempts)

        return Flow(flow.name, flow.version, wrapped(flow.final), [wrapped(step) for step in flow.steps])

    async def _act(self, act: Act, context: StepContext) -> Done:
        reads = self._lives[-1].worker.store.read
        number = reads.query("select count(*) from run where id <= ?", (context.run.id,))[0][0]
        name = f"run{number} {context.run.flow}/{context.step}"
        if name not in self._acts:
            self._acts.append(name)
        kind = self.plan.faults.get(name)
        if kind is None:
            return await act(context)
        again = name in self._met and kind not in ("abort before", "abort after")
        self._met.add(name)
        if kind == "twice":
            await act(context)
        if kind == "twice" or again:
            return await act(context)
        if kind.endswith("after"):
            await act(context)
        raise _ERRORS[kind.split()[0]]("injected")


_ERRORS: dict[str, type[Exception]] = {"abort": Abort, "retry": Retry, "error": RuntimeError, "broken": Broken}


def summary() -> list[str]:
    """What was explored in this process, a line a scenario and one for all."""
    counts = sorted(COUNTS, key=lambda count: count.name)
    total = Count("all")
    for count in counts:
        for name in Count.__dataclass_fields__.keys() - {"name"}:
            setattr(total, name, getattr(total, name) + getattr(count, name))
    return [count.line() for count in [*counts, total]]
