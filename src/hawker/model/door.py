"""What a proxy asks of a worker about machines behind its door: to have one run, and to put an idle one to rest.

Agents' own calls, each of which may be repeated. A refusal comes in the API's form (`hawker.errors`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hawker.model.machine import State
from hawker.model.op import Op, Request

WAKE_S = 55.0
"""How long a worker lets a proxy wait for a machine's program. Proxies wait longer for the program to listen, so that
they hear from the worker what keeps it from running."""

AUTOSTART = "proxy autostart"
AUTOSTOP = "proxy autostop"
_STANDBY = "proxy standby: worker "
_GONE = " is gone"


def standby_cause(worker: str) -> str:
    """The cause with which a standby machine is started when a worker is gone."""
    return f"{_STANDBY}{worker}{_GONE}"


def stands_in_for(cause: str) -> str:
    """The worker that such a cause names; "" for any other cause."""
    named = cause.startswith(_STANDBY) and cause.endswith(_GONE)
    return cause[len(_STANDBY) : -len(_GONE)] if named else ""


class Awake(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's program runs, as the instance that the driver calls `instance`; whether it listens is another
    question. `before` is the machine's state when this was asked: `started` when there was nothing to do. `checked`:
    it has health checks that must pass before it gets requests. `seconds`: how long the worker took."""

    before: State
    instance: str = ""
    checked: bool = False
    seconds: float = 0.0


class Wake(Request[Awake]):
    """Have a machine run. `request` is the id of the one that waits for it, for the cause; `why` its other part.
    `trace` is that request's W3C traceparent."""

    op = Op("Door_wake", "POST", "/v1/door/wake", callers="agents", idempotent=True, deadline_s=WAKE_S + 5.0)
    app: str
    machine: str
    request: str = ""
    trace: str = ""
    why: str = AUTOSTART


class Resting(msgspec.Struct, frozen=True, kw_only=True):
    """The machine is on its way to `state`, or there already."""

    state: State


class Rest(Request[Resting]):
    """Stop an idle machine, or suspend it; where its driver cannot suspend, it is stopped. `instance`, when given, is
    the one that was seen idle: a later one runs on."""

    op = Op("Door_rest", "POST", "/v1/door/rest", callers="agents", idempotent=True, deadline_s=10.0)
    app: str
    machine: str
    how: Literal["stop", "suspend"] = "stop"
    instance: str = ""
    why: str = AUTOSTOP
