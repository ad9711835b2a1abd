"""Runs fly-python-sdk on request: one JSON object a line in, one out. See tests/clients/driven.py for the other end.

A request names a method, its arguments and the object: `{"call": "start", "args": [], "on": {"app": A, "machine": M}}`.
Without `machine` it is called on the app, without `app` on the organisation. A result that is one of the SDK's models
is answered as JSON. The SDK is used as published; only the address it talks to is set.
"""

import asyncio
import json
import os
import sys
from typing import Any

import fly_python_sdk  # type: ignore[import-not-found]  # not in the tests' own environment

# Read by the SDK when `fly_python_sdk.fly` is imported.
fly_python_sdk.FLY_MACHINES_API_DEFAULT_API_HOSTNAME = os.environ["ENDPOINT"]

from fly_python_sdk.fly import Fly  # type: ignore[import-not-found]  # noqa: E402
from fly_python_sdk.models.machine import FlyMachine  # type: ignore[import-not-found]  # noqa: E402
from httpx import Response  # type: ignore[import-not-found]  # noqa: E402
from pydantic import BaseModel  # type: ignore[import-not-found]  # noqa: E402

MODELS = {
    "create_machine": lambda one: FlyMachine(**one),
    "create_machines": lambda all: [FlyMachine(**m) for m in all],
}


def plain(value: Any) -> Any:
    """A result as JSON can carry it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Response):  # of the SDK's own request functions, used for what it has no method for
        return {"status": value.status_code, "json": value.json() if value.content else None}
    return value


def answer(request: dict[str, Any]) -> dict[str, Any]:
    on: Any = Fly(os.environ["TOKEN"]).Org("personal")
    if app := request["on"].get("app"):
        on = on.App(app)
    if machine := request["on"].get("machine"):
        on = on.Machine(machine)
    model = MODELS.get(request["call"], lambda argument: argument)
    try:
        return {"ok": plain(asyncio.run(getattr(on, request["call"])(*map(model, request["args"]))))}
    except Exception as error:
        return {"error": {"kind": type(error).__name__, "message": str(error)}}


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
