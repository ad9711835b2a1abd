"""What a request waited for, as spans of a trace, in the JSON of OTLP (OpenTelemetry Protocol 1.x, over HTTP).

All proxies that a request passes add to one trace and need not tell each other anything: they derive its ids from the
request id that the edge gave, or from the W3C `traceparent` that the user sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import msgspec

Value = str | int

INTERNAL = 1
SERVER = 2
_FAILED = {"code": 2}
_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_PATH_MOST = 256
PARENT_LENGTH = 55
"""The length of a `traceparent` of version 0. Later versions may append more."""

_encode = msgspec.json.Encoder().encode


class Mark(msgspec.Struct, frozen=True):
    """A finished phase of a request. Times are of one clock, in seconds. `within` maps the parts of the phase, in their
    order, to their seconds; the last part ends with the phase."""

    phase: str
    begun: float
    ended: float
    within: Mapping[str, float] = {}


class Parent(msgspec.Struct, frozen=True):
    """What `traceparent` says, in hexadecimal digits."""

    trace: str
    span: str
    sampled: bool


class Span(msgspec.Struct, frozen=True):
    """Times are nanoseconds since 1970, ids hexadecimal digits; `parent` is "" where there is none."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Value] = {}
    failed: bool = False


def parent_of(field: bytes) -> Parent | None:
    """A `traceparent` (W3C Trace Context, 3.2); None for one that has to be ignored."""
    found = _PARENT.fullmatch(field)
    if found is None or (field.startswith(b"00-") and len(field) != PARENT_LENGTH):
        return None
    return Parent(found[1].decode(), found[2].decode(), bool(int(found[3], 16) & 1))


def spans_of(
    request_id: bytes,
    parent: Parent | None,
    *,
    edge: bool,
    proxy: str,
    begun: float,
    first: float,
    ended: float,
    marks: Iterable[Mark],
    wall_ns: int,
    attributes: Mapping[str, Value],
    failed: bool,
) -> list[Span]:
    """The spans of one request at the proxy named `proxy`. `first` is when the first byte of the answer came, 0 if none
    did; `wall_ns` is the wall time at `ended`. The spans of other proxies are below those of the `edge`."""
    trace = parent.trace if parent else _digits(b"trace", request_id, 32)
    at_edge = _digits(b"edge", request_id, 16)
    root = at_edge if edge else _digits(proxy.encode(), request_id, 16)
    above = (parent.span if parent else "") if edge else at_edge

    def ns(at: float) -> int:
        return wall_ns - round((ended - at) * 1e9)

    spans = [Span(trace, root, above, "request", SERVER, ns(begun), wall_ns, attributes, failed)]

    def add(name: str, begun: float, ended: float, above: str = root) -> str:
        span = _digits(b"%s %d" % (root.encode(), len(spans)), request_id, 16)
        spans.append(Span(trace, span, above, name, INTERNAL, ns(begun), ns(ended)))
        return span

    last = begun
    for mark in marks:
        of_phase = add(mark.phase, mark.begun, mark.ended)
        at = mark.ended
        for name, seconds in reversed(list(mark.within.items())):
            # A part may have begun before this request came; only this request's own wait is shown.
            since = max(at - seconds, mark.begun)
            if since < at:
                add(name, since, at, of_phase)
            at = since
        last = mark.ended
    if first > last:
        add("answer", last, first)
    return spans


def path_of(target: bytes) -> str:
    """The path without the query, which may contain secrets."""
    return target.partition(b"?")[0][:_PATH_MOST].decode("latin-1")


def otlp(spans: Iterable[Span], resource: Mapping[str, Value]) -> bytes:
    """The body of a POST to a collector's `/v1/traces`."""
    scope = {"scope": {"name": "hawker"}, "spans": [_span(span) for span in spans]}
    return _encode({"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]})


def _span(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.begun_ns),  # 64 bits are strings in the JSON of protocol buffers
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent:
        found["parentSpanId"] = span.parent
    if span.failed:
        found["status"] = _FAILED
    return found


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]


def _digits(what: bytes, request_id: bytes, count: int) -> str:
    """An id that every proxy on the request's way computes alike."""
    return sha256(b"%b of %b" % (what, request_id)).hexdigest()[:count]
