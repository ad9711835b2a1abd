"""Which requests may be sent again after a machine did not answer them."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.retrying import IDEMPOTENT, SAFE, SENT_MOST, TRIES_MOST, Failure, may_retry

FAILURES: list[Failure] = list(get_args(Failure))
METHODS = [b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE", b"POST", b"PATCH", b"CONNECT", b"PURGE"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", FAILURES)
def test_what_was_not_sent_may_go_to_another_machine_whatever_it_asks_for(method: bytes, how: Failure) -> None:
    assert may_retry(method, how, sent=False, whole=True, tries=1, sent_tries=0)


@pytest.mark.parametrize("how", ["reset", "timeout", "unhealthy"])
def test_what_was_sent_is_repeated_only_if_that_is_as_good_as_once(how: Failure) -> None:
    repeated = [method for method in METHODS if may_retry(method, how, sent=True, whole=True, tries=1, sent_tries=1)]
    assert repeated == [b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"]


@pytest.mark.parametrize("how", ["refused", "elsewhere", "crowded"])
def test_a_refusal_passed_nothing_on_even_if_bytes_were_on_their_way(how: Failure) -> None:
    assert may_retry(b"POST", how, sent=True, whole=True, tries=1, sent_tries=1)


def test_a_request_that_breaks_machines_breaks_few_of_them() -> None:
    sent = 1
    while may_retry(b"GET", "reset", sent=True, whole=True, tries=sent, sent_tries=sent):
        sent += 1
    assert sent == SENT_MOST


@given(
    st.sampled_from(METHODS),
    st.sampled_from(FAILURES),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2 * TRIES_MOST),
    st.integers(0, 10),
)
def test_no_request_is_tried_for_ever_nor_without_its_body_nor_done_twice(
    method: bytes, how: Failure, sent: bool, whole: bool, tries: int, sent_tries: int
) -> None:
    if may_retry(method, how, sent=sent, whole=whole, tries=tries, sent_tries=sent_tries):
        assert whole
        assert tries < TRIES_MOST
        assert not sent or method in IDEMPOTENT or how in ("refused", "elsewhere")


def test_safe_methods_are_idempotent() -> None:
    assert SAFE < IDEMPOTENT
