"""The OpenAPI document of the public API, generated from its endpoints and the structs of its bodies."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from hawker import __version__
from hawker.model import api
from hawker.model.endpoints import ENDPOINTS, Endpoint

_STATUS_TEXT = {
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
    types = [t for e in ENDPOINTS for t in (e.body, e.reply, e.also) if t is not None] + [api.Error]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refs = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        body = next(refs) if endpoint.body is not None else None
        answer = next(refs) if endpoint.reply is not None else None
        if endpoint.also is not None:
            answer = {"anyOf": [answer, next(refs)]}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, body, answer)
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
    # As whoever reads it decodes it: a tuple that is a default is a list there.
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return read


def _operation(endpoint: Endpoint, body: Any, answer: Any) -> dict[str, Any]:
    success: dict[str, Any] = {"description": endpoint.summary}
    if answer is not None:
        success["content"] = {endpoint.media: {"schema": answer}}
    responses = {str(endpoint.success): success}
    if endpoint.op == "Apps_delete":
        responses["200"] = success  # a machine's id in the app's place
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status in _refusals(endpoint):
        responses[str(status)] = {"description": _STATUS_TEXT[status], "content": error}
    if endpoint.op == "Health":
        responses["503"]["content"] = success["content"]
    operation: dict[str, Any] = {
        "operationId": endpoint.op,
        "summary": endpoint.summary,
        "parameters": _parameters(endpoint),
        "responses": responses,
    }
    if body is not None:
        operation["requestBody"] = {
            "required": endpoint.body_required,
            "content": {"application/json": {"schema": body}},
        }
    if endpoint.raw_body:
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
    if endpoint.extension:
        operation["x-hawker-extension"] = True
    if endpoint.path in ("/health", "/openapi.json"):
        operation["security"] = []
    return operation


def _refusals(endpoint: Endpoint) -> list[int]:
    statuses = {400, 401, *endpoint.statuses}
    if "{" in endpoint.path:
        statuses.add(404)
    if endpoint.body is not None or endpoint.raw_body:
        statuses.add(413)
    return sorted(statuses - {endpoint.success})


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    for query in endpoint.query:
        parameter = {"name": query.name, "in": "query", "required": query.required, "schema": query.schema}
        if query.doc:
            parameter["description"] = query.doc
        if query.extension:
            parameter["x-hawker-extension"] = True
        found.append(parameter)
    return found
