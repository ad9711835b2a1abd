"""What the simulator takes for a broken promise about an operation: each rule by a log of a few records."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.kit.sim_worker import APP, REGION

from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.checks.operations import Operations

MACHINE = MachineRow(
    id="m1",
    app=APP.name,
    name="one",
    region=REGION,
    state=State.started,
    desired="started",
    version="v1",
    config={"image": "host", "metadata": {"note": "first"}, "guest": {"memory_mb": 256}},
    resources=Resources(),
    created_at_ms=0,
    updated_at_ms=0,
    cause="request create by ann",
    private_ip="",
)
POLICY = "restart policy always: exit status 1, restart 1"


def wrong_after(*records: tuple[str, str, dict[str, Any]]) -> list[str]:
    """Kinds, causes and what each sets of a machine that runs."""
    found, row = Operations(), MACHINE
    found.machine("record 0", "run.started", MACHINE.cause, row)
    for number, (kind, cause, changes) in enumerate(records, start=1):
        row = replace(row, **changes)
        found.record(f"record {number}", kind, row.id, cause)
        found.machine(f"record {number}", kind, cause, row)
    return found.wrong


def noted(note: str, **config: Any) -> dict[str, Any]:
    return {"config": {**MACHINE.config, **config, "metadata": {"note": note}}}


STOPPED = ("run.started", "request stop by ann", {"desired": "stopped"})
UPDATED = ("run.started", "request update by ann", noted("first", image="app:2"))
NOTED = ("machine.metadata_set", "request note by bob", noted("second", image="app:2"))
UNDONE = ("step.completed", "request update by ann", {"config": MACHINE.config})


def test_a_worker_may_start_again_what_was_to_run_and_nothing_that_was_stopped() -> None:
    again = ("run.started", POLICY, {"desired": "started", "state": State.starting})
    gone = ("run.started", POLICY, {"desired": "stopped"})
    assert wrong_after(again, gone) == []
    (wrong,) = wrong_after(STOPPED, again)
    assert wrong.startswith("S2: record 2: machine m1: 'restart policy always")


@pytest.mark.parametrize("changes", [{"cordoned": True}, noted("other"), noted("first", image="app:9")])
def test_a_rule_of_the_worker_changes_nothing_but_what_was_wished_for(changes: dict[str, Any]) -> None:
    assert len(wrong_after(("run.started", POLICY, changes))) == 1
    assert wrong_after(("machine.changed", "request other by bob", changes)) == []


def test_an_update_that_fails_takes_back_what_it_set_and_nothing_that_was_set_since() -> None:
    assert wrong_after(UPDATED, UNDONE) == []
    (wrong,) = wrong_after(UPDATED, NOTED, UNDONE)
    assert "changed its metadata, which 'request note by bob' had set" in wrong


def test_the_size_follows_at_the_end_of_a_run() -> None:
    resized = {"config": {**MACHINE.config, "guest": {"memory_mb": 512}}}
    assert wrong_after(("step.completed", "request resize by ann", resized)) == []


def test_an_order_that_was_given_up_is_taken_no_more_until_its_key_is_forgotten() -> None:
    found = Operations()
    for kind in ("reservation.held", "reservation.released"):
        found.record("a record", kind, "key", "request order by ann")
    assert (found.given_up, found.wrong) == ({"key"}, [])
    found.record("a record", "reservation.held", "key", "request order by ann")
    assert len(found.wrong) == 1
    found.forgotten("key")
    found.record("a record", "reservation.held", "key", "request order by ann")
    assert len(found.wrong) == 1
