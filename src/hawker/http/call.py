"""One HTTP request on its way through a handler: who sends it, and its parts as they came.

A handler returns a value, which is encoded as JSON, or a Starlette response, or raises a `HawkerError`. What the
request asks for, a handler gets as a struct (`http/handlers.py`).
"""

from __future__ import annotations

from starlette.requests import Request

from hawker.errors import TooManyRequests
from hawker.model.call_bases import NONCE

BODY_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 16 << 20
"""The limit for calls between agents, where one request carries what many clients sent."""


class TooLarge(TooManyRequests):
    """The body is larger than any call of this API needs."""

    status = 413
    code = "too_large"


class Call:
    """A request. `id` names it in logs: a ULID and a region. `owner` is the owner of the token that it brought, `agent`
    says that an agent sent it, `trace` is its W3C traceparent."""

    __slots__ = ("agent", "body", "id", "owner", "request", "trace")

    def __init__(self, request: Request, body: bytes, *, id: str, owner: str, agent: bool) -> None:
        self.request = request
        self.body = body
        self.id = id
        self.owner = owner
        self.agent = agent
        self.trace = request.headers.get("traceparent", "")

    @property
    def nonce(self) -> str:
        return self.request.headers.get(NONCE, "")

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value
