"""Every flow, cut off before and after every commit and every outside effect, ends where it would have ended uncut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.kit import crash_time as virtual
from tests.kit.crash_rig import (
    Script,
    create,
    destroy,
    play,
    program_ends,
    restart,
    start,
    stop,
    suspend,
    update,
)
from tests.kit.crash_world import World

from hawker.worker.flow import Done, StepContext
from hawker.worker.flows import MachineFlows

PAIRS_PER_SCRIPT = 60

SCRIPTS: dict[str, Script] = {
    "create": [create("a")],
    "create without launch, start": [create("a", skip_launch=True), start("a")],
    "stop and start": [create("a"), stop("a"), start("a")],
    "restart": [create("a"), restart("a")],
    "update a running one": [create("a"), update("a", guest={"cpus": 2, "memory_mb": 1024})],
    "update one at rest": [create("a", skip_launch=True), update("a", env={"A": "1"}), start("a")],
    "suspend and resume": [create("a"), suspend("a"), start("a")],
    "destroy": [create("a"), create("b"), destroy("a")],
    "ends and is restarted": [create("a"), program_ends("a", code=1), program_ends("a", code=0, oom=True)],
    "ends for good": [create("a", restart={"policy": "no"}), program_ends("a", code=3)],
    "ends and is destroyed": [create("a", auto_destroy=True), program_ends("a", code=0)],
    "a life": [create("a"), stop("a"), start("a"), restart("a"), suspend("a"), stop("a"), destroy("a")],
}


def played(script: Script, path: Path, world: World, **options: Any) -> object:
    for old in path.parent.glob(path.name + "*"):
        old.unlink()
    return virtual.run(play(script, path, world, **options))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCRIPTS)
def test_cut_off_anywhere_once_or_twice_it_ends_in_the_reference_state(name: str, tmp_path: Path) -> None:
    script, path = SCRIPTS[name], tmp_path / "worker.db"
    uncut = World()
    reference = played(script, path, uncut)
    points = len(uncut.points)
    singles: Sequence[tuple[int, ...]] = [(n,) for n in range(1, points + 1)]
    every_pair = list(itertools.product(range(1, points + 1), range(1, 8)))
    pairs = Random(name).sample(every_pair, min(PAIRS_PER_SCRIPT, len(every_pair)))
    for cuts in [*singles, *((first, first + gap) for first, gap in pairs)]:
        world = World(cuts)
        assert played(script, path, world) == reference, f"cut at {cuts}: {[world.points[c - 1] for c in cuts[:1]]}"
    print(f"{name}: {points} points, {len(singles)} single cuts, {len(pairs)} of {len(every_pair)} pairs")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_effect_done_twice_changes_nothing(name: str, tmp_path: Path) -> None:
    script, path = SCRIPTS[name], tmp_path / "worker.db"
    uncut = World()
    reference = played(script, path, uncut)
    for effect in range(1, uncut.effects + 1):
        assert played(script, path, World(repeat=effect)) == reference, f"effect {effect}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_effect_retried_ends_in_the_reference_state(name: str, tmp_path: Path) -> None:
    script, path = SCRIPTS[name], tmp_path / "worker.db"
    uncut = World()
    reference = played(script, path, uncut)
    for effect in range(1, uncut.effects + 1):
        assert played(script, path, World(fail=("retry", effect))) == reference, f"effect {effect}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_effect_failing_for_good_leaves_everything_in_order(name: str, tmp_path: Path) -> None:
    """The end is another one, but nothing is half done: the invariants of the kit hold."""
    script, path = SCRIPTS[name], tmp_path / "worker.db"
    uncut = World()
    played(script, path, uncut)
    for effect in range(1, uncut.effects + 1):
        played(script, path, World(fail=("abort", effect)), tolerant=True)


class KeyOfItsOwn(MachineFlows):
    """A mutant: the program it starts is named by chance, not by its run and step."""

    async def _launch(self, context: StepContext) -> Done:
        return await super()._launch(replace(context, key=f"{self._host.ulid()}/launch"))


class NothingCleared(MachineFlows):
    """A mutant: what a stopped program leaves at the driver stays there."""

    async def _clear(self, context: StepContext) -> Done:
        return Done()


def cuts_that_show(mutant: type[MachineFlows], script: Script, path: Path) -> int:
    """At how many points a cut brings out the mutant: an invariant breaks or the end is another one."""
    uncut = World()
    reference = played(script, path, uncut)
    shown = 0
    for point in range(1, len(uncut.points) + 1):
        try:
            shown += played(script, path, World([point]), flows=mutant) != reference
        except AssertionError:
            shown += 1
    return shown


def test_the_kit_shows_an_effect_that_is_not_named_by_its_run(tmp_path: Path) -> None:
    assert cuts_that_show(KeyOfItsOwn, SCRIPTS["create"], tmp_path / "worker.db") > 0


def test_the_kit_shows_what_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "worker.db"
    reference = played(SCRIPTS["restart"], path, World())
    assert played(SCRIPTS["restart"], path, World(), flows=NothingCleared) != reference
