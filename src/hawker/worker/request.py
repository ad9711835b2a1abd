"""Who asks for something, and why."""

from __future__ import annotations

import msgspec

from hawker.http.call import Call


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and why: carried into every record and event of what follows.

    `nonce` is the lease the caller holds, if any; `trace` a W3C traceparent. `rule` is the worker's own, where nobody
    asks; no lease stands against it. `why` is a proxy's reason, for itself or for the user's request `id`.
    """

    id: str
    owner: str = ""
    nonce: str = ""
    trace: str = ""
    rule: str = ""
    why: str = ""

    @property
    def cause(self) -> str:
        if self.rule:
            return self.rule
        if self.why:
            return f"{self.why} (request {self.id})" if self.id else self.why
        return f"request {self.id}" + (f" by {self.owner}" if self.owner else "")


def request_of(call: Call) -> Request:
    """Who makes a call of the API."""
    return Request(id=call.id, owner=call.owner, nonce=call.nonce, trace=call.trace)
