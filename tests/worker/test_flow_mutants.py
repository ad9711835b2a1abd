"""The kit has teeth: flows with one thing wrong do not get through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as with_changes
from tests.kit.flowkit import Scenario, Script, explore
from tests.kit.sim_client import Client

from hawker.model.rows import MachineRow, RunRow
from hawker.store.tx import Tx
from hawker.worker.drivers.base import UnknownInstance
from hawker.worker.flows.flow import Act, Done, Flow, Step, StepContext
from hawker.worker.machine.flows import MachineFlows
from hawker.worker.machine.parts import FlowsOf

Change = Callable[[MachineFlows, Step], Step]


async def create(client: Client) -> None:
    await client.create("a")


async def restart(client: Client) -> None:
    await client.create("a")
    await client.restart("a")


async def destroy(client: Client) -> None:
    await client.create("a")
    await client.rest()
    await client.destroy("a", force=True)


def act_of(step: Step) -> Act:
    assert step.act
    return step.act


def mutant(step_name: str, change: Change) -> FlowsOf:
    """Our flows, but for one step."""

    def flows(flows: MachineFlows) -> Sequence[Flow]:
        def changed(step: Step) -> Step:
            return change(flows, step) if step.name == step_name else step

        return [Flow(f.name, f.version, changed(f.final), [changed(s) for s in f.steps]) for f in flows.all()]

    return flows


def unkeyed(flows: MachineFlows, step: Step) -> Step:
    """The program is named by the attempt at starting it, not by run and step."""

    async def act(context: StepContext) -> Done:
        return await act_of(step)(replace(context, key=f"{context.run.id}/{flows._host.ulid()}"))

    return replace(step, act=act)


def apart(flows: MachineFlows, step: Step) -> Step:
    """The domain writes are one commit, the step's event is another."""

    async def act(context: StepContext) -> Done:
        done = await act_of(step)(context)

        def writes(tx: Tx) -> None:
            tx.record("machine.started", context.run.resource, cause=context.run.cause)
            assert done.commit
            done.commit(tx, context.run)

        await flows._store.submit(writes)
        return Done()

    return replace(step, act=act)


def not_undone(flows: MachineFlows, step: Step) -> Step:
    """The final step writes what should be, and undoes nothing."""

    async def act(context: StepContext) -> Done:
        return Done(step.commit)

    return replace(step, act=act)


def not_repeatable(flows: MachineFlows, step: Step) -> Step:
    """A program that is gone already is a bug to this stop, not what it wanted."""

    async def act(context: StepContext) -> Done:
        try:
            await flows._endings.had(context.run).inspect(context.run.args["instance"])
        except UnknownInstance as error:
            raise AssertionError("it should be there") from error
        done = await act_of(step)(context)
        await flows._endings.had(context.run).destroy(context.run.args["instance"], force=True)
        return done

    return replace(step, act=act)


def left_out(flows: MachineFlows, step: Step) -> Step:
    """The step says that it is done, and did nothing."""

    async def act(context: StepContext) -> Done:
        return Done()

    return replace(step, act=act)


def without_its_ledger(flows: MachineFlows, step: Step) -> Step:
    """The row is written past the machine's log, so the ledger does not follow."""

    def commit(tx: Tx, run: RunRow) -> None:
        row = tx.get(MachineRow, run.resource)
        assert row
        assert step.commit
        step.commit(tx, run)
        after = tx.get(MachineRow, run.resource)
        assert after
        tx.put(with_changes(after, resources=row.resources + row.resources))

    return replace(step, commit=commit)


MUTANTS: list[tuple[str, FlowsOf, Script, str]] = [
    ("effect not named by its run and step", mutant("launch", unkeyed), create, "was started without a run"),
    ("event and writes in two commits", mutant("launch", apart), create, "ended otherwise"),
    ("nothing is undone", mutant("settle", not_undone), create, "the world has"),
    ("a stop that cannot be repeated", mutant("stop", not_repeatable), restart, "parked|come to rest|twice"),
    ("leftovers stay", mutant("clear", left_out), restart, "the world has"),
    ("the directory stays", mutant("purge", left_out), destroy, "left its directory"),
    ("the ledger is passed by", mutant("settle", without_its_ledger), restart, "the ledger says"),
]


@pytest.mark.parametrize(("flows", "script", "finding"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_the_kit_finds(flows: FlowsOf, script: Script, finding: str, in_memory: Path) -> None:
    scenario = Scenario("mutant", script, flows=flows)
    with pytest.raises(AssertionError, match=finding):
        explore(scenario, in_memory)
