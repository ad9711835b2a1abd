"""A declared request on the wire: `encode` gives the method, target, headers and body, `decode` the request again.

A query's text becomes what its field says: a flag that is there without a value is set, a list may be repeated or have
commas, a mapping `metadata` stands as `metadata.KEY=VALUE`. Raises `Invalid` with the field's name, value and remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import inf
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin
from urllib.parse import quote, urlencode

import msgspec
from msgspec import NODEFAULT

from hawker.errors import Invalid
from hawker.model.json_reading import read_json
from hawker.model.op import JSON, Declared

Q = TypeVar("Q", bound=Declared[Any])


class Encoded(NamedTuple):
    """A request as it travels. `headers` has the media type of a body, too."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Field(NamedTuple):
    """A field that stands in the query: `name` there, `bare` its type without None and annotations, `low` and `high`
    the bounds of a number."""

    attribute: str
    name: str
    bare: Any
    default: Any
    low: float
    high: float


class Shape(NamedTuple):
    """Where the fields of a kind of request stand. `body` is the struct of those in the body: the request's own where
    all of them are; None where there are none."""

    path: tuple[str, ...]
    query: tuple[Field, ...]
    headers: tuple[tuple[str, str], ...]
    body: type[msgspec.Struct] | None
    in_body: tuple[str, ...]


@cache
def shape_of(kind: type[Declared[Any]]) -> Shape:
    op = kind.op
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    headers = {**kind.common_headers, **op.headers}
    named = {*op.in_path, *op.query, *headers, *filter(None, [op.raw])}
    if strange := named - set(fields):
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(strange))}")
    rest = [name for name in fields if name not in named]
    in_query = [name for name in fields if name in op.query or name in op.either]
    if op.method in ("GET", "DELETE", "HEAD"):
        in_query, rest = [name for name in fields if name in in_query or name in rest], []
    body: type[msgspec.Struct] | None = None
    if len(rest) == len(fields) and rest:
        body = kind
    elif rest:
        parts = [(f.name, f.type, _same(f)) for f in fields.values() if f.name in rest]
        body = msgspec.defstruct(kind.__name__, parts, frozen=True, kw_only=True, omit_defaults=True)
        body.__doc__ = kind.__doc__
    query = tuple(_query_field(fields[name]) for name in in_query)
    return Shape(op.in_path, query, tuple(headers.items()), body, tuple(rest))


def encode(request: Declared[Any]) -> Encoded:
    op, shape = request.op, shape_of(type(request))
    target = op.path
    for name in shape.path:
        target = target.replace(f"{{{name}}}", quote(getattr(request, name), safe=""), 1)
    asked = [field for field in shape.query if field.attribute not in op.either]  # those travel in the body
    pairs = [pair for field in asked for pair in _pairs(field, getattr(request, field.attribute))]
    if pairs:
        target += "?" + urlencode(pairs)
    headers = {header: value for name, header in shape.headers if (value := getattr(request, name))}
    body = b""
    if op.raw:
        headers["content-type"] = "application/octet-stream"
        body = getattr(request, op.raw)
    elif shape.body is not None:
        headers["content-type"] = JSON
        whole = shape.body is type(request)
        inner = request if whole else shape.body(**{name: getattr(request, name) for name in shape.in_body})
        body = msgspec.json.encode(inner)
    return Encoded(op.method, target, headers, body)


def encode_each(requests: Sequence[Declared[Any]]) -> Encoded:
    """Many requests of one kind whose declaration says `batch`."""
    op = requests[0].op
    return Encoded(op.method, op.path, {"content-type": JSON}, msgspec.json.encode(requests))


def decode(
    kind: type[Q],
    path: Mapping[str, str],
    query: Iterable[tuple[str, str]] = (),
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> Q:
    """`path` has the values of the path's names, `headers` has lower-case names. An empty body reads as `{}`."""
    op, shape = kind.op, shape_of(kind)
    if shape.body is kind:
        return read_json(body or b"{}", kind)
    values: dict[str, Any] = {name: path[name] for name in shape.path}
    if shape.query:
        asked = list(query)
        for field in shape.query:
            values[field.attribute] = _from_query(field, asked)
    for name, header in shape.headers:
        values[name] = (headers or {}).get(header, "")
    if op.raw:
        values[op.raw] = body
    elif shape.body is not None:
        inner = read_json(body or b"{}", shape.body)
        for name in shape.in_body:
            if name not in op.either or getattr(inner, name) is not None:
                values[name] = getattr(inner, name)
    return kind(**values)


# --- the query -------------------------------------------------------------------------------------------------------


def _same(field: Any) -> Any:
    given = {"default": field.default, "default_factory": field.default_factory}
    return msgspec.field(name=field.encode_name, **{k: v for k, v in given.items() if v is not NODEFAULT})


def _query_field(field: Any) -> Field:
    bare, notes = bare_type(field.type)
    low = next((note.ge for note in notes if note.ge is not None), -inf)
    high = next((note.le for note in notes if note.le is not None), inf)
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    if default is NODEFAULT and bare is str:
        default = ""  # whoever reads it says what is to be given
    return Field(field.name, field.encode_name, bare, default, low, high)


def bare_type(kind: Any) -> tuple[Any, list[msgspec.Meta]]:
    """A type without its annotations and without None, and the annotations."""
    notes: list[msgspec.Meta] = []
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        notes += [note for note in more if isinstance(note, msgspec.Meta)]
    inner = [each for each in get_args(kind) if each is not NoneType] if NoneType in get_args(kind) else []
    if len(inner) == 1:
        bare, more_notes = bare_type(inner[0])
        return bare, [*notes, *more_notes]
    return kind, notes


def _pairs(field: Field, value: Any) -> list[tuple[str, str]]:
    if value is None or value == field.default:
        return []
    if isinstance(value, dict):
        return [(f"{field.name}.{key}", text) for key, text in value.items()]
    if isinstance(value, list | tuple):
        return [(field.name, each) for each in value]
    if isinstance(value, bool):
        return [(field.name, "true" if value else "false")]
    return [(field.name, str(value))]


def _from_query(field: Field, asked: Sequence[tuple[str, str]]) -> Any:
    if get_origin(field.bare) is dict:
        lead = f"{field.name}."
        return {name.removeprefix(lead): value for name, value in asked if name.startswith(lead)}
    values = [value for name, value in asked if name == field.name]
    if (several := get_origin(field.bare)) in (list, tuple):
        parts = [part for value in values for part in value.split(",") if part]
        return several(parts) if parts else field.default
    if field.bare is bool:
        return _flag(field, values[-1]) if values else field.default
    text = values[-1] if values else ""
    if field.bare is int:
        return _number(field, text)
    return text or field.default


def _flag(field: Field, text: str) -> bool:
    if text.lower() not in ("", "0", "1", "true", "false"):
        raise Invalid(field.name, text, "give true or false")
    return text.lower() in ("", "1", "true")


def _number(field: Field, text: str) -> Any:
    if not text and field.default is not NODEFAULT:
        return field.default
    bounds = f" from {field.low} to {field.high}" if field.high < inf else ""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not field.low <= value <= field.high:
        raise Invalid(field.name, text, f"give a whole number{bounds}")
    return value
