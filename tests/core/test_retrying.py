"""Which requests may be sent again after a machine did not answer them."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", FAILURES)
def test_no_request_is_tried_for_ever_nor_without_its_body_nor_done_twice(method: bytes, how: Failure) -> None:
    """What a worker's proxy refused because it is not there, or because enough wait, no machine has seen."""
    never_done = how in ("refused", "elsewhere", "crowded")
    counts = (1, 2, TRIES_MOST - 1, TRIES_MOST, 2 * TRIES_MOST)
    for sent, whole, tries, sent_tries in itertools.product((False, True), (False, True), counts, range(SENT_MOST + 2)):
        may = may_retry(method, how, sent=sent, whole=whole, tries=tries, sent_tries=sent_tries)
        as_good_as_once = not sent or never_done or (method in IDEMPOTENT and sent_tries < SENT_MOST)
        assert may is (whole and tries < TRIES_MOST and as_good_as_once)


def test_safe_methods_are_idempotent() -> None:
    assert SAFE < IDEMPOTENT
