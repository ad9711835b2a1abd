"""The states of a machine and the table of moves between them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hawker.model.guest import Resources
from hawker.model.machine import HOLDS_ALL, MOVES, RESTING, SETTLED, IllegalMove, State, check_move, diagram
from hawker.model.rows import MachineRow

# The public documentation's state diagram, edge by edge; "suspend" passes through suspending.
DOCUMENTED = {
    "created": "starting stopping updating destroying",
    "starting": "started failed",
    "started": "stopping restarting suspending updating destroying",
    "restarting": "starting",
    "suspending": "suspended",
    "suspended": "starting stopping updating destroying",
    "stopping": "stopped failed",
    "stopped": "starting updating destroying",
    "failed": "starting stopping updating destroying",
    "updating": "starting stopped created",
    "destroying": "destroyed",
    "destroyed": "",
}


@pytest.mark.parametrize("state", list(State))
def test_the_documented_moves_are_all_there(state: State) -> None:
    assert {State(to) for to in DOCUMENTED[state].split()} <= MOVES[state]


def test_what_the_diagram_leaves_out_but_the_documentation_asks_for() -> None:
    for old, new in [("created", "stopped"), ("started", "stopped"), ("started", "starting")]:
        assert State(new) in MOVES[State(old)]


def test_a_settled_state_is_where_clients_may_wait_for() -> None:
    assert {"created", "started", "stopped", "suspended", "failed"} == RESTING
    # A created machine is still being prepared: it starts next, or it rests as stopped.
    assert (RESTING - {"created"}) | {"destroyed"} == SETTLED


def test_nothing_leaves_destroyed_and_every_state_can_get_there() -> None:
    assert not MOVES[State.destroyed]
    reach = {State.destroyed}
    for _ in State:
        reach |= {state for state in State if MOVES[state] & reach}
    assert reach == set(State)


def test_no_state_but_created_is_the_first_and_all_are_reached_from_it() -> None:
    reached = {State.created}
    for _ in State:
        reached |= {to for state in reached for to in MOVES[state]}
    assert reached == set(State)


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_exactly_the_moves_of_the_table_are_allowed(old: State, new: State) -> None:
    if old == new or new in MOVES[old]:
        assert check_move("m", old, new) is new
    else:
        with pytest.raises(IllegalMove, match=f"machine m: {old} -> {new} is not a legal move"):
            check_move("m", old, new)


def test_the_diagram_has_one_line_per_move() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert len(set(lines)) == len(lines) == 3 + sum(len(to) for to in MOVES.values())


@pytest.mark.parametrize("state", State)
def test_a_machine_holds_all_it_takes_only_while_it_may_run(state: State) -> None:
    takes = Resources(cpus_shared=2, memory_mib=512, disk_mib=1024, machines=1)
    row = MachineRow(
        id="m",
        app="a",
        name="n",
        region="ord",
        state=state,
        desired="started",
        version="v",
        config={},
        resources=takes,
        created_at_ms=0,
        updated_at_ms=0,
        cause="test",
        private_ip="",
    )
    if state is State.destroyed:
        assert row.held() == Resources()
    elif state in (State.stopped, State.failed, State.destroying):
        assert row.held() == Resources(disk_mib=1024, machines=1)
        if state is State.destroying:
            assert replace(row, instance="it still runs").held() == takes
    else:
        assert state in HOLDS_ALL
        assert row.held() == takes
        assert replace(row, asleep=True).held() == replace(takes, cpus_shared=0, cpus_dedicated=0)
        assert replace(row, asleep=True, driver="microvm").held() == Resources(disk_mib=1024, machines=1)
