"""Finds the handler of a request. Paths are kept as a tree of their segments, so that finding one takes as many steps
as it has segments, however many paths there are. A segment that is named goes before one that is a parameter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Serve = Callable[[Request], Awaitable[Response]]
Missing = Callable[[Request, bool], Awaitable[Response]]
"""Answers a request without a handler. It is told whether the path has a handler for another method."""


class _Place:
    """A node of the tree. `serves` has the handler for each method, with the names of the path's parameters."""

    def __init__(self) -> None:
        self.named: dict[str, _Place] = {}
        self.any: _Place | None = None
        self.serves: dict[str, tuple[Serve, tuple[str, ...]]] = {}


class Routes:
    """An ASGI application of handlers."""

    def __init__(self, missing: Missing) -> None:
        self._missing = missing
        self._root = _Place()

    def add(self, method: str, path: str, serve: Serve) -> None:
        """Add a handler. A segment such as `{name}` is a parameter: any text that is not empty. A handler of GET also
        answers HEAD."""
        place, names = self._root, list[str]()
        for segment in path.split("/"):
            if segment.startswith("{"):
                names.append(segment.strip("{}"))
                place.any = place.any or _Place()
                place = place.any
            else:
                place = place.named.setdefault(segment, _Place())
        for each in ("GET", "HEAD") if method == "GET" else (method,):
            place.serves.setdefault(each, (serve, tuple(names)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, values = self._find(scope["path"])
        serve, names = place.serves.get(scope["method"], (None, ())) if place else (None, ())
        if names:
            scope["path_params"] = dict(zip(names, values, strict=True))
        request = Request(scope, receive)
        if serve is not None:
            response = await serve(request)
        else:
            response = await self._missing(request, bool(place and place.serves))
        await response(scope, receive, send)

    def _find(self, path: str) -> tuple[_Place | None, list[str]]:
        place, values = self._root, list[str]()
        for segment in path.split("/"):
            below = place.named.get(segment)
            if below is None:
                below = place.any if segment else None
                values.append(segment)
            if below is None:
                return None, values
            place = below
        return place, values
