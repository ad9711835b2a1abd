"""One request on its way through a handler: what it asks, who asks, and how its answer is encoded.

Handlers are `async def handler(call: Call) -> Any`: they return a value to encode, or a ready Starlette response,
or raise a `HawkerError`. Nothing else of HTTP reaches them.
"""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from hawker.errors import Invalid, TooManyRequests
from hawker.model.json_reading import read_each, read_json

T = TypeVar("T")

BODY_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 16 << 20
"""On agents' own paths, where one request carries what many clients sent."""


class TooLarge(TooManyRequests):
    """The body is larger than any call of this API needs."""

    status = 413
    code = "too_large"


class Call:
    """A request. `id` is its id (a ULID and a region), `owner` whose token it brought, `trace` its W3C traceparent."""

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
        return self.request.headers.get("fly-machine-lease-nonce", "")

    def path(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value

    def read(self, kind: type[T]) -> T:
        """The JSON body as `kind`. An empty body reads as `{}`. Raises `Invalid` naming the field."""
        return read_json(self.body or b"{}", kind)

    def read_each(self, kind: type[T]) -> list[T | Invalid]:
        """The JSON body, a list that many callers share, as a `kind` for each: one that does not read is told so, and
        the others are not concerned. Raises `Invalid` where it is no list."""
        return read_each(self.body, kind)
