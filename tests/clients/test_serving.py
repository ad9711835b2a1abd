"""What is decided before a request reaches its handler: who asks, which path, how much body."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Message

from hawker.broker.fleet import BATCH_MAX
from hawker.client import connection
from hawker.host import Host
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.call import BATCH_BYTES_MAX, BODY_BYTES_MAX, Call
from hawker.http.handlers import on, unread
from hawker.model.agent_calls import ShowHealth
from hawker.model.app_calls import CreateApp, ListApps
from hawker.model.calls import CALLS
from hawker.model.config import CONFIG_BYTES_MAX
from hawker.model.market import LocateMachine, Order, ReleaseOrder
from hawker.telemetry import Metrics, logs_into

NO_HEADERS: dict[str, str] = {}
CLIENT = {"authorization": "Bearer c"}
NOT_BUILT = 422
AS_AGENT = {"authorization": "Bearer a"}


async def echo(call: Call) -> Any:
    return {"path": call.request.scope["path"], "bytes": len(call.body), **call.request.path_params}


async def give_back(call: Call, request: CreateApp | ReleaseOrder) -> Any:
    return request


@pytest.fixture
def app() -> ASGIApp:
    tokens = Tokens({"c": "someone", "a": AGENT})
    served = [unread(ListApps, echo), on(CreateApp, give_back), unread(ShowHealth, echo)]
    agents = [unread(Order, echo), on(ReleaseOrder, give_back), unread(LocateMachine, echo)]
    host = Host(lambda: 1.0, random.Random(1))
    return Serving(host, tokens, Metrics(), "ord").app([*served, *agents])


async def ask(
    app: ASGIApp, method: str, path: str, headers: dict[str, str] = NO_HEADERS, body: bytes = b""
) -> tuple[int, Any]:
    """Status and decoded body of the answer to one request."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "server": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in ({"host": "h"} | headers).items()],
    }
    await app(scope, receive, send)
    return sent[0]["status"], msgspec.json.decode(b"".join(m.get("body", b"") for m in sent[1:]) or b"null")


@pytest.mark.parametrize("host", ["x/health?", "x/openapi.json#", "x/health?a=", "[", "h"])
@pytest.mark.parametrize("path", ["/v1/apps", "/v1/market/reserve", "/v1/market/machines/1", "/nothing"])
async def test_a_host_header_opens_no_path(app: ASGIApp, host: str, path: str) -> None:
    """Once it could: the path was read from the request's URL, which that header begins."""
    method = "POST" if path == "/v1/market/reserve" else "GET"
    status, body = await ask(app, method, path, {"host": host})
    assert (status, body["status"]) == (401, "unauthorized")
    assert (await ask(app, "GET", "/health"))[0] == 200


async def test_agents_paths_are_for_agents_only(app: ASGIApp) -> None:
    assert (await ask(app, "POST", "/v1/market/reserve", CLIENT))[0] == 404
    assert (await ask(app, "POST", "/v1/market/reserve", AS_AGENT))[0] == 200


async def test_a_template_of_an_agents_path_is_not_taken_for_the_path_itself(app: ASGIApp) -> None:
    template = "/v1/market/machines/{machine_id}"
    assert await ask(app, "GET", template, AS_AGENT) == (
        200,
        {"path": template, "bytes": 0, "machine_id": "{machine_id}"},
    )


async def test_every_call_is_found_by_its_path_and_gets_its_parameters() -> None:
    async def op_of(op: str, call: Call) -> Any:
        return {"op": op, **call.request.path_params}

    routes = [unread(kind, partial(op_of, kind.op.name)) for kind in CALLS]
    host = Host(lambda: 1.0, random.Random(1))
    app = Serving(host, Tokens({"c": "someone"}), Metrics(), "ord").app(routes)
    for endpoint in [kind.op for kind in CALLS]:
        if endpoint.success == 204:
            continue
        names = re.findall(r"{(\w+)}", endpoint.path)
        path = endpoint.path.format(**{name: f"a {name}" for name in names})
        expected = {"op": endpoint.name, **{name: f"a {name}" for name in names}}
        assert await ask(app, endpoint.method, path, CLIENT) == (endpoint.success, expected)
        assert (await ask(app, endpoint.method, f"{path}/", CLIENT))[0] in (404, NOT_BUILT)
        assert (await ask(app, "TRACE", path, CLIENT))[0] in (405, NOT_BUILT)
        for name in names:
            without = endpoint.path.format(**{each: "" if each == name else "a" for each in names})
            assert (await ask(app, endpoint.method, without, CLIENT))[0] in (404, NOT_BUILT)


@pytest.mark.parametrize("levels", [101, 500, 990, 1000, 100_000])
@pytest.mark.parametrize(
    "body", [b"%s", b'{"app_name": "web", "a": %s}', b'{"app_name": %s}', b'{"org_slug": 1, "a": %s}']
)
async def test_json_that_nests_too_deep_is_refused_in_the_form_of_an_error(
    app: ASGIApp, body: bytes, levels: int
) -> None:
    """Once it was an error of ours: reading it, and showing it in the error's text, both recurse."""
    status, answer = await ask(app, "POST", "/v1/apps", CLIENT, body % (b"[" * levels + b"]" * levels))
    assert (status, answer["status"], answer["details"]["field"]) == (400, "invalid_argument", "body")
    batch = b'[{"key": 1, "a": %s}]' % (b"[" * levels + b"]" * levels)
    status, answer = await ask(app, "POST", "/v1/market/release", AS_AGENT, batch)
    assert (status, answer["status"]) == (400, "invalid_argument")


async def test_json_of_many_shallow_values_is_read(app: ASGIApp) -> None:
    body = b'{"app_name": "web", "a": [%s {"b": [[]]}]}' % (b"[]," * 10_000)
    assert (await ask(app, "POST", "/v1/apps", CLIENT, body))[0] == 201


async def test_a_request_between_agents_may_carry_what_many_clients_sent(app: ASGIApp) -> None:
    async def status(path: str, who: dict[str, str], size: int) -> int:
        return (await ask(app, "POST", path, who, b" " * size))[0]

    assert await status("/v1/apps", CLIENT, BODY_BYTES_MAX) == 400  # blanks are no JSON
    assert await status("/v1/apps", CLIENT, BODY_BYTES_MAX + 1) == 413
    assert await status("/v1/apps", AS_AGENT, BODY_BYTES_MAX + 1) == 413
    assert await status("/v1/market/reserve", AS_AGENT, BATCH_BYTES_MAX) == 200
    assert await status("/v1/market/reserve", AS_AGENT, BATCH_BYTES_MAX + 1) == 413
    assert await status("/v1/market/reserve", CLIENT, BATCH_BYTES_MAX) == 404


def test_a_full_batch_of_the_largest_configurations_fits_into_a_request_and_its_answer() -> None:
    assert min(BATCH_BYTES_MAX, connection.BODY_BYTES_MAX) >= BATCH_MAX * CONFIG_BYTES_MAX * 2


async def test_a_client_that_goes_away_while_it_sends_is_no_fault_of_ours(app: ASGIApp) -> None:
    """A broker that was killed in the middle of a request was logged as an internal error, found by the simulator."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"h"), *((name.encode(), value.encode()) for name, value in AS_AGENT.items())]
    scope = {"type": "http", "method": "POST", "path": "/v1/market/reserve", "query_string": b"", "headers": headers}
    logs = list[str]()
    with logs_into(lambda _, event, fields: logs.append(event)):
        await app(scope, receive, send)
    assert logs == []
    assert sent[0]["status"] == 499


async def test_a_path_with_a_slash_too_many_is_redirected_nowhere(app: ASGIApp) -> None:
    """A redirect would lead to whatever host the request names, before any token was seen."""
    assert (await ask(app, "GET", "/v1/apps/", {"host": "evil.example"}))[0] == 401
    assert (await ask(app, "GET", "/v1/apps/", {"host": "evil.example", **CLIENT}))[0] == 404


@pytest.mark.parametrize(("others", "status"), [(15, 200), (16, 401), (125_000, 401)])
async def test_a_header_has_sixteen_tokens_at_most(app: ASGIApp, others: int, status: int) -> None:
    header = {"authorization": "FlyV1 " + "x," * others + "c"}
    found, error = await ask(app, "GET", "/v1/apps", header)
    assert found == status
    if status == 401:
        assert error["error"] == "Authenticate: more than 16 tokens"
