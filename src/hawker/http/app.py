"""Turns declared calls and their handlers into an ASGI application, with authentication, ids, errors in the API's form
and metrics.

Every request needs a bearer token but those for health and the OpenAPI document. Every answer carries the request's id
(`fly-request-id`); a broker that passes a request on passes the id, so that it names one cause in both logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from hawker.errors import HawkerError, Invalid, Misdirected, NotBuilt, NotFound, Refused, Unauthorized
from hawker.host import Host
from hawker.http.call import BATCH_BYTES_MAX, BODY_BYTES_MAX, Call, TooLarge
from hawker.http.handlers import Handler as Handler
from hawker.http.handlers import Route
from hawker.http.routes import Routes, Serve
from hawker.model.json_reading import check_levels
from hawker.model.owners import AGENT as AGENT
from hawker.model.owners import SCRAPER
from hawker.telemetry import Metrics, get_logger

REQUEST_ID = "fly-request-id"
OWNER = "hawker-owner"
WORKER = "hawker-worker"
"""The header in which a broker names the worker that it means. Another worker may listen at the same address by now,
when a market was started anew or a host has gone."""
OPEN_PATHS = frozenset({"/health", "/openapi.json"})
SCRAPED = frozenset({"/metrics", "/health/proxy"})
"""The paths that the token for metrics may read."""

TOKENS_MOST = 16
"""So many tokens may stand in one header. The server hashes each before it knows who asks, and a header of commas has
room for thousands."""

_encode = msgspec.json.Encoder().encode


class Tokens:
    """Who a bearer token belongs to. Only digests are kept, so a memory dump or a log shows no token."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        self._owners = {sha256(token.encode()).hexdigest(): owner for token, owner in owners.items()}

    def owner(self, header: str) -> str:
        """The owner for an Authorization header: `Bearer T`, or `FlyV1 T,T,...`. Raises `Unauthorized`."""
        scheme, _, rest = header.partition(" ")
        if scheme.lower() not in ("bearer", "flyv1") or not rest:
            raise Unauthorized("Authenticate: no token", hint="send the header Authorization: Bearer TOKEN")
        tokens = rest.split(",", TOKENS_MOST)
        if len(tokens) > TOKENS_MOST:
            raise Unauthorized(f"Authenticate: more than {TOKENS_MOST} tokens", hint="send the one that is meant")
        for token in tokens:
            if owner := self._owners.get(sha256(token.strip().encode()).hexdigest()):
                return owner
        raise Unauthorized(
            "Authenticate: token validation error",
            hint="set HAWKER_TOKEN, or take the token that hawker dev wrote into client.json",
        )


class Serving:
    """Builds an application from routes. One instance per agent role. `worker` is the name of the worker that is
    served; a request that says it is for another one is refused."""

    def __init__(self, host: Host, tokens: Tokens, metrics: Metrics, region: str, worker: str = "") -> None:
        self._host = host
        self._tokens = tokens
        self._metrics = metrics
        self._region = region
        self._worker = worker

    def app(self, routes: Iterable[Route]) -> ASGIApp:
        """Calls whose declaration says that they are for agents answer everybody else with 404."""
        found = Routes(self._missing)
        for kind, handler in routes:
            op, agents = kind.op, kind.op.callers == "agents"
            serve = self._endpoint(op.name, handler, success=op.success, agents_only=agents, raw=bool(op.raw))
            found.add(op.method, op.path, serve)
        return found

    def _endpoint(
        self, op: str, handler: Handler, *, success: int = 200, agents_only: bool = False, raw: bool = False
    ) -> Serve:
        async def serve(request: Request) -> Response:
            request_id = self._host.ulid() + "-" + self._region
            try:
                path = path_of(request)
                owner = "" if path in OPEN_PATHS else self._tokens.owner(_authorization(request))
                agent = owner == AGENT
                if owner == SCRAPER and path not in OPEN_PATHS and not (agents_only and path in SCRAPED):
                    paths = " and ".join(sorted(SCRAPED))
                    raise Unauthorized(f"Authenticate: this token reads {paths} alone", hint="use a user's token")
                if agents_only and not agent and owner != SCRAPER:
                    raise NotFound(f"no such path: {path}")
                if agent:
                    request_id = request.headers.get(REQUEST_ID, request_id)
                    owner = request.headers.get(OWNER, owner)
                if self._worker and (meant := request.headers.get(WORKER, self._worker)) != self._worker:
                    raise Misdirected(f"this is worker {self._worker}, not {meant}")
                body = await _read_body(request, BATCH_BYTES_MAX if agents_only or raw else BODY_BYTES_MAX)
                if not agents_only and not raw:
                    _check_text(body)
                    check_levels(body)
                call = Call(request, body, id=request_id, owner=owner, agent=agent)
                value = await handler(call)
                response = value if isinstance(value, Response) else reply(value, success)
            except HawkerError as error:
                response = self._error(op, request_id, error)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it; the number is nginx's
            except Exception as error:
                _logger.exception("request.failed", operation=op, request=request_id)
                response = self._error(op, request_id, HawkerError(f"internal error: {type(error).__name__}"))
            response.headers.setdefault(REQUEST_ID, request_id)
            self._metrics.request(op, response.status_code)
            return response

        return serve

    def _error(self, op: str, request_id: str, error: HawkerError) -> Response:
        if not isinstance(error, Refused):
            _logger.warning("request.error", operation=op, request=request_id, error=error.message)
        return reply(error.body(), error.status)

    async def _missing(self, request: Request, there: bool) -> Response:
        """Answers a path or method that has no handler. `there` says that another method of this path has one."""
        path = path_of(request)
        try:
            self._tokens.owner(_authorization(request))
        except Unauthorized as unauthorized:
            return reply(unauthorized.body(), 401)
        for part, what in _NOT_BUILT_PATHS.items():
            if part in path:
                missing = NotBuilt("path", path, f"{what} not built yet")
                return reply(missing.body(), missing.status)
        if there:
            return reply({"error": f"{request.method} is not a method of {path}", "status": "method_not_allowed"}, 405)
        return reply(NotFound(f"no such path: {path}").body(), 404)


_NOT_BUILT_PATHS = {
    "/volumes": "volumes are",
    "/secrets": "secrets are",
    "/secretkeys": "secret keys are",
    "/ip_assignments": "addresses are",
    "/certificates": "certificates are",
    "/tokens": "tokens of this kind are",
    "/deploy_token": "deploy tokens are",
    "/memory/reclaim": "taking memory back from a machine is",
    "/v1/orgs/": "organisation-wide lists are",
    "/graphql": "the GraphQL API is",
    "/api/v1/": "this API is",
    "/postgres": "managed Postgres is",
}


def reply(value: Any, status: int = 200) -> Response:
    """Encode a value as JSON; None and 204 have no body."""
    if value is None or status == 204:
        return Response(status_code=204 if value is None else status)
    return Response(_encode(value), status, media_type="application/json")


def path_of(request: Request) -> str:
    """The path that the request asks for. `request.url` would also depend on the Host header, which the sender
    chooses."""
    path: str = request.scope["path"]
    return path


def _authorization(request: Request) -> str:
    value: str = request.headers.get("authorization", "")
    return value


async def _read_body(request: Request, bytes_max: int) -> bytes:
    if request.method in ("GET", "HEAD", "DELETE"):
        return b""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > bytes_max:
        raise TooLarge(f"the body has {length} bytes; at most {bytes_max} are taken")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise TooLarge(f"the body has more than the {bytes_max} bytes that are taken")
    return bytes(body)


def _check_text(body: bytes) -> None:
    if b"\0" in body:
        raise Invalid("body", "...", "send JSON without NUL bytes")


_logger = get_logger()
