"""What the declarations of many calls have in common: their paths, and the fields that stand in them."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from hawker.model.op import Request, StreamRequest

R = TypeVar("R")

APP = "/v1/apps/{app_name}"
MACHINES = f"{APP}/machines"
MACHINE = f"{MACHINES}/{{machine_id}}"

NONCE = "fly-machine-lease-nonce"
START_S = 90.0
"""So long a call may take that waits until a machine has started, for which the server takes a minute."""

OURS = {"x-hawker-extension": True}
WaitStart = Annotated[
    bool,
    Meta(
        description="answer only once the machine is started or has failed to start, or after a minute",
        extra_json_schema=OURS,
    ),
]


class OfApp(Request[R], Generic[R], kw_only=False):
    """Base of the calls of one app."""

    app_name: str


class OfMachine(Request[R], Generic[R], kw_only=False):
    """Base of the calls of one machine."""

    app_name: str
    machine_id: str


class OfLeasedMachine(OfMachine[R], Generic[R]):
    """Base of the calls that a machine's lease guards: who holds it shows its nonce."""

    common_headers = {"nonce": NONCE}
    nonce: Annotated[str, Meta(description="of the machine's lease, from who holds it")] = ""


class StreamOfMachine(StreamRequest[R], Generic[R], kw_only=False):
    """Base of the calls of one machine whose answer comes bit by bit."""

    app_name: str
    machine_id: str


AnyOfMachine = OfMachine[Any] | StreamOfMachine[Any]
