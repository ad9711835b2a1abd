"""When a worker is taken for gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawker.core.outage import DEAD_PART, FAILED_LEAST, Outage

AFTER_S = 15.0
EVENTS = st.lists(st.tuples(st.sampled_from(("heard", "failed")), st.floats(0.1, 10.0), st.booleans()), max_size=30)


@given(events=EVENTS)
def test_who_is_gone_was_not_heard_of_for_long_and_was_looked_at_in_vain(
    events: list[tuple[str, float, bool]],
) -> None:
    outage, now = Outage(0.0), 0.0
    heard, failures = 0.0, 0
    for kind, seconds, dead in events:
        now += seconds
        if kind == "heard":
            outage.heard(now)
            heard, failures = now, 0
        else:
            outage.failed()
            failures += 1
        gone = outage.gone(now, dead=dead, after_s=AFTER_S)
        assert gone == (failures >= FAILED_LEAST and now - heard >= (AFTER_S * DEAD_PART if dead else AFTER_S))


def test_who_is_heard_again_may_be_gone_another_time() -> None:
    outage = Outage(0.0)
    for _ in range(FAILED_LEAST):
        outage.failed()
    assert outage.gone(AFTER_S, dead=False, after_s=AFTER_S)
    outage.told = True
    outage.heard(20.0)
    assert not outage.told
    assert not outage.gone(20.0, dead=True, after_s=AFTER_S)
