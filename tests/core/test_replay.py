"""What an app's answer says about another machine that is to take its request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawker.core.forwarding import Field
from hawker.core.replay import (
    BadReplay,
    Remember,
    Replay,
    Transform,
    failed_field,
    read_json,
    replay_of,
    source_field,
)
from hawker.core.routing import Wishes


def said(text: str, **cache: str) -> Replay:
    fields = [(f"fly-replay-cache{name}".replace("_", "-").encode(), value.encode()) for name, value in cache.items()]
    found = replay_of([(b"content-type", b"text/html"), (b"fly-replay", text.encode()), *fields])
    assert found is not None
    return found


def in_json(**fields: Any) -> Replay:
    return read_json(json.dumps(fields).encode())


FORMS = [
    ("region=sjc", {"region": "sjc"}, Replay(regions=("sjc",))),
    ('region="iad,ord,us,na"', {"region": "iad,ord,us,na"}, Replay(regions=("iad", "ord", "us", "na"))),
    ("region=iad, ord", {"region": "iad, ord"}, Replay(regions=("iad", "ord"))),
    ("instance=00bb33ff", {"instance": "00bb33ff"}, Replay(instance="00bb33ff")),
    ("prefer_instance=00bb33ff", {"prefer_instance": "00bb33ff"}, Replay(prefer_instance="00bb33ff")),
    ("app=other", {"app": "other"}, Replay(app="other")),
    ("elsewhere=true", {"elsewhere": True}, Replay(elsewhere=True)),
    (
        'region="sjc,any";app=other;state=a=b&c',
        {"region": "sjc,any", "app": "other", "state": "a=b&c"},
        Replay(regions=("sjc", "any"), app="other", state="a=b&c"),
    ),
    (
        " Region = ord ; elsewhere=TRUE; timeout=1m30s;fallback=prefer_self; ",
        {"region": "ord", "elsewhere": True, "timeout": "1m30s", "fallback": "prefer_self"},
        Replay(regions=("ord",), elsewhere=True, timeout_s=90.0, fallback="prefer_self"),
    ),
]


@pytest.mark.parametrize(("text", "fields", "meant"), FORMS)
def test_a_replay_is_a_header_or_json(text: str, fields: dict[str, Any], meant: Replay) -> None:
    assert said(text) == meant
    assert in_json(**fields) == meant


def test_an_answer_without_the_field_is_none() -> None:
    assert replay_of([(b"fly-replay-cache", b"/*"), (b"content-type", b"text/html")]) is None


def test_a_replay_says_who_is_to_take_the_request() -> None:
    assert Replay(regions=("ord", "any")).wishes("me") == Wishes(force_regions=("ord", "any"))
    assert Replay(instance="m1").wishes("me") == Wishes(force_machine="m1")
    assert Replay(prefer_instance="m1", elsewhere=True).wishes("me") == Wishes(prefer_machine="m1", not_machine="me")


def test_a_replay_that_fails_goes_back_to_where_its_fallback_says() -> None:
    assert Replay(instance="m1").fallback_wishes("me") is None
    assert Replay(instance="m1", fallback="force_self").fallback_wishes("me") == Wishes(force_machine="me")
    assert Replay(instance="m1", fallback="prefer_self").fallback_wishes("me") == Wishes(prefer_machine="me")


def test_a_transform_changes_the_request_before_it_is_replayed() -> None:
    replay = in_json(
        app="other",
        transform={
            "path": "/new/path?param=value",
            "delete_headers": ["X-Unwanted", "cookie", "Host"],
            "set_headers": [{"name": "Authorization", "value": "Bearer t"}, {"name": "x-new", "value": "1"}],
        },
    )
    fields = [(b"host", b"a"), (b"cookie", b"1"), (b"authorization", b"old"), (b"x-unwanted", b"2"), (b"accept", b"*")]
    assert replay.transform.apply(b"/old", fields) == (
        b"/new/path?param=value",
        [(b"host", b"a"), (b"accept", b"*"), (b"authorization", b"Bearer t"), (b"x-new", b"1")],
    )
    assert Transform().apply(b"/old", fields) == (b"/old", fields)


def test_a_replay_says_for_how_long_and_for_which_paths_it_holds() -> None:
    one = Remember(prefix="/some/path", ttl_s=60)
    assert said("app=b", **{"": "/some/path/*", "_ttl_secs": "60"}).remember == one
    assert in_json(app="b", cache={"prefix": "/some/path/*", "ttl": 60}).remember == one
    assert said("app=b", **{"": "/some/path", "_ttl_secs": "60"}).remember == one
    assert said("app=b", **{"": "/some/path/", "_ttl_secs": "60"}).remember == one
    assert said("app=b", **{"": "/", "_ttl_secs": "60"}).remember == Remember(prefix="", ttl_s=60)
    other = Remember(prefix="", domain="example.com", ttl_s=10, allow_bypass=True)
    assert said("app=b", **{"": "Example.com/*", "_ttl_secs": "10", "_allow_bypass": "yes"}).remember == other
    assert in_json(app="b", cache={"prefix": "Example.com/*", "ttl": 10}, allow_bypass=True).remember == other
    gone = Remember(invalidate=True)
    assert said("app=b", **{"": "invalidate"}).remember == gone
    assert in_json(app="b", cache={"invalidate": True}).remember == gone


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not say where to"),
        ("state=x", "does not say where to"),
        ("elsewhere=false", "does not say where to"),
        ("sjc", "not of the form"),
        ("region=sjc;;ord", "not of the form"),
        ("regoin=sjc", "regoin is not known; use region"),
        ("region=sjc;region=ord", "given twice"),
        ("region=sjc;timeout=10", "write a duration"),
        ("region=sjc;fallback=self", "use force_self or prefer_self"),
        ("instance=a\x01b", "control characters"),
    ],
)
def test_a_header_that_is_not_understood_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(BadReplay, match=why):
        said(text)


def test_two_headers_contradict_each_other() -> None:
    with pytest.raises(BadReplay, match="given twice"):
        replay_of([(b"fly-replay", b"region=a"), (b"fly-replay", b"region=b")])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "does not say where to"),
        ({"app": 1}, "Expected `str"),
        ({"ap": "b"}, "unknown field `ap`"),
        ({"app": "b", "state": "a\r\nx: y"}, "control characters"),
        ({"app": "b", "transform": {"path": "new"}}, "is no path"),
        ({"app": "b", "transform": {"path": "/a b"}}, "is no path"),
        ({"app": "b", "transform": {"path": "/a\r\nx"}}, "is no path"),
        ({"app": "b", "transform": {"delete_headers": ["a b"]}}, "no header that an app may"),
        (
            {"app": "b", "transform": {"set_headers": [{"name": "Content-Length", "value": "1"}]}},
            "no header that an app",
        ),
        ({"app": "b", "transform": {"set_headers": [{"name": "upgrade", "value": "1"}]}}, "no header that an app may"),
        ({"app": "b", "transform": {"set_headers": [{"name": "x", "value": "1\r\ny: 2"}]}}, "control characters"),
        ({"app": "b", "cache": {"prefix": "/a/*", "ttl": 9}}, "give 10 or more"),
        ({"app": "b", "cache": {"prefix": "a", "ttl": 10}}, "is no path"),
        ({"app": "b", "cache": {"prefix": "a.example:80/*", "ttl": 10}}, "is no path"),
        ({"app": "b", "state": "s", "cache": {"prefix": "/*", "ttl": 10}}, "neither a state nor a transform"),
        ({"app": "b", "transform": {"path": "/a"}, "cache": {"prefix": "/*", "ttl": 10}}, "neither a state nor"),
    ],
)
def test_json_that_is_not_understood_is_refused_with_the_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadReplay, match=why):
        in_json(**fields)


def test_the_target_is_told_where_a_request_comes_from() -> None:
    name, value = source_field(Replay(app="b", state="s=1"), "m1", "ord", 1700000000000000)
    assert (name, value) == (b"fly-replay-src", b"instance=m1;region=ord;t=1700000000000000;state=s=1")
    assert source_field(Replay(app="b"), "m1", "ord", 1)[1] == b"instance=m1;region=ord;t=1"


def test_the_origin_is_told_why_its_replay_failed() -> None:
    replay = Replay(prefer_instance="m2", app="b", regions=("ord", "any"), fallback="force_self")
    assert failed_field(replay, "m1", "timeout", 1500) == (
        b"fly-replay-failed",
        b'instance=m2;app=b;region="ord,any";replay_source=m1;reason=timeout;elapsed_ms=1500',
    )


PIECES = st.sampled_from(
    ["region", "instance", "state", "elsewhere", "=", ";", '"', ",", " ", "ord", "true", "10s", "\u00e9"]
)


@given(st.lists(PIECES, max_size=12).map("".join).map(str.encode) | st.binary(max_size=30))
def test_any_header_is_understood_or_refused(value: bytes) -> None:
    fields: list[Field] = [(b"fly-replay", value)]
    try:
        replay = replay_of(fields)
    except BadReplay:
        return
    assert replay is not None
    for _, told in (source_field(replay, "m", "ord", 1), failed_field(replay, "m", "timeout", 1)):
        assert not {b"\r"[0], b"\n"[0], 0} & set(told)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["10s", "/a/*", "force_self"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["path", "set_headers", "name", "value", "prefix", "ttl"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = ["region", "instance", "app", "state", "elsewhere", "timeout", "fallback", "transform", "cache", "allow_bypass"]


@given(st.dictionaries(st.sampled_from(KEYS), VALUES).map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_any_json_is_understood_or_refused(body: bytes) -> None:
    try:
        replay = read_json(body)
    except BadReplay:
        return
    assert isinstance(replay, Replay)
