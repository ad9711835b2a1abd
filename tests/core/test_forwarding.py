"""What a proxy does to the header fields of requests and answers on their way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.forwarding import (
    HOP_BY_HOP,
    OF_PROXIES,
    PRISTINE,
    TO_PROXIES,
    Answer,
    Edge,
    Field,
    inner_answer,
    inner_request,
    regions_of,
    unavailable,
    wishes_of,
)
from hawker.core.routing import ANY, Wishes

EDGE = Edge(b"203.0.113.7", b"https", 443, b"ams")
HOST = (b"host", b"web.example")


def sent(*fields: Field, h2: bool = False, upgrade: bytes = b"") -> list[Field]:
    """What a machine gets of these, without what is added to every request."""
    before = EDGE.request([HOST], b"01R-ams")[1:]
    return [field for field in EDGE.request([HOST, *fields], b"01R-ams", h2=h2, upgrade=upgrade) if field not in before]


def test_a_machine_is_told_who_asks_and_how() -> None:
    assert dict(EDGE.request([HOST], b"01R-ams")) == {
        b"host": b"web.example",
        b"fly-client-ip": b"203.0.113.7",
        b"fly-forwarded-port": b"443",
        b"fly-region": b"ams",
        b"fly-request-id": b"01R-ams",
        b"via": b"1.1 hawker",
        b"x-forwarded-for": b"203.0.113.7",
        b"x-forwarded-port": b"443",
        b"x-forwarded-proto": b"https",
        b"x-forwarded-ssl": b"on",
    }
    plain = dict(Edge(b"::1", b"http", 80, b"ord", b"2").request([HOST], b"1"))
    assert (plain[b"x-forwarded-proto"], plain[b"x-forwarded-ssl"], plain[b"via"]) == (b"http", b"off", b"2 hawker")


def test_what_a_user_says_stays_in_its_order() -> None:
    fields = [HOST, (b"accept", b"*/*"), (b"cookie", b"a"), (b"cookie", b"b"), (b"content-length", b"3")]
    assert EDGE.request(fields, b"1")[:5] == fields


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP | OF_PROXIES | {b"hawker-app", b"hawker-backhaul", b"hawker-x"}))
def test_what_is_for_one_hop_or_said_by_proxies_alone_is_not_taken_from_a_user(name: bytes) -> None:
    assert sent((name, b"forged")) == [HOST]


@pytest.mark.parametrize(
    "name", [b"fly_client_ip", b"x_forwarded_proto", b"x_forwarded_for", b"hawker_app", b"fly-client_ip"]
)
def test_names_that_an_app_may_take_for_the_proxys_own_are_not_taken_either(name: bytes) -> None:
    assert sent((name, b"forged")) == [HOST]
    assert sent((b"my_header", b"1")) == [HOST, (b"my_header", b"1")]


def test_fields_that_connection_lists_end_here() -> None:
    given = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"x-other", b"2"), (b"connection", b"x-more")]
    assert sent(*given, (b"x-more", b"3")) == [HOST, (b"x-other", b"2")]


def test_a_connection_that_lists_what_all_must_see_or_what_the_proxy_adds_takes_nothing_away() -> None:
    listed = b"host, content-length, authorization, cookie, fly-client-ip, x-forwarded-for"
    fields = [HOST, (b"content-length", b"0"), (b"authorization", b"a"), (b"connection", listed)]
    found = EDGE.request(fields, b"1")
    assert found[:3] == fields[:3]
    assert (b"fly-client-ip", b"203.0.113.7") in found
    assert (b"x-forwarded-for", b"203.0.113.7") in found


def test_the_way_that_a_request_came_is_continued() -> None:
    fields = [(b"x-forwarded-for", b"10.0.0.1"), (b"via", b"1.0 a"), (b"x-forwarded-for", b"10.0.0.2, 10.0.0.3")]
    assert sent(*fields, (b"x-forwarded-for", b""), (b"via", b"1.1 b")) == [
        HOST,
        (b"x-forwarded-for", b"10.0.0.1, 10.0.0.2, 10.0.0.3, 203.0.113.7"),
        (b"via", b"1.0 a, 1.1 b, 1.1 hawker"),
    ]


def test_trailers_are_asked_for_only_over_http_2() -> None:
    assert sent((b"te", b"gzip;q=0.5, Trailers")) == [HOST]
    assert sent((b"te", b"gzip;q=0.5, Trailers"), h2=True) == [HOST, (b"te", b"trailers")]
    assert sent((b"te", b"gzip"), h2=True) == [HOST]


def test_an_upgrade_that_is_let_through_is_asked_for_again() -> None:
    asked = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-key", b"k")]
    assert sent(*asked) == [HOST, (b"sec-websocket-key", b"k")]
    assert sent(*asked, upgrade=b"websocket") == [
        HOST,
        (b"sec-websocket-key", b"k"),
        (b"connection", b"upgrade"),
        (b"upgrade", b"websocket"),
    ]


def test_behind_the_backhaul_a_request_passes_as_its_edge_made_it() -> None:
    edge = EDGE.request([HOST, (b"accept", b"*/*")], b"01R-ams")
    backhaul = [(b"hawker-backhaul", b"token"), (b"hawker-app", b"web"), (b"connection", b"keep-alive")]
    assert inner_request([*edge, *backhaul]) == edge


def test_an_answer_on_the_backhaul_keeps_what_is_meant_for_the_edge_and_loses_what_only_proxies_say() -> None:
    fields = [(b"server", b"nginx"), (b"fly-replay", b"region=ord"), (b"hawker-load", b"0/1/1"), (b"keep-alive", b"1")]
    assert inner_answer(fields) == fields[:2]


APPS = [(b"content-type", b"text/html"), (b"server", b"nginx"), (b"via", b"1.0 app"), (b"set-cookie", b"a=b")]


def test_a_user_is_told_which_proxy_answered() -> None:
    assert sorted(Answer().fields(APPS, b"01R-ams")) == [
        (b"content-type", b"text/html"),
        (b"fly-request-id", b"01R-ams"),
        (b"server", b"hawker"),
        (b"set-cookie", b"a=b"),
        (b"via", b"1.0 app, 1.1 hawker"),
    ]


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP | TO_PROXIES | {b"hawker-load", b"hawker-elsewhere"}))
def test_a_user_never_sees_what_was_said_to_the_proxy(name: bytes) -> None:
    assert name not in dict(Answer().fields([(name, b"1")], b"1"))
    assert name not in dict(Answer(pristine=True).fields([(name, b"1")], b"1"))


def test_a_pristine_answer_has_nothing_of_the_proxy() -> None:
    found = Answer(pristine=True).fields([*APPS, *((name, b"x") for name in PRISTINE)], b"1")
    assert found == [(b"content-type", b"text/html"), (b"set-cookie", b"a=b")]


def test_a_service_sets_and_removes_fields_of_its_answers() -> None:
    answer = Answer(
        set_fields=[(b"set-cookie", b"c=d"), (b"set-cookie", b"e=f"), (b"x-frame-options", b"DENY")],
        removed=[b"content-type", b"via", b"fly-request-id"],
    )
    assert sorted(answer.fields(APPS, b"1")) == [
        (b"server", b"hawker"),
        (b"set-cookie", b"c=d"),
        (b"set-cookie", b"e=f"),
        (b"x-frame-options", b"DENY"),
    ]
    named = Answer(pristine=True, set_fields=[(b"server", b"mine")])
    assert named.fields(APPS, b"1") == [APPS[0], APPS[3], (b"server", b"mine")]


def test_an_answer_that_switches_protocols_says_so() -> None:
    fields = [(b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-accept", b"a")]
    assert inner_answer(fields, upgrade=b"websocket") == [fields[2], *fields[:2]]
    assert Answer(pristine=True).fields(fields, b"1", upgrade=b"websocket") == [fields[2], *fields[:2]]


def test_a_request_says_who_is_to_take_it() -> None:
    assert wishes_of([HOST]) is ANY
    assert wishes_of([(b"fly-force-instance-id", b" 00BB33FF ")]) == Wishes(force_machine="00bb33ff")
    assert wishes_of([(b"fly-prefer-instance-id", b"m"), (b"fly-prefer-region", b"iad, ORD,iad")]) == Wishes(
        prefer_machine="m", prefer_regions=("iad", "ord")
    )
    assert wishes_of([(b"fly-force-region", b'"ams,eu"')]) == Wishes(force_regions=("ams", "eu"))


def test_regions_come_in_a_comma_list() -> None:
    assert regions_of(" , ams,,ams , any") == ("ams", "any")
    assert regions_of("") == ()


def test_a_machine_learns_that_another_was_preferred() -> None:
    assert unavailable(ANY, "m") == ()
    assert unavailable(Wishes(prefer_machine="m"), "m") == ()
    assert unavailable(Wishes(prefer_machine="n"), "m") == ((b"fly-preferred-instance-unavailable", b"n"),)


NAMES = st.sampled_from(sorted(HOP_BY_HOP | OF_PROXIES | {b"x-forwarded-for", b"via", b"accept", b"x-a", b"hawker-a"}))
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=8) | st.sampled_from([b"x-a", b"via, accept", b"host"])))


@given(FIELDS)
def test_whatever_a_user_sends_the_proxys_own_fields_are_there_once_and_true(fields: list[Field]) -> None:
    found = EDGE.request([HOST, *fields], b"01R-ams")
    names = [name for name, _ in found]
    for name, value in EDGE.request([HOST], b"01R-ams"):
        assert names.count(name) == 1
        assert dict(found)[name] == value or (
            name in (b"via", b"x-forwarded-for") and dict(found)[name].endswith(value)
        )
    assert not HOP_BY_HOP & set(names)
    assert b"hawker-a" not in names
    assert inner_request(found) == found
