"""What a request waited for, as spans."""

from __future__ import annotations

import json

import pytest

from hawker.core.tracing import Mark, Parent, Span, otlp, parent_of, path_of, spans_of

FIELD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARENT = Parent("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)
WALL_NS = 1_795_302_297_000_000_000


def woken(*, edge: bool = True, parent: Parent | None = None, proxy: str = "e1") -> list[Span]:
    """Of a request that came at 10.0 and was answered at 10.5, whose machine had begun to start for another one."""
    marks = [Mark("obtain", 10.0, 10.3, {"wait": 0.3, "start": 0.2, "ready": 0.25}), Mark("connect", 10.3, 10.4)]
    return spans_of(
        b"r1",
        parent,
        edge=edge,
        proxy=proxy,
        begun=10.0,
        first=10.5,
        ended=10.5,
        marks=marks,
        wall_ns=WALL_NS,
        attributes={"http.response.status_code": 200},
        failed=False,
    )


def test_each_phase_is_a_span_where_it_lay_in_time() -> None:
    request = woken()[0]
    assert [(span.name, (span.begun_ns - request.begun_ns) / 1e9, span.ended_ns - WALL_NS) for span in woken()] == [
        ("request", 0.0, 0),
        ("obtain", 0.0, -200_000_000),
        ("ready", pytest.approx(0.05), -200_000_000),
        ("start", 0.0, -450_000_000),  # what of it this request waited for
        ("connect", pytest.approx(0.3), -100_000_000),
        ("answer", pytest.approx(0.4), 0),
    ]


def test_the_parts_of_a_phase_are_below_it_and_all_else_below_the_request() -> None:
    request, obtain, *others = woken()
    assert [(span.name, span.parent) for span in (obtain, *others)] == [
        ("obtain", request.id),
        ("ready", obtain.id),
        ("start", obtain.id),
        ("connect", request.id),
        ("answer", request.id),
    ]


def test_every_span_has_an_id_of_its_own_at_every_proxy_and_the_trace_is_one() -> None:
    spans = [*woken(), *woken(edge=False, proxy="w1"), *woken(edge=False, proxy="w2")]
    assert len({span.id for span in spans}) == len(spans)
    assert len({span.trace for span in spans}) == 1


def test_what_other_proxies_do_is_below_the_edge() -> None:
    assert woken()[0].parent == ""
    assert woken(edge=False)[0].parent == woken()[0].id


def test_a_user_who_traces_finds_the_request_below_its_own_span() -> None:
    assert (woken(parent=PARENT)[0].trace, woken(parent=PARENT)[0].parent) == (PARENT.trace, PARENT.span)
    assert woken(edge=False, parent=PARENT)[0].parent == woken(parent=PARENT)[0].id


@pytest.mark.parametrize(
    ("field", "parent"),
    [
        (FIELD, PARENT),
        (FIELD[:-2] + b"00", Parent(PARENT.trace, PARENT.span, sampled=False)),
        (b"cc" + FIELD[2:] + b"-later", PARENT),
        (FIELD + b"-later", None),
        (b"ff" + FIELD[2:], None),
        (FIELD.upper(), None),
        (b"00-" + b"0" * 32 + FIELD[35:], None),
        (FIELD[:36] + b"0" * 16 + b"-01", None),
        (b"", None),
    ],
)
def test_traceparent_is_read_as_w3c_says(field: bytes, parent: Parent | None) -> None:
    assert parent_of(field) == parent


def test_no_query_is_told() -> None:
    assert path_of(b"/a/b?token=1") == "/a/b"


def test_a_span_is_told_as_otlp_has_it_in_json() -> None:
    span = Span(PARENT.trace, "00f067aa0ba902b7", PARENT.span, "request", 2, 1, 2, {"a": "b", "n": 3}, failed=True)
    told = json.loads(otlp([span], {"service.name": "hawker-proxy"}))
    assert told == {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "hawker-proxy"}}]},
                "scopeSpans": [
                    {
                        "scope": {"name": "hawker"},
                        "spans": [
                            {
                                "traceId": PARENT.trace,
                                "spanId": "00f067aa0ba902b7",
                                "parentSpanId": PARENT.span,
                                "name": "request",
                                "kind": 2,
                                "startTimeUnixNano": "1",
                                "endTimeUnixNano": "2",
                                "attributes": [
                                    {"key": "a", "value": {"stringValue": "b"}},
                                    {"key": "n", "value": {"intValue": "3"}},
                                ],
                                "status": {"code": 2},
                            }
                        ],
                    }
                ],
            }
        ]
    }
