"""Every call of the public API, as declared: the routes, the checks of their input, the clients' calls, the OpenAPI
document and `docs/api.md` follow from these.

A broker answers some itself, passes on to the worker that owns a machine what is about that machine, and any agent
answers some for itself. What Hawker adds to the public API is marked `extension`.
"""

from __future__ import annotations

from typing import Any

from hawker.model import api
from hawker.model.agent_calls import ShowHealth
from hawker.model.app_calls import APP_CALLS
from hawker.model.fleet_calls import FLEET_CALLS
from hawker.model.image_api import IMAGE_CALLS
from hawker.model.inside_api import INSIDE_CALLS
from hawker.model.machine_calls import MACHINE_CALLS
from hawker.model.op import Declared, Op, Request
from hawker.model.unbuilt_calls import UNBUILT_CALLS


class ShowOpenApi(Request[dict[str, Any]]):
    """This document."""

    op = Op("OpenAPI", "GET", "/openapi.json", served="broker")


class FindMachine(Request[api.Machine], kw_only=False):
    """Get a machine by its id alone, as in the original article: what `ShowApp` is with an id in the app's place."""

    op = Op("Article_show", "GET", "/v1/apps/{machine_id}", served="broker")
    machine_id: str


CALLS: tuple[type[Declared[Any]], ...] = (
    *MACHINE_CALLS,
    *APP_CALLS,
    *FLEET_CALLS,
    *INSIDE_CALLS,
    *IMAGE_CALLS,
    *UNBUILT_CALLS,
    ShowOpenApi,
    ShowHealth,
)
