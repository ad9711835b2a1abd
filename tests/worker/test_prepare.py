"""Images on their way to a start: which bytes run, what becomes of an image that cannot be had, and what is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.kit.sim_worker import APP, SimWorker, a_worker, a_world, machine_config
from tests.kit.virtual_time import virtual_time

from hawker.http.call import Call
from hawker.model.config import check_config
from hawker.model.image import IMAGE_TIMEOUT_S
from hawker.model.machine import State
from hawker.model.machine_calls import ExecInMachine
from hawker.model.rows import PortRow
from hawker.worker.flows.runner import Busy
from hawker.worker.machine.api.machines import with_runtime
from hawker.worker.machine.flows import STARTS_TRIED

FIRST, SECOND = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def fetched_anew(worker: SimWorker, reference: str, digest: str) -> None:
    """As `hawker image pull` does when the tag has moved."""
    worker.world.meanings[reference] = digest
    worker.world.images.pop(reference, None)
    worker.world.fetch(reference)


def ran(worker: SimWorker) -> list[str]:
    return [spec.image for spec in worker.world.starts]


async def update(worker: SimWorker, machine: str, **fields: Any) -> None:
    config = check_config(machine_config(**fields))
    await worker.updates.update(APP.name, machine, worker.request(), config=config)
    await worker.at_rest()


@virtual_time
async def test_every_start_until_the_next_update_runs_the_bytes_of_the_first(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.meanings["app:1"] = FIRST
        machine = await worker.run_machine(image="app:1")
        assert worker.machine(machine).image_digest == FIRST
        fetched_anew(worker, "app:1", SECOND)
        await worker.machines.restart(APP.name, machine, worker.request())
        await worker.at_rest()
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        await worker.machines.start(APP.name, machine, worker.request())
        await worker.at_rest()
        assert ran(worker) == [f"app:1@{FIRST}"] * 3
        await update(worker, machine, image="app:1")
        assert ran(worker)[3:] == [f"app:1@{SECOND}"]
        assert worker.machine(machine).image_digest == SECOND


@virtual_time
async def test_the_program_is_told_which_bytes_it_is(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.meanings["app:1"] = FIRST
        await worker.run_machine(image="app:1")
        assert worker.world.starts[0].env["FLY_IMAGE_REF"] == f"app:1@{FIRST}"
        assert "FLY_PUBLIC_IP" not in worker.world.starts[0].env


@virtual_time
async def test_an_image_that_must_not_be_used_fails_the_machine_with_its_own_sentence(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.bad_images["app:1"] = "layer 2 tries to leave its root"
        machine = await worker.run_machine(image="app:1")
        assert worker.machine(machine).state is State.failed
        request = worker.events(machine)[-1].request
        assert request
        assert request["exit_event"]["error"] == "image app:1: layer 2 tries to leave its root"
        assert worker.world.starts == []


@virtual_time
async def test_a_registry_that_answers_again_in_time_is_no_failure(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.silent_images.add("app:1")
        machine = await worker.create(image="app:1")
        await asyncio.sleep(30)
        assert worker.machine(machine).state is State.created
        worker.world.silent_images.clear()
        await worker.at_rest(machine)
        assert worker.machine(machine).state is State.started


@pytest.mark.parametrize("trouble", ["silent", "slow"])
@pytest.mark.parametrize(("given_s", "seconds"), [(0, IMAGE_TIMEOUT_S), (20, 20)])
@virtual_time
async def test_an_image_that_is_not_here_in_time_fails_the_machine_and_says_why(
    trouble: str, given_s: int, seconds: float, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        if trouble == "silent":
            worker.world.silent_images.add("app:1")
        else:
            worker.world.delays["prepare"] = 3600
        began = asyncio.get_running_loop().time()
        machine = await worker.run_machine(image="app:1", image_timeout_s=given_s)
        assert worker.machine(machine).state is State.failed
        assert seconds - 1 <= asyncio.get_running_loop().time() - began <= seconds + 8
        (run,) = worker.runs(machine)
        assert run.error.startswith(f"image app:1: it was not here within {seconds:g} s")
        assert ("does not answer" in run.error) is (trouble == "silent")
        assert worker.wrong() == []


@virtual_time
async def test_a_killed_worker_gives_an_image_no_more_time_than_it_had(tmp_path: Path) -> None:
    world = a_world()
    world.delays["prepare"] = 3600
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.create(image="app:1", image_timeout_s=60)
    await asyncio.sleep(50)
    await worker.die()
    worker = await SimWorker.open(tmp_path, world)
    began = asyncio.get_running_loop().time()
    await worker.at_rest()
    assert worker.machine(machine).state is State.failed
    assert asyncio.get_running_loop().time() - began < 12
    await worker.close()


@virtual_time
async def test_an_update_whose_image_is_not_here_in_time_leaves_the_program_running(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        before, program = worker.machine(machine), worker.world.running(machine)
        worker.world.delays["prepare"] = 3600
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config, image_timeout_s=20)
        await asyncio.sleep(21)
        await worker.at_rest()
        after = worker.machine(machine)
        assert (after.state, after.version, worker.world.running(machine)) == (State.started, before.version, program)
        assert worker.wrong() == []


@virtual_time
async def test_a_restart_asks_for_an_image_that_is_gone_so_many_times(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        worker.world.images.clear()
        worker.world.silent_images.add("app:1")
        worker.world.calls["prepare"] = 0
        await worker.machines.restart(APP.name, machine, worker.request())
        await worker.at_rest()
        assert worker.machine(machine).state is State.failed
        assert worker.world.calls["prepare"] == STARTS_TRIED


@virtual_time
async def test_an_order_without_a_start_gets_its_image_all_the_same(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", skip_launch=True)
        assert worker.machine(machine).state is State.stopped
        assert "app:1" in worker.world.images
        assert worker.world.starts == []


@virtual_time
async def test_an_update_gets_its_image_while_the_old_program_runs(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        worker.world.delays["prepare"] = 20
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        await asyncio.sleep(10)
        assert [placed.spec.image.partition("@")[0] for placed in worker.world.running(machine)] == ["app:1"]
        await worker.at_rest()
        assert [image.partition("@")[0] for image in ran(worker)] == ["app:1", "app:2"]


@virtual_time
async def test_a_machine_keeps_its_image_until_it_is_destroyed(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.meanings |= {"app:1": FIRST, "app:2": SECOND}
        machine = await worker.run_machine(image="app:1")
        holds = worker.driver.images.holds
        assert holds == {machine: FIRST}
        worker.world.delays["stop"] = 20
        updating = asyncio.ensure_future(update(worker, machine, image="app:2"))
        await asyncio.sleep(10)
        assert holds[machine] == SECOND
        assert set(holds.values()) == {FIRST, SECOND}, "the old program still runs"
        await updating
        assert holds == {machine: SECOND}
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest()
        assert holds == {}


@virtual_time
async def test_a_machine_of_the_host_needs_no_image(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine()
        assert worker.world.calls["prepare"] == 0
        assert worker.driver.images.holds == {}
        assert worker.runs(machine)[0].steps == ["launch", "settle"]


@virtual_time
async def test_while_its_image_is_on_its_way_a_machine_can_be_destroyed_by_force(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.delays["prepare"] = 3600
        machine = await worker.create(image="app:1")
        await asyncio.sleep(5)
        await worker.machines.destroy(APP.name, machine, worker.request(), force=True)
        await worker.at_rest()
        assert worker.machine(machine).state is State.destroyed
        assert worker.wrong() == []


@pytest.mark.parametrize("why", ["refused", "silent", "given up"])
@virtual_time
async def test_an_update_whose_image_cannot_be_had_leaves_the_machine_as_it_was(why: str, tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.meanings["app:1"] = FIRST
        machine = await worker.run_machine(image="app:1", services=[{"internal_port": 80}])
        before, program = worker.machine(machine), worker.world.running(machine)
        if why == "refused":
            worker.world.bad_images["app:2"] = "there is no such tag"
        else:
            worker.world.silent_images.add("app:2")
        config = check_config(machine_config(image="app:2", services=[{"internal_port": 81}]))
        await worker.updates.update(APP.name, machine, worker.request(), config=config, cordoned=True)
        assert worker.machine(machine).config["image"] == "app:2"
        if why == "given up":
            await asyncio.sleep(5)
            await worker.runner.cancel(worker.runs(machine)[-1].id, "a person")
        await worker.at_rest()
        assert worker.world.running(machine) == program
        after = worker.machine(machine)
        changed = {name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)}
        assert changed <= {"updated_at_ms", "cause"}
        assert (worker.events(machine)[-1].type, worker.events(machine)[-1].status) == ("update", "failed")
        assert [row.number for row in worker.store.read.select(PortRow)] == [port.host_port for port in before.ports]
        assert worker.driver.images.holds == {machine: FIRST}
        assert worker.wrong() == []


@virtual_time
async def test_an_update_that_gets_its_image_can_be_stopped_and_the_machine_stays_what_it_was(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        before = worker.machine(machine)
        worker.world.silent_images.add("app:2")
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        after = worker.machine(machine)
        assert (after.state, after.version, after.config) == (State.stopped, before.version, before.config)
        assert (after.before, worker.world.running(machine)) == (None, [])
        await worker.machines.start(APP.name, machine, worker.request())
        await worker.at_rest()
        assert [image.partition("@")[0] for image in ran(worker)] == ["app:1", "app:1"]
        assert worker.wrong() == []


@virtual_time
async def test_whoever_has_to_do_with_its_program_finds_a_machine_started_while_an_update_gets_its_image(
    tmp_path: Path,
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", services=[{"internal_port": 80}])
        before = worker.machine(machine)
        worker.world.delays |= {"prepare": 20, "stop": 20}
        config = check_config(machine_config(image="app:2", services=[{"internal_port": 81}]))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        await asyncio.sleep(5)
        await worker.machines.cordon(APP.name, machine, worker.request(), cordoned=True)
        row = worker.machine(machine)
        assert (row.state, row.version == before.version) == (State.updating, False)
        seen = row.as_it_runs()
        assert {name for name in seen.__struct_fields__ if getattr(seen, name) != getattr(before, name)} <= {
            *("cause", "updated_at_ms"),
            "cordoned",
        }
        assert seen.cordoned
        api = worker.api
        command = ExecInMachine(APP.name, machine, cmd="cat", stdin="hello")
        assert (await api.exec(cast(Call, SimpleNamespace()), command)).stdout == "hello"
        await asyncio.sleep(25)
        row = worker.machine(machine)
        assert (row.state, row.instance, row.as_it_runs()) == (State.updating, before.instance, row), "it is stopped"
        await worker.at_rest()
        assert worker.machine(machine).state is State.started


@virtual_time
async def test_a_program_that_ends_while_an_update_waits_in_vain_is_treated_as_ever(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        worker.world.silent_images.add("app:2")
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        await asyncio.sleep(5)
        worker.world.end(worker.machine(machine).instance, code=0)
        await worker.until(lambda: worker.machine(machine).state is State.stopped)
        await worker.at_rest()
        assert worker.machine(machine).config["image"] == "app:1"
        assert worker.wrong() == []


@virtual_time
async def test_an_update_that_waits_in_vain_after_a_loss_of_power_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    world = a_world()
    worker = await SimWorker.open(tmp_path, world)
    machine = await worker.run_machine(image="app:1")
    world.silent_images.add("app:2")
    config = check_config(machine_config(image="app:2"))
    await worker.updates.update(APP.name, machine, worker.request(), config=config)
    await asyncio.sleep(5)
    await worker.die()
    world.lose_power()
    worker = await SimWorker.open(tmp_path, world)
    await worker.at_rest()
    assert worker.machine(machine).state is State.failed
    assert worker.machine(machine).config["image"] == "app:2"
    assert worker.wrong() == []
    await worker.close()


@virtual_time
async def test_an_image_on_its_way_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        worker.world.silent_images.add("app:1")
        began = asyncio.get_running_loop().time()
        stopped, gone = await worker.create("first", image="app:1"), await worker.create("second", image="app:1")
        await worker.machines.stop(APP.name, stopped, worker.request())
        await worker.machines.destroy(APP.name, gone, worker.request())
        await worker.at_rest()
        assert worker.machine(stopped).state is State.stopped
        assert worker.machine(gone).state is State.destroyed
        assert asyncio.get_running_loop().time() - began < 5
        assert worker.wrong() == []


@virtual_time
async def test_a_stop_right_after_a_start_does_not_take_an_image_that_is_here_for_one_on_its_way(
    tmp_path: Path,
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.create(image="app:1")
        await worker.machines.stop(APP.name, machine, worker.request())
        await worker.at_rest()
        assert "start/started" in [f"{event.type}/{event.status}" for event in worker.events(machine)]
        assert worker.machine(machine).state is State.stopped


@pytest.mark.parametrize(
    ("had", "given", "runtime"),
    [
        ("microvm", {"image": "app:2"}, "microvm"),
        ("microvm", {"image": "app:2", "runtime": "container"}, "container"),
        ("", {"image": "app:2"}, "container"),
        ("microvm", {"image": "host", "init": {"exec": ["serve"]}}, "process"),
    ],
)
@virtual_time
async def test_a_client_that_does_not_know_of_runtimes_changes_none(
    had: str, given: dict[str, Any], runtime: str, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", **({"runtime": had} if had else {}))
        assert check_config(with_runtime(given, worker.machine(machine))).runtime == runtime


async def on_its_way(worker: SimWorker) -> str:
    """A machine that a restart is about to start, once the silent image app:1 can be had."""
    machine = await worker.run_machine(image="app:1")
    worker.world.images.clear()
    worker.world.silent_images.add("app:1")
    await worker.machines.restart(APP.name, machine, worker.request())
    await asyncio.sleep(5)
    (run,) = [run for run in worker.runs(machine) if run.status == "active"]
    assert run.steps[run.next] == "prepare"
    return machine


@virtual_time
async def test_who_starts_a_machine_whose_image_is_on_its_way_is_answered_at_once(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await on_its_way(worker)
        starts = len(ran(worker))
        began = asyncio.get_running_loop().time()
        _, run = await worker.machines.start(APP.name, machine, worker.request())
        assert asyncio.get_running_loop().time() - began < 1
        assert run == worker.runs(machine)[-1].id
        worker.world.silent_images.clear()
        await worker.at_rest()
        assert worker.machine(machine).state is State.started
        assert len(ran(worker)) == starts + 1
        assert worker.wrong() == []


@pytest.mark.parametrize("skip_launch", [False, True])
@virtual_time
async def test_an_update_takes_the_place_of_an_image_that_is_on_its_way(skip_launch: bool, tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await on_its_way(worker)
        starts = len(ran(worker))
        began = asyncio.get_running_loop().time()
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config, skip_launch=skip_launch)
        await worker.at_rest()
        assert asyncio.get_running_loop().time() - began < 5
        assert worker.machine(machine).state is (State.stopped if skip_launch else State.started)
        assert [image.partition("@")[0] for image in ran(worker)[starts:]] == ([] if skip_launch else ["app:2"])
        assert worker.wrong() == []


@pytest.mark.parametrize("had", [True, False])
@virtual_time
async def test_of_two_updates_the_second_counts_and_the_old_program_runs_until_its_image_is_there(
    had: bool, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", guest={"memory_mb": 256})
        before, program = worker.machine(machine), worker.world.running(machine)
        worker.world.silent_images |= {"app:2", "app:3"}
        for image in ("app:2", "app:3"):
            config = check_config(machine_config(image=image, guest={"memory_mb": 512}))
            await worker.updates.update(APP.name, machine, worker.request(), config=config)
            await asyncio.sleep(5)
            assert worker.world.running(machine) == program
        if had:
            worker.world.silent_images.clear()
        await worker.at_rest()
        assert [image.partition("@")[0] for image in ran(worker)] == ["app:1", *(["app:3"] if had else [])]
        after = worker.machine(machine)
        if not had:
            assert worker.world.running(machine) == program
            assert (after.config, after.version, after.resources) == (before.config, before.version, before.resources)
        assert after.state is State.started
        assert worker.wrong() == []


@pytest.mark.parametrize("had", [True, False])
@virtual_time
async def test_what_is_set_while_an_update_fetches_its_image_stays_whether_that_comes_or_not(
    had: bool, tmp_path: Path
) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1", metadata={"note": "first"})
        worker.world.silent_images.add("app:2")
        config = check_config(machine_config(image="app:2", metadata={"note": "second"}))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        await asyncio.sleep(5)
        edit: dict[str, str] = {"note": "third"}
        await worker.machines.set_metadata(APP.name, machine, worker.request(), lambda old: {**old, **edit})
        await worker.machines.cordon(APP.name, machine, worker.request(), cordoned=True)
        if had:
            worker.world.silent_images.clear()
        await worker.at_rest()
        after = worker.machine(machine)
        assert [after.config["image"], after.config["metadata"], after.cordoned] == [
            "app:2" if had else "app:1",
            {"note": "third"},
            True,
        ]
        assert worker.wrong() == []


@virtual_time
async def test_what_needs_the_program_is_refused_at_once_while_an_image_is_on_its_way(tmp_path: Path) -> None:
    async with a_worker(tmp_path) as worker:
        machine = await worker.run_machine(image="app:1")
        worker.world.silent_images.add("app:2")
        config = check_config(machine_config(image="app:2"))
        await worker.updates.update(APP.name, machine, worker.request(), config=config)
        for call in (
            worker.machines.restart(APP.name, machine, worker.request()),
            worker.machines.suspend(APP.name, machine, worker.request()),
            worker.updates.resize(APP.name, machine, worker.request(), memory_mb=512),
        ):
            began = asyncio.get_running_loop().time()
            with pytest.raises(Busy, match=r"machine\.update is at step prepare") as refused:
                await call
            assert "its image is on its way" in refused.value.hint
            assert asyncio.get_running_loop().time() - began < 1
