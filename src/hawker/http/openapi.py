"""The OpenAPI document of the public API, generated from the declarations of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, get_origin

import msgspec

from hawker import __version__
from hawker.model import api
from hawker.model.calls import CALLS
from hawker.model.op import BYTES, JSON, Declared, reply_of, summary_of
from hawker.model.request_codec import Shape, bare_type, shape_of

STATUS_TEXT = {
    400: "a value is not valid; the text names the field, the value and the remedy",
    401: "no token, or one that is not known",
    404: "no such app, machine or path",
    408: "the wait ended first",
    409: "held or changed by someone else, or no room",
    412: "the machine is in the wrong state for this",
    413: "the body is too large",
    422: "documented but not built here, or refused by validation",
    429: "more than this agent does at a time",
    500: "ours; nothing is half done",
    503: "it should get no traffic now; `reason` says why",
}


def document() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    shapes = {kind: shape_of(kind) for kind in CALLS}
    named = [t for kind, shape in shapes.items() for t in (shape.body, reply_of(kind), kind.op.also)]
    types = [t for t in dict.fromkeys([*named, api.Error]) if t not in (None, NoneType, bytes)]
    made_of, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, made_of, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for kind, shape in shapes.items():
        paths.setdefault(kind.op.path, {})[kind.op.method.lower()] = _operation(kind, shape, schemas)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Hawker Machines API",
            "version": __version__,
            "description": "The public Machines API, self-hosted. Hawker's own additions carry x-hawker-extension.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
    # A tuple that is a default becomes the list that readers of the document decode.
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return read


def _operation(kind: type[Declared[Any]], shape: Shape, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    op, reply = kind.op, reply_of(kind)
    summary, description = summary_of(kind)
    success: dict[str, Any] = {"description": summary}
    if reply in schemas:
        schema = {"anyOf": [schemas[reply], schemas[op.also]]} if op.also else schemas[reply]
        success["content"] = {op.media: {"schema": schema}}
    responses = {str(op.success): success}
    if op.name == "Apps_delete":
        responses["200"] = success  # a machine's id in the app's place
    error = {JSON: {"schema": schemas[api.Error]}}
    for status in refusals(kind):
        responses[str(status)] = {"description": STATUS_TEXT[status], "content": error}
    if op.name == "Health":
        responses["503"]["content"] = success["content"]
    operation: dict[str, Any] = {
        "operationId": op.name,
        "summary": summary,
        "parameters": parameters(kind),
        "responses": responses,
    }
    if description:
        operation["description"] = description
    if shape.body is not None:
        content: dict[str, Any] = {"schema": schemas[shape.body]}
        if op.example:
            content["example"] = op.example
        required = any(field.required for field in msgspec.structs.fields(shape.body))
        operation["requestBody"] = {"required": required, "content": {JSON: content}}
    if op.raw:
        operation["requestBody"] = {"required": True, "content": {BYTES: {"schema": {}}}}
    if op.extension:
        operation["x-hawker-extension"] = True
    if op.path in ("/health", "/openapi.json"):
        operation["security"] = []
    return operation


def refusals(kind: type[Declared[Any]]) -> list[int]:
    """The statuses of the refusals that a call may have."""
    op = kind.op
    statuses = {400, 401, *op.refuses}
    if op.in_path:
        statuses.add(404)
    if op.raw or shape_of(kind).body is not None:
        statuses.add(413)
    return sorted(statuses - {op.success})


def parameters(kind: type[Declared[Any]]) -> list[dict[str, Any]]:
    """The parameters of the path, the query and the headers. A mapping such as `metadata` is left out: its caller
    chooses the names."""
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in kind.op.in_path
    ]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for each in shape_of(kind).query:
        if get_origin(each.bare) is not dict:
            found.append(_parameter(each.name, "query", fields[each.attribute], each.bare))
    found += [_parameter(header, "header", fields[name], str) for name, header in shape_of(kind).headers]
    return found


def _parameter(name: str, place: str, field: Any, bare: Any) -> dict[str, Any]:
    _, notes = bare_type(field.type)
    is_list = get_origin(bare) is tuple  # separated by commas
    schema = msgspec.json.schema(str if is_list else Annotated[bare, *notes] if notes else bare)
    made: dict[str, Any] = {"name": name, "in": place, "required": field.required, "schema": schema}
    for key in ("description", "x-hawker-extension"):
        if key in schema:
            made[key] = schema.pop(key)
    if is_list and notes:
        made["description"] = notes[0].description
    if isinstance(field.default, int) and not isinstance(field.default, bool):
        schema["default"] = field.default
    return made
