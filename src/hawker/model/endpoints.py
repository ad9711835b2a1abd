"""Every endpoint of the public API as data: the routes, the checks of their input and the OpenAPI document follow
from it.

`served` says who answers: the broker itself; the worker that owns the machine, to which the broker passes the request
on as it came; or any agent for itself. What Hawker adds to the public API is marked `extension`.
"""

from __future__ import annotations

from typing import Any

from hawker.model import api
from hawker.model.app_endpoints import APP_ENDPOINTS
from hawker.model.endpoint import Endpoint, Query
from hawker.model.fleet_endpoints import FLEET_ENDPOINTS
from hawker.model.image_endpoints import IMAGE_ENDPOINTS
from hawker.model.inside_api import INSIDE_ENDPOINTS
from hawker.model.machine_endpoints import MACHINE_ENDPOINTS
from hawker.model.unbuilt_endpoints import UNBUILT_ENDPOINTS

__all__ = ["ENDPOINTS", "Endpoint", "Query"]

ENDPOINTS: tuple[Endpoint, ...] = (
    *MACHINE_ENDPOINTS,
    *APP_ENDPOINTS,
    *FLEET_ENDPOINTS,
    *INSIDE_ENDPOINTS,
    *IMAGE_ENDPOINTS,
    *UNBUILT_ENDPOINTS,
    Endpoint(
        op="OpenAPI",
        method="GET",
        path="/openapi.json",
        summary="This document",
        served="broker",
        reply=dict[str, Any],
    ),
    Endpoint(
        op="Health",
        method="GET",
        path="/health",
        summary="Whether this agent should get traffic",
        served="any",
        reply=api.Health,
        statuses=(503,),
    ),
)
