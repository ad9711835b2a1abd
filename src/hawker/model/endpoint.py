"""What an endpoint of the public API is, as data: `hawker.model.endpoints` lists them all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Served = Literal["broker", "worker", "any"]


class Query(msgspec.Struct, frozen=True):
    """A query parameter: its JSON schema type and meaning."""

    name: str
    schema: dict[str, Any]
    doc: str = ""
    required: bool = False
    extension: bool = False


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. `statuses` are the refusals it may answer beside 401; 400 and 404 are added where they apply."""

    op: str
    method: str
    path: str
    summary: str
    served: Served
    body: Any = None
    body_required: bool = True
    reply: Any = None
    also: Any = None  # another form of the reply, for the article's paths where a machine's id stands for an app
    success: int = 200
    query: tuple[Query, ...] = ()
    statuses: tuple[int, ...] = ()
    extension: bool = False
    media: str = "application/json"
    raw_body: bool = False  # bytes as they are, no JSON


# --- what several endpoints take -------------------------------------------------------------------------------------

STRING = {"type": "string"}
BOOL = {"type": "boolean"}
APP = "/v1/apps/{app_name}"
MACHINES = f"{APP}/machines"
MACHINE = f"{MACHINES}/{{machine_id}}"
WAIT_START = Query(
    "wait", BOOL, "answer only once the machine is started or has failed to start, or after a minute", extension=True
)
