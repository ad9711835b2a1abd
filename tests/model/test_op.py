"""A call is declared once: what a client encodes is what a server decodes, and both know the reply's type."""

from __future__ import annotations

import string
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from hawker.errors import Invalid
from hawker.model.json_reading import read_each
from hawker.model.op import BYTES, Declared, Op, Request, StreamRequest, reply_of, summary_of
from hawker.model.request_codec import Encoded, decode, encode, encode_each


class Done(msgspec.Struct):
    at: int


class OfThing(Request[Any], kw_only=False):
    app: str
    thing: str


class Find(OfThing):
    """Find
    a thing.

    Wherever it is.
    """

    op = Op("Things_find", "GET", "/v1/apps/{app}/things/{thing}", headers={"nonce": "x-nonce"})

    deep: bool = False
    limit: Annotated[int, Meta(ge=1, le=50)] = 20
    since: str = msgspec.field(default="", name="from")
    state: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    nonce: str = ""


class Change(Request[Done]):
    op = Op("Things_change", "POST", "/v1/things/{thing}", query=("wait",), either=("ttl",))

    thing: str
    config: dict[str, Any]
    signal: str | int | None = None
    ttl: int | None = None
    wait: bool = False


class Send(Request[None]):
    op = Op("Things_send", "PUT", "/v1/things/{thing}", query=("offset",), raw="data")

    thing: str
    offset: Annotated[int, Meta(ge=0)]
    data: bytes


class Wanted(Request[Done | None]):
    op = Op("offers", "POST", "/v1/market/offers", callers="agents", batch=True)

    app: str
    size: Annotated[int, Meta(ge=1)] = 1


class Follow(StreamRequest[Done]):
    """Follow all."""

    op = Op("Things_follow", "GET", "/v1/follow", media=BYTES)


def received(kind: type[Declared[Any]], sent: Encoded) -> Any:
    """What the server makes of it: the path's values as a router finds them."""
    url = urlsplit(sent.target)
    template, parts = kind.op.path.split("/"), url.path.split("/")
    assert len(template) == len(parts)
    path = {name.strip("{}"): unquote(part) for name, part in zip(template, parts, strict=True) if name.startswith("{")}
    return decode(kind, path, parse_qsl(url.query, keep_blank_values=True), sent.headers, sent.body)


NAMES = st.text(min_size=1)
WORDS = st.text(string.ascii_letters + "-_ü ", min_size=1)
TEXTS = st.text()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
REQUESTS = st.one_of(
    st.builds(
        Find,
        NAMES,
        NAMES,
        deep=st.booleans(),
        limit=st.integers(1, 50),
        since=TEXTS,
        state=st.lists(WORDS).map(tuple),
        labels=st.dictionaries(WORDS, TEXTS),
        nonce=TEXTS,
    ),
    st.builds(
        Change,
        thing=NAMES,
        config=st.dictionaries(TEXTS, JSON, max_size=3),
        signal=st.none() | TEXTS | st.integers(0, 64),
        ttl=st.none() | st.integers(0, 99),
        wait=st.booleans(),
    ),
    st.builds(Send, thing=NAMES, offset=st.integers(0, 2**60), data=st.binary()),
    st.builds(Wanted, app=TEXTS, size=st.integers(1, 9)),
    st.builds(Follow),
)


@given(REQUESTS)
def test_what_is_decoded_is_what_was_encoded(request: Declared[Any]) -> None:
    assert received(type(request), encode(request)) == request


def test_each_field_stands_where_its_declaration_says() -> None:
    found = encode(Find("a/b", "t", deep=True, state=("x", "y"), labels={"k": "v w"}, since="7", nonce="n"))
    assert found == (
        "GET",
        "/v1/apps/a%2Fb/things/t?deep=true&from=7&state=x&state=y&labels.k=v+w",
        {"x-nonce": "n"},
        b"",
    )
    changed = encode(Change(thing="t", config={"a": 1}, wait=True, ttl=5))
    assert changed.target == "/v1/things/t?wait=true"
    assert msgspec.json.decode(changed.body) == {"config": {"a": 1}, "ttl": 5}
    assert encode(Send(thing="t", offset=4, data=b"\0")).body == b"\0"


def test_a_flag_without_a_value_is_set_and_a_list_may_have_commas() -> None:
    path = {"app": "a", "thing": "t"}
    assert decode(Find, path, [("deep", ""), ("state", "x,y"), ("state", "z")]) == Find(
        "a", "t", deep=True, state=("x", "y", "z")
    )
    assert decode(Find, path, [("deep", "0"), ("limit", "")]) == Find("a", "t")


def test_what_may_stand_in_body_or_query_is_taken_from_the_body_first() -> None:
    assert decode(Change, {"thing": "t"}, [("ttl", "3")], {}, b'{"config": {}}').ttl == 3
    assert decode(Change, {"thing": "t"}, [("ttl", "3")], {}, b'{"config": {}, "ttl": 4}').ttl == 4


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ([("deep", "maybe")], 'deep: "maybe" is not valid: give true or false'),
        ([("limit", "51")], 'limit: "51" is not valid: give a whole number from 1 to 50'),
        ([("limit", "x")], 'limit: "x" is not valid: give a whole number from 1 to 50'),
    ],
)
def test_an_error_names_the_parameter_its_value_and_the_remedy(query: list[tuple[str, str]], text: str) -> None:
    with pytest.raises(Invalid) as refused:
        decode(Find, {"app": "a", "thing": "t"}, query)
    assert refused.value.message == text


def test_an_error_in_the_body_names_its_field() -> None:
    with pytest.raises(Invalid, match="config") as refused:
        decode(Change, {"thing": "t"}, [], {}, b'{"config": 5}')
    assert refused.value.field == "config"
    with pytest.raises(Invalid, match="missing required field `config`"):
        decode(Change, {"thing": "t"})
    with pytest.raises(Invalid, match="offset"):
        decode(Send, {"thing": "t"}, [], {}, b"")


@given(st.lists(st.builds(Wanted, app=TEXTS, size=st.integers(1, 9)), min_size=1))
def test_a_batch_is_read_item_by_item(requests: list[Wanted]) -> None:
    sent = encode_each(requests)
    assert read_each(sent.body, Wanted) == requests
    good, bad = read_each(b'[{"app": "a"}, {"app": "b", "size": 0}]', Wanted)
    assert good == Wanted(app="a")
    assert isinstance(bad, Invalid)


def test_a_declaration_says_its_reply_and_what_it_is_for() -> None:
    assert reply_of(Change) is Done
    assert reply_of(Send) is type(None)
    assert reply_of(Wanted) == Done | None
    assert reply_of(Follow) is Done
    assert summary_of(Find) == ("Find a thing", "Wherever it is.")
    assert (Change.op.permission, Wanted.op.callers) == ("things:change", "agents")


def test_a_declaration_that_names_a_field_it_lacks_is_refused() -> None:
    class Wrong(Request[None]):
        op = Op("Wrong", "GET", "/v1/{thing}")

    with pytest.raises(TypeError, match="Wrong has no field thing"):
        encode(Wrong())
