"""Every flow, cut off before and after every commit and every outside effect, with every step failing and repeated.

`tests/kit/flowkit.py` says what is run of each scenario. The counts are printed at the end of the test report. Each
change runs every single cut; pairs of cuts, aborts with a cut, some faults and those of long scenarios are in the full
run, all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.flowkit import Plan, Scenario, explore, explore_more, trial
from tests.kit.sim_client import Client

from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.sim.hosts.world import Program

PARTS = 4
"""Of what takes minutes for a scenario, so that a slice of the full run may have one."""


async def create(client: Client) -> None:
    await client.create("a")


async def create_at_rest(client: Client) -> None:
    await client.create("a", skip_launch=True)
    await client.start("a")


async def a_program_that_cannot_start(client: Client) -> None:
    await client.create("a", "broken")


async def stop_and_start(client: Client) -> None:
    await client.create("a")
    await client.stop("a")
    await client.start("a")


async def let_go_by_its_daemon(client: Client) -> None:
    client.world.releases = "now"
    await client.create("a")
    await client.stop("a")


async def a_slow_stop(client: Client) -> None:
    await client.create("a", "stubborn")
    await client.stop("a", timeout_s=5)


async def restart(client: Client) -> None:
    await client.create("a")
    await client.restart("a")


async def update_running(client: Client) -> None:
    await client.create("a")
    await client.update("a", "serve", guest={"cpus": 2})


async def update_to_a_program_that_cannot_start(client: Client) -> None:
    await client.create("a")
    await client.update("a", "broken", guest={"cpus": 2})


async def update_at_rest(client: Client) -> None:
    await client.create("a", skip_launch=True)
    await client.update("a", "serve", guest={"cpus": 2})
    await client.start("a")
    await client.rest()
    await client.update("a", "serve", skip_launch=True)


async def suspend_and_resume(client: Client) -> None:
    await client.create("a")
    await client.suspend("a")
    await client.start("a")


async def stop_suspended(client: Client) -> None:
    await client.create("a")
    await client.suspend("a")
    await client.stop("a")


async def destroy(client: Client) -> None:
    await client.create("a", lease_ttl_s=1)
    await client.rest()
    await client.stop("a")
    await client.destroy("a")


async def destroy_by_force(client: Client) -> None:
    await client.create("a")
    await client.rest()
    await client.destroy("a", force=True)


async def a_program_that_ends(client: Client) -> None:
    await client.create("a", "short")
    await client.until_state("a", State.stopped)


async def a_program_that_ends_at_once(client: Client) -> None:
    await client.create("a", "instant")
    await client.until_state("a", State.stopped)


async def a_program_that_fails_twice_too_often(client: Client) -> None:
    await client.create("a", "fail", restart={"policy": "on-failure", "max_retries": 2})
    await client.until_state("a", State.stopped)


async def a_program_that_runs_out_of_memory(client: Client) -> None:
    await client.create("a", "greedy", restart={"policy": "on-failure", "max_retries": 1})
    await client.until_state("a", State.stopped)


async def a_program_that_is_destroyed_when_it_ends(client: Client) -> None:
    await client.create("a", "short", auto_destroy=True)
    await client.until_state("a", State.destroyed)


async def stop_in_a_backoff(client: Client) -> None:
    await client.create("a", "fail", restart={"policy": "always"})
    await client.until("a", lambda row, story: row.restarts == 2 and row.state is State.starting)
    await client.stop("a")


async def reservations(client: Client) -> None:
    await client.reserve("kept")
    await client.reserve("lapsing", hold_s=5)
    await client.reserve("refused")
    await client.release("early")
    await client.reserve("early")
    await client.confirm("kept")
    await asyncio.sleep(10)
    await client.sweep()
    await client.reserve("released")
    await client.release("released")


async def two_machines(client: Client) -> None:
    await client.create("a")
    await client.create("b")
    await client.rest()
    await client.stop("a")
    await client.restart("b")
    await client.rest()
    await client.destroy("b", force=True)


async def a_life(client: Client) -> None:
    await client.create("a")
    await client.stop("a")
    await client.update("a", "fail", restart={"policy": "on-failure", "max_retries": 1})
    await client.start("a")
    await client.until_state("a", State.stopped)
    await client.update("a", "serve")
    await client.start("a")
    await client.suspend("a")
    await client.start("a")
    await client.restart("a")
    await client.rest()
    await client.destroy("a", force=True)


async def an_image(client: Client) -> None:
    await client.create("a", image="app:1", services=WEB)
    await client.rest()
    await client.destroy("a", force=True)


async def an_image_for_later(client: Client) -> None:
    await client.create("a", image="app:1", skip_launch=True)
    await client.rest()
    await client.start("a")


async def an_image_that_must_not_be_used(client: Client) -> None:
    client.world.bad_images["app:1"] = "a layer is corrupt"
    await client.create("a", image="app:1")


async def an_image_that_comes_too_late(client: Client) -> None:
    client.world.silent_images.add("app:1")
    await client.create("a", image="app:1")


async def another_image(client: Client) -> None:
    await client.create("a", image="app:1", services=WEB)
    await client.rest()
    await client.update("a", image="app:2", services=[MORE, *WEB])
    await client.rest()
    await client.restart("a")


async def another_image_that_must_not_be_used(client: Client) -> None:
    client.world.bad_images["app:2"] = "a layer is corrupt"
    await client.create("a", image="app:1", services=WEB)
    await client.rest()
    await client.update("a", image="app:2", services=[MORE, *WEB])


async def another_image_in_the_place_of_one_on_its_way(client: Client) -> None:
    client.world.silent_images |= {"app:1", "app:3"}
    await client.create("a", image="app:1", services=WEB)
    await client.update("a", image="app:2", services=WEB)
    await client.rest()
    await client.update("a", image="app:3", services=WEB)
    await client.update("a", image="app:4", services=[MORE, *WEB])


async def another_runtime(client: Client) -> None:
    await client.create("a", image="app:1", runtime="process", services=WEB)
    await client.rest()
    await client.update("a", image="app:1", runtime="microvm", services=WEB)


async def a_program_of_an_image_that_fails(client: Client) -> None:
    await client.create("a", "fail", image="app:1", restart={"policy": "on-failure", "max_retries": 1})
    await client.until_state("a", State.stopped)


async def more_and_less_memory(client: Client) -> None:
    await client.create("a")
    await client.resize("a", 512)
    await client.rest()
    await client.resize("a", 256)
    await client.stop("a")
    await client.resize("a", 512)
    await client.start("a")


async def less_memory_than_it_uses(client: Client) -> None:
    await client.create("a", "hungry", guest={"memory_mb": 512})
    await client.resize("a", 256)


WEB = [{"internal_port": 80, "ports": [{"port": 80}], "checks": [{"type": "tcp"}]}]
MORE = {"internal_port": 81, "checks": [{"type": "http"}]}
PROGRAMS = {
    "hungry": Program(least_mib=400),
    "broken": Program(fails="not executable"),
    "stubborn": Program(stops_in_s=None),
    "short": Program(runs_s=2),
    "instant": Program(runs_s=0),
    "fail": Program(runs_s=0.1, code=1),
    "greedy": Program(runs_s=1, signal=9, oom_killed=True),
}
SMALL = Resources(cpus_shared=2, memory_mib=1 << 20, disk_mib=1 << 20, machines=100)

LONG = (two_machines, a_life)
SCENARIOS = [
    Scenario(script.__name__, script, PROGRAMS, long=script in LONG)
    for script in (
        create,
        create_at_rest,
        a_program_that_cannot_start,
        stop_and_start,
        let_go_by_its_daemon,
        a_slow_stop,
        restart,
        update_running,
        update_to_a_program_that_cannot_start,
        update_at_rest,
        suspend_and_resume,
        stop_suspended,
        destroy,
        destroy_by_force,
        a_program_that_ends,
        a_program_that_ends_at_once,
        a_program_that_fails_twice_too_often,
        a_program_that_runs_out_of_memory,
        a_program_that_is_destroyed_when_it_ends,
        stop_in_a_backoff,
        two_machines,
        a_life,
        an_image,
        an_image_for_later,
        an_image_that_must_not_be_used,
        an_image_that_comes_too_late,
        another_image,
        another_image_that_must_not_be_used,
        another_runtime,
        a_program_of_an_image_that_fails,
        more_and_less_memory,
        less_memory_than_it_uses,
    )
] + [Scenario("reservations", reservations, capacity=SMALL)]


@pytest.mark.slow
@pytest.mark.timeout(240)  # hundreds of runs, and a host that has more to do
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_flow_ends_alike_wherever_it_is_cut_off_and_whatever_fails(scenario: Scenario, in_memory: Path) -> None:
    explore(scenario, in_memory)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_flow_ends_alike_when_it_is_cut_off_twice(scenario: Scenario, part: int, in_memory: Path) -> None:
    explore_more(scenario, in_memory, part, PARTS)


def test_each_act_of_a_long_scenario_is_one_of_a_shorter_scenario_too(in_memory: Path) -> None:
    """By flow and step."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for scenario in SCENARIOS:
        found[scenario.long] |= {act.split()[1] for act in trial(scenario, in_memory, Plan()).acts}
    assert len(found[True]) > 10
    assert found[True] - found[False] == set()


@pytest.mark.slow
def test_an_update_in_the_place_of_an_image_on_its_way_ends_alike_wherever_it_is_cut_off(in_memory: Path) -> None:
    """Cuts alone: a fault that takes longer than the client waits changes what the update finds."""
    scenario = Scenario("overtaking", another_image_in_the_place_of_one_on_its_way, PROGRAMS)
    reference = trial(scenario, in_memory, Plan())
    assert reference.wrong == []
    assert reference.points[0] > 20
    for cut in range(1, reference.points[0] + 1):
        outcome = trial(scenario, in_memory, Plan(cuts=(cut,)))
        assert (outcome.wrong, outcome.end) == ([], reference.end), f"cut {cut}"
