"""The page of the API, made from the declarations of its calls: `docs/api.md` holds it, and a test compares the two.

python -m hawker.http.api_page > docs/api.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from hawker.http.openapi import STATUS_TEXT, parameters, refusals
from hawker.model.app_calls import APP_CALLS
from hawker.model.calls import CALLS
from hawker.model.fleet_calls import FLEET_CALLS
from hawker.model.image_api import IMAGE_CALLS
from hawker.model.inside_api import INSIDE_CALLS
from hawker.model.machine_calls import MACHINE_CALLS
from hawker.model.op import Declared, StreamRequest, reply_of, summary_of
from hawker.model.request_codec import shape_of

_HEAD = """# The API

The HTTP API is the public Fly Machines API; what Hawker adds to it is marked *ours*. A market serves its description
for programs at `/openapi.json`. This page is made from the same declarations, which the server and the clients read,
by `python -m hawker.http.api_page > docs/api.md`.

Every call but `/health` and `/openapi.json` needs the header `Authorization: Bearer TOKEN`. `hawker dev` writes its
token into `client.json`; a broker's configuration names those of a fleet.

```sh
curl -H "Authorization: Bearer $HAWKER_TOKEN" http://127.0.0.1:4280/v1/apps
```

Python programs have two clients that send the requests below, one that blocks and one for asyncio. Replies have types,
which a type checker knows:

```python
from hawker.client.client import AsyncClient, Client
from hawker.model.machine_calls import CreateMachine, FollowLogs, StopMachine

with Client("http://127.0.0.1:4280", token) as client:
    order = CreateMachine("web", region="mad", config={"image": "nginx:1.29"}, wait=True)
    machine = client.send(order)
    with client.stream(FollowLogs("web", machine.id, follow=True)) as lines:
        for line in lines:
            print(line.message)

async with AsyncClient("http://127.0.0.1:4280", token) as client:
    await client.send(StopMachine("web", machine.id, timeout="30s"))
```

A refusal raises `ApiError`, of a stream before its first part; where no whole answer comes, a call raises
`Unreachable`. Over HTTP a refusal is JSON: `error` is a sentence, `status` a word for programs, `details` what else
there is to know, such as the `field`, the `value` and the `remedy` of a value that is not valid, or a `hint`. The
statuses mean:

| status | meaning |
|--:|---|
"""
_ROOMS = (
    ("Machines", MACHINE_CALLS),
    ("Inside a machine", INSIDE_CALLS),
    ("Apps", APP_CALLS),
    ("Regions, workers, runs, the catalog", FLEET_CALLS),
    ("Images", IMAGE_CALLS),
)


def page() -> str:
    """The whole page."""
    statuses = "\n".join(f"| {status} | {text} |" for status, text in STATUS_TEXT.items())
    told = {kind for _, calls in _ROOMS for kind in calls}
    rooms = [*_ROOMS, ("The rest", tuple(kind for kind in CALLS if kind not in told))]
    parts = [f"## {title}\n\n" + "\n".join(_call(kind) for kind in calls) for title, calls in rooms]
    return _HEAD + statuses + "\n\n" + "\n".join(parts)


def _call(kind: type[Declared[Any]]) -> str:
    op = kind.op
    summary, description = summary_of(kind)
    lines = [f"### {kind.__name__}", "", f"`{op.method} {op.path}`" + (" · *ours*" if op.extension else ""), ""]
    lines += [f"{summary}. {description}".rstrip(), ""]
    rows = [*_in_query(kind), *_in_body(kind)]
    if rows:
        lines += ["| field | in | type | meaning |", "|---|---|---|---|", *rows, ""]
    if op.example:
        lines += ["```json", msgspec.json.format(msgspec.json.encode(op.example), indent=0).decode(), "```", ""]
    each = ", bit by bit" if issubclass(kind, StreamRequest) else ""
    refused = ", ".join(map(str, refusals(kind)))
    lines += [f"Answers {op.success}: {_type_text(reply_of(kind))}{each}. Refuses with {refused}.", ""]
    return "\n".join(lines)


def _in_query(kind: type[Declared[Any]]) -> Iterable[str]:
    for each in parameters(kind):
        if each["in"] != "path":
            ours = " *ours*" if each.get("x-hawker-extension") else ""
            needed = " (needed)" if each["required"] else ""
            of = _schema_text(each["schema"])
            yield f"| `{each['name']}`{needed} | {each['in']} | {of} | {each.get('description', '')}{ours} |"


def _in_body(kind: type[Declared[Any]]) -> Iterable[str]:
    shape = shape_of(kind)
    if kind.op.raw:
        yield f"| `{kind.op.raw}` | body | bytes | the body as it is |"
    for field in msgspec.structs.fields(kind) if shape.body else ():
        if field.name in shape.in_body:
            schema = msgspec.json.schema(field.type)
            needed = " (needed)" if field.required else ""
            yield f"| `{field.encode_name}`{needed} | body | {_schema_text(schema)} | {schema.get('description', '')} |"


def _schema_text(schema: dict[str, Any]) -> str:
    if any_of := schema.get("anyOf"):
        return " or ".join(_schema_text(each) for each in any_of if each.get("type") != "null")
    if enum := schema.get("enum"):
        return " or ".join(f"`{value}`" for value in enum if value is not None)
    if reference := schema.get("$ref"):
        return str(reference).rpartition("/")[2]
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low} to {high}" if high is not None else f" from {low}" if low is not None else ""
    default = f", {schema['default']} if not given" if isinstance(schema.get("default"), int) else ""
    return f"{schema.get('type', 'JSON')}{bounds}{default}"


def _type_text(kind: Any) -> str:
    if kind is type(None):
        return "nothing"
    name = str(kind) if get_args(kind) else kind.__name__
    return "`" + re.sub(r"[\w.]+\.(\w+)", r"\1", name) + "`"


if __name__ == "__main__":
    print(page(), end="")
