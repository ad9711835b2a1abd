"""The life of a run, held by a state machine that throws every outcome at it in any order."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hawker.core import journal
from hawker.model.rows import RunRow

STEPS = ["reserve", "fetch", "start", "settle"]
KNOWN = frozenset(STEPS)


def a_run(**fields: Any) -> RunRow:
    defaults: dict[str, Any] = {
        "id": "01RUN",
        "flow": "create",
        "flow_version": 1,
        "resource": "machine",
        "exclusive": True,
        "args": {},
        "steps": STEPS,
        "cause": "test",
        "source": "user",
        "trace": "",
        "started_at_ms": 0,
        "updated_at_ms": 0,
    }
    return RunRow(**{**defaults, **fields})


def test_steps_run_in_order_and_the_last_one_ends_the_run() -> None:
    run, acts = a_run(), []
    while isinstance(act := journal.decide(run, 0, KNOWN), journal.Act):
        acts.append((act.step, act.key))
        run = journal.completed(run, {"of": act.step}, 0)
    assert acts == [(step, f"01RUN/{step}") for step in STEPS]
    assert run.status == "done"
    assert run.outputs == {step: {"of": step} for step in STEPS}
    assert journal.decide(run, 0, KNOWN) == journal.Finished()


def test_an_abort_skips_to_the_final_step_and_the_run_ends_failed() -> None:
    run = journal.aborted(a_run(next=1), "no room", 5)
    act = journal.decide(run, 5, KNOWN)
    assert isinstance(act, journal.Act)
    assert act.step == "settle"
    run = journal.completed(run, None, 6)
    assert (run.status, run.error) == ("failed", "no room")


def test_an_abort_of_the_final_step_parks_the_run() -> None:
    run = journal.aborted(a_run(next=3), "cannot settle", 5)
    assert (run.status, run.error) == ("parked", "cannot settle")


def test_what_ended_a_run_is_not_overwritten_by_a_retry_of_its_final_step() -> None:
    run = journal.aborted(a_run(next=1), "no room", 5)
    run = journal.retried(run, "the driver is busy", None, 5, random.Random(0))
    assert run.error == "no room"
    assert journal.parked(run, "gave up", 6).error == "no room; gave up"
    assert journal.completed(run, None, 6).error == "no room"


def test_a_step_that_succeeds_after_retries_leaves_no_error_behind() -> None:
    run = journal.retried(a_run(), "busy", None, 0, random.Random(0))
    assert run.error == "busy"
    assert journal.completed(run, None, 1).error == ""


def test_a_cancel_leaves_a_run_in_its_final_step_alone() -> None:
    run = a_run(next=3)
    assert journal.cancelled(run, "a person", 5) is run


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
def test_an_ended_run_is_not_brought_back_by_a_late_cancel_or_abort(status: str) -> None:
    run = a_run(next=4, status=status, ending="" if status == "done" else status)
    assert journal.cancelled(run, "late", 5) is run
    assert journal.aborted(run, "late", 5) is run


def test_an_unknown_step_parks_the_run_and_names_it() -> None:
    decision = journal.decide(a_run(next=1), 0, KNOWN - {"fetch"})
    assert decision == journal.Park("step fetch of create version 1 is not known to this program")


def test_a_retry_waits_until_its_time() -> None:
    run = journal.retried(a_run(), "busy", 2.5, 1000, random.Random(0))
    assert journal.decide(run, 3499, KNOWN) == journal.Wait(1)
    assert journal.decide(run, 3500, KNOWN) == journal.Act("reserve", "01RUN/reserve", 1)


@pytest.mark.parametrize("back_ms", [1, 3_600_000, 86_400_000])
def test_a_retry_waits_no_longer_than_it_was_to_when_the_clock_goes_back(back_ms: int) -> None:
    run = journal.retried(a_run(), "busy", 2.5, 10**12, random.Random(0))
    assert journal.decide(run, 10**12 - back_ms, KNOWN) == journal.Wait(2500)
    assert journal.decide(journal.waited(run), 10**12 - back_ms, KNOWN) == journal.Act("reserve", "01RUN/reserve", 1)


def test_retry_delays_double_from_a_tenth_of_a_second_to_five_and_are_spread_by_half() -> None:
    rng = random.Random(1)
    for attempt in range(40):
        middle_ms = min(5000, 100 * 2**attempt)
        delays = [journal.retried(a_run(attempt=attempt), "x", None, 0, rng).not_before_ms for _ in range(50)]
        assert middle_ms * 0.5 - 1 <= min(delays) < middle_ms < max(delays) <= middle_ms * 1.5


def test_a_stuck_run_records_its_retries_ever_less_often() -> None:
    run, recorded = a_run(), []
    for _ in range(1000):
        after = journal.retried(run, "busy", 0.0, 0, random.Random(0))
        if journal.worth_recording(run, after):
            recorded.append(after.attempt)
        run = after
    assert recorded == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    changed = journal.retried(run, "another reason", 0.0, 0, random.Random(0))
    assert journal.worth_recording(run, changed)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": []},
        {"steps": ["start", "start"]},
        {"status": "done"},
        {"next": 4},
        {"next": 4, "status": "done", "ending": "failed"},
        {"next": 1, "ending": "cancelled"},
    ],
)
def test_a_row_these_functions_cannot_make_is_caught(fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="run 01RUN"):
        journal.check(a_run(**fields))


class AnyRun(RuleBasedStateMachine):
    """One run, whatever happens to it, with a worker that may be killed (the row is read back) between any two."""

    @initialize(steps=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True), seed=st.integers())
    def begin(self, steps: list[str], seed: int) -> None:
        self.run = a_run(steps=steps)
        self.known = frozenset(steps)
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.done: list[str] = []
        self.cut_short = False

    def due(self) -> str:
        return self.run.steps[self.run.next]

    def acting(self) -> bool:
        return isinstance(journal.decide(self.run, self.now_ms, self.known), journal.Act)

    @rule(ms=st.integers(0, 10_000))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def the_worker_is_killed(self) -> None:
        self.run = msgspec.json.decode(msgspec.json.encode(self.run), type=RunRow)

    @precondition(acting)
    @rule(output=st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2))
    def the_step_completes(self, output: dict[str, int] | None) -> None:
        step = self.due()
        self.run = journal.completed(self.run, output, self.now_ms)
        self.done.append(step)
        assert self.run.outputs.get(step) == output

    @precondition(acting)
    @rule(after_s=st.none() | st.floats(0, 10))
    def the_step_asks_for_another_try(self, after_s: float | None) -> None:
        before, key = self.run, journal.effect_key(self.run.id, self.due())
        self.run = journal.retried(before, "busy", after_s, self.now_ms, self.rng)
        assert self.run.next == before.next
        assert self.run.attempt == before.attempt + 1
        later = journal.decide(self.run, self.run.not_before_ms, self.known)
        assert later == journal.Act(self.due(), key, self.run.attempt)

    @precondition(acting)
    @rule()
    def the_step_gives_up(self) -> None:
        was_final = self.run.next == len(self.run.steps) - 1
        self.run = journal.aborted(self.run, "gave up", self.now_ms)
        assert (self.run.status == "parked") == was_final
        self.cut_short |= not was_final

    @rule()
    def someone_cancels(self) -> None:
        before = self.run
        self.run = journal.cancelled(self.run, "cancelled by a person", self.now_ms)
        self.cut_short |= self.run.next != before.next

    @precondition(acting)
    @rule()
    def the_program_was_downgraded(self) -> None:
        step = self.due()
        decision = journal.decide(self.run, self.now_ms, self.known - {step})
        assert isinstance(decision, journal.Park)
        self.run = journal.parked(self.run, decision.why, self.now_ms)

    @precondition(lambda self: self.run.status == "parked")
    @rule()
    def a_person_looks(self) -> None:
        due = self.due()
        self.run = journal.unparked(self.run, self.now_ms)
        assert journal.decide(self.run, self.now_ms, self.known) == journal.Act(due, f"01RUN/{due}", 0)

    @invariant()
    def the_row_is_one_these_functions_can_make(self) -> None:
        journal.check(self.run)

    @invariant()
    def each_step_was_done_once_and_in_order(self) -> None:
        steps = self.run.steps
        assert self.done == [step for step in steps if step in self.done]
        if not self.cut_short:
            assert self.done == steps[: self.run.next]

    @invariant()
    def a_run_that_ended_had_its_final_step_and_acts_no_more(self) -> None:
        if self.run.status in ("done", "failed", "cancelled"):
            assert self.done[-1] == self.run.steps[-1]
            assert journal.decide(self.run, self.now_ms + 10**9, self.known) == journal.Finished()
            assert (self.run.status == "done") == (not self.cut_short)
        elif self.run.status == "parked":
            assert journal.decide(self.run, self.now_ms + 10**9, self.known) == journal.Finished()

    @invariant()
    def an_early_end_keeps_its_reason(self) -> None:
        if self.run.ending:
            expected = "gave up" if self.run.ending == "failed" else "cancelled by a person"
            assert self.run.error.startswith(expected)

    def teardown(self) -> None:
        """Whatever happened, with a person and no more trouble the run ends, and its final step runs."""
        if not hasattr(self, "run"):
            return
        for _ in range(len(self.run.steps) + 2):
            match journal.decide(self.run, self.now_ms, self.known):
                case journal.Wait():
                    self.run = journal.waited(self.run)
                case journal.Finished() if self.run.status == "parked":
                    self.run = journal.unparked(self.run, self.now_ms)
                case journal.Finished():
                    break
        while isinstance(journal.decide(self.run, self.now_ms, self.known), journal.Act):
            self.the_step_completes(None)
        self.a_run_that_ended_had_its_final_step_and_acts_no_more()
        assert self.run.status in ("done", "failed", "cancelled")


TestAnyRun = AnyRun.TestCase
