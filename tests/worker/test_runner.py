"""The runner: what a run goes through, and who may change its course."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world
from tests.kit.virtual_time import EPOCH_S, virtual_time

from hawker.errors import Abort, Broken, Conflict, NotFound, Retry
from hawker.host import Host
from hawker.store.tx import Tx
from hawker.worker.flows.flow import Done, Flow, Step, StepContext
from hawker.worker.flows.runner import Busy
from hawker.worker.machine.flows import MachineFlows


class Script:
    """A flow of two steps and an undo; each act does what the test says next, and then succeeds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.does: dict[str, list[Exception | Callable[[], Awaitable[object]]]] = {}

    def flows(self, flows: MachineFlows) -> Sequence[Flow]:
        steps = [Step(name, act=self._act, attempts=3) for name in ("one", "two")]
        return [*flows.all(), Flow("test.flow", 1, Step("end", act=self._act), steps)]

    async def _act(self, context: StepContext) -> Done:
        self.calls.append(f"{context.step} {context.attempt}")
        todo = self.does.get(context.step)
        if todo:
            match todo.pop(0):
                case Exception() as error:
                    raise error
                case wait:
                    await wait()
        return Done()


def begin(worker: SimWorker, resource: str = "thing", steps: Sequence[str] = ("one", "two")) -> Callable[[Tx], str]:
    return lambda tx: worker.runner.begin(tx, "test.flow", resource, steps=steps, cause="a test").id


async def run(worker: SimWorker, resource: str = "thing", steps: Sequence[str] = ("one", "two")) -> str:
    return await worker.store.submit(begin(worker, resource, steps))


def alarms(worker: SimWorker, step: str) -> float:
    return worker.metrics.registry.value("hawker_alarms_total", flow="test.flow", step=step) or 0.0


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@virtual_time
async def test_steps_run_in_order_and_the_undo_is_not_needed(tmp_path: Path) -> None:
    script = Script()
    async with a_worker(tmp_path, flows=script.flows) as worker:
        ended = await worker.runner.wait_ended(await run(worker))
        assert (ended.status, script.calls) == ("done", ["one 0", "two 0"])


@virtual_time
async def test_an_abort_skips_to_the_undo_which_is_told_why(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [Abort("no such thing")]
    async with a_worker(tmp_path, flows=script.flows) as worker:
        ended = await worker.runner.wait_ended(await run(worker))
        assert (ended.status, ended.error, script.calls) == ("failed", "no such thing", ["one 0", "end 0"])


@virtual_time
async def test_a_retry_waits_as_long_as_it_asked_for(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [Retry("later", after_s=30)]
    async with a_worker(tmp_path, flows=script.flows) as worker:
        began = asyncio.get_running_loop().time()
        ended = await worker.runner.wait_ended(await run(worker))
        assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=0.1)
        assert (ended.status, ended.error, script.calls) == ("done", "", ["one 0", "one 1", "two 0"])


@virtual_time
async def test_a_retry_that_was_waiting_goes_on_waiting_after_a_crash(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [Retry("later", after_s=30)]
    world = a_world()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows)
    began = asyncio.get_running_loop().time()
    run_id = await run(worker)
    await asyncio.sleep(10)
    await worker.die()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows)
    await worker.runner.wait_ended(run_id)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=0.1)
    await worker.close()


@virtual_time
async def test_an_unexpected_error_that_does_not_go_away_parks_the_run_with_an_alarm(tmp_path: Path) -> None:
    script = Script()
    script.does["two"] = [RuntimeError("a bug")] * 3
    async with a_worker(tmp_path, flows=script.flows) as worker:
        run_id = await run(worker)
        parked = await worker.runner.wait_ended(run_id)
        assert (parked.status, parked.error) == ("parked", "RuntimeError: a bug (after 3 attempts)")
        assert alarms(worker, "two") == 1
        await worker.runner.unpark(run_id, "tester")
        ended = await worker.runner.wait_ended(run_id)
        assert (ended.status, script.calls) == ("done", ["one 0", "two 0", "two 1", "two 2", "two 0"])


@virtual_time
async def test_an_undo_that_gives_up_parks_the_run_with_an_alarm(tmp_path: Path) -> None:
    script = Script()
    script.does = {"one": [Abort("no such thing")], "end": [Abort("cannot be undone")]}
    async with a_worker(tmp_path, flows=script.flows) as worker:
        parked = await worker.runner.wait_ended(await run(worker))
        assert (parked.status, parked.error) == ("parked", "no such thing; cannot be undone")
        assert alarms(worker, "end") == 1


@virtual_time
async def test_a_run_that_was_parked_in_its_undo_goes_on_when_it_is_given_up(tmp_path: Path) -> None:
    script = Script()
    script.does = {"one": [Abort("no such thing")], "end": [Broken("look at this")]}
    async with a_worker(tmp_path, flows=script.flows) as worker:
        run_id = await run(worker)
        await worker.runner.wait_ended(run_id)
        await worker.runner.cancel(run_id, "given up")
        async with asyncio.timeout(60):
            assert (await worker.runner.wait_ended(run_id)).status == "failed"


@virtual_time
async def test_an_unknown_step_parks_the_run_until_a_program_that_knows_it_is_there(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [forever]
    world = a_world()
    newer = await SimWorker.open(tmp_path, world, flows=script.flows)
    run_id = await run(newer)
    await newer.close()
    older = await SimWorker.open(tmp_path, world)
    parked = await older.runner.wait_ended(run_id)
    assert (parked.status, parked.error) == (
        "parked",
        "step one of test.flow version 1 is not known to this program",
    )
    assert alarms(older, "one") == 1
    await older.close()
    newer = await SimWorker.open(tmp_path, world, flows=script.flows)
    assert newer.resumed == 0
    await newer.runner.unpark(run_id, "tester")
    assert (await newer.runner.wait_ended(run_id)).status == "done"
    await newer.close()


@virtual_time
async def test_shutting_down_is_not_cancelling(tmp_path: Path) -> None:
    script = Script()
    script.does["two"] = [forever]
    world = a_world()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows)
    run_id = await run(worker)
    await worker.until(lambda: script.calls == ["one 0", "two 0"])
    await worker.close()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows)
    assert worker.resumed == 1
    assert (await worker.runner.wait_ended(run_id)).status == "done"
    assert script.calls == ["one 0", "two 0", "two 0"]
    await worker.close()


@virtual_time
async def test_a_cancel_interrupts_a_step_and_runs_the_undo(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [forever]
    async with a_worker(tmp_path, flows=script.flows) as worker:
        run_id = await run(worker)
        await worker.until(lambda: script.calls == ["one 0"])
        await worker.runner.cancel(run_id, "not wanted any more")
        ended = await worker.runner.wait_ended(run_id)
        assert (ended.status, ended.error) == ("cancelled", "not wanted any more")
        assert script.calls == ["one 0", "end 0"]
        await worker.runner.cancel(run_id, "again")
        assert worker.runs("thing") == [ended]


@virtual_time
async def test_a_shutdown_in_the_middle_of_a_cancel_leaves_the_undo_to_the_next_worker(tmp_path: Path) -> None:
    script = Script()
    script.does = {"one": [forever], "end": [forever]}
    world = a_world()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows, sweeping=False)
    run_id = await run(worker)
    await worker.until(lambda: script.calls == ["one 0"])
    await worker.runner.cancel(run_id, "not wanted any more")
    async with asyncio.timeout(60):
        await worker.close()
    script.does.clear()
    worker = await SimWorker.open(tmp_path, world, flows=script.flows)
    assert (await worker.runner.wait_ended(run_id)).status == "cancelled"
    await worker.close()


@virtual_time
async def test_a_second_run_on_a_resource_is_refused_and_names_the_first(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [forever]
    async with a_worker(tmp_path, flows=script.flows) as worker:
        first = await run(worker)
        with pytest.raises(Busy, match=r"thing is busy: test\.flow is at step one") as refused:
            await run(worker)
        assert refused.value.run.id == first
        assert isinstance(refused.value, Conflict)
        await run(worker, "another thing")


@virtual_time
async def test_waiting_for_a_run_that_never_was_is_refused(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        with pytest.raises(NotFound):
            await worker.runner.wait_ended("none")
        with pytest.raises(NotFound):
            await worker.runner.unpark("none", "tester")


@virtual_time
async def test_a_full_disk_holds_a_step_up_but_does_not_repeat_it(tmp_path: Path) -> None:
    script = Script()
    async with a_worker(tmp_path, flows=script.flows, sweeping=False) as worker:

        async def fill() -> None:
            await worker.fill_disk()

        script.does["two"] = [fill]
        run_id = await run(worker)
        await asyncio.sleep(60)
        assert worker.runs("thing")[0].status == "active"
        worker.make_room()
        assert (await worker.runner.wait_ended(run_id)).status == "done"
        assert script.calls == ["one 0", "two 0"]


@virtual_time
async def test_events_keep_their_order_when_the_clock_went_back_while_the_worker_was_away(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine()
    await worker.close()
    now = asyncio.get_running_loop().time
    world.host = Host(lambda: EPOCH_S - 3600 + now(), random.Random(2))
    worker = await SimWorker.open(tmp_path, world)
    await worker.machines.stop(APP.name, machine, worker.request())
    await worker.at_rest(machine)
    assert worker.story(machine)[-1] == "stop stopped"
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_a_run_that_is_tried_again_and_given_up_in_one_commit_ends(tmp_path: Path) -> None:
    script = Script()
    script.does["one"] = [Broken("look at this")]
    async with a_worker(tmp_path, flows=script.flows) as worker:
        run_id = await run(worker)
        await worker.runner.wait_ended(run_id)
        # Both are asked for in one turn of the loop, so one commit has both.
        await asyncio.gather(worker.runner.unpark(run_id, "one"), worker.runner.cancel(run_id, "given up by another"))
        async with asyncio.timeout(60):
            ended = await worker.runner.wait_ended(run_id)
        assert (ended.status, script.calls) == ("cancelled", ["one 0", "end 0"])


@virtual_time
async def test_a_run_that_ends_in_the_commit_that_begins_it_is_told_to_whoever_waits_and_does_nothing(
    tmp_path: Path,
) -> None:
    script = Script()
    async with a_worker(tmp_path, flows=script.flows) as worker:
        ends: list[str] = []
        worker.runner.on_end.append(ends.append)

        def begin_and_end(tx: Tx) -> str:
            run = worker.runner.begin(tx, "test.flow", "thing", steps=["one"], cause="a test")
            worker.runner.end_waiting(tx, run, "another took its place")
            return run.id

        run_id = await worker.store.submit(begin_and_end)
        async with asyncio.timeout(60):
            ended = await worker.runner.ending(run_id)
        assert (ended.status, script.calls, ends) == ("cancelled", [], ["thing"])
