"""Handlers of declared calls, over the real server's application."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from starlette.responses import Response
from tests.clients.test_serving import ask

from hawker.errors import Invalid
from hawker.host import Host
from hawker.http.app import AGENT, Serving, Tokens
from hawker.http.call import Call
from hawker.http.handlers import on, on_each, unread
from hawker.model.op import Op, Request
from hawker.telemetry import Metrics

CLIENT = {"authorization": "Bearer c"}
AS_AGENT = {"authorization": "Bearer a"}


class Double(Request[int]):
    op = Op("Double", "POST", "/v1/double/{name}", success=201)

    name: str
    number: int


class Ask(Request[int]):
    op = Op("Ask", "POST", "/v1/market/ask", callers="agents", batch=True)

    number: int


class Pass(Request[Any]):
    op = Op("Pass", "GET", "/v1/pass/{name}")

    name: str


async def double(call: Call, request: Double) -> Any:
    return {"name": request.name, "is": 2 * request.number, "by": call.owner}


async def answer(call: Call, asks: list[Ask | Invalid]) -> list[Any]:
    return [ask.message if isinstance(ask, Invalid) else ask.number for ask in asks]


async def pass_on(call: Call) -> Response:
    return Response(call.path("name"), media_type="application/json")


APP = Serving(Host(lambda: 1.0, random.Random(1)), Tokens({"c": "someone", "a": AGENT}), Metrics(), "ord").app(
    [on(Double, double), on_each(Ask, answer), unread(Pass, pass_on)]
)


async def test_a_handler_is_given_the_request_as_it_was_read() -> None:
    assert await ask(APP, "POST", "/v1/double/x", CLIENT, b'{"number": 4}') == (
        201,
        {"name": "x", "is": 8, "by": "someone"},
    )
    status, error = await ask(APP, "POST", "/v1/double/x", CLIENT, b'{"number": "4"}')
    assert (status, error["details"]["field"]) == (400, "number")


async def test_a_batch_has_an_answer_for_each() -> None:
    body = msgspec.json.encode([{"number": 1}, {"number": "x"}])
    status, answers = await ask(APP, "POST", "/v1/market/ask", AS_AGENT, body)
    assert (status, answers[0]) == (200, 1)
    assert "number" in answers[1]


@pytest.mark.parametrize("headers", [CLIENT])
async def test_what_agents_call_nobody_else_finds(headers: dict[str, str]) -> None:
    assert (await ask(APP, "POST", "/v1/market/ask", headers, b"[]"))[0] == 404


async def test_a_call_may_be_passed_on_unread() -> None:
    assert await ask(APP, "GET", "/v1/pass/5", CLIENT) == (200, 5)
