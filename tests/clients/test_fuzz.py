"""Every request that the served OpenAPI document allows, and many that it does not, get a documented answer.

Schemathesis makes the requests from the document and checks each answer: no server error, a documented status, the
documented content type, a body of the documented form. `tests/clients/fuzzing.py` leads them to machines that exist.
The seed is fixed: a run that fails fails again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.clients.api import Api
from tests.clients.fuzzing import World
from tests.kit.tiers import costly, has_more

from hawker.http.openapi import document
from hawker.model.calls import CALLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ANSWER_S = 15.0
EXAMPLES = costly(4)  # of each operation, besides the systematic ones that Schemathesis derives from the document


# Tests are collected before there is a market, so they come from the document's generator; a test below holds that what
# the market serves is the same.
generated = schemathesis.openapi.from_dict(document(), config=schemathesis.Config(seed=1))


@pytest.fixture
def world(api: Api) -> Iterator[World]:
    world = World(api)
    yield world
    world.close()


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> Iterator[Counter[int]]:
    """Counts statuses. What is tested is more than refusals: in the full run every operation must have succeeded at
    least once, but for the forgetting of a worker, which needs one that is dead (`tests/live/test_replacing.py`)."""
    counted: Counter[int] = Counter()
    yield counted
    reached = any(200 <= status < 300 for status in counted) or "/forget" in request.node.name
    assert not counted or reached or not has_more(request.config), f"never reached: {dict(counted)}"


@pytest.fixture
def left_out(request: pytest.FixtureRequest) -> Callable[[Any], bool]:
    """Whether a case is for the full run alone. There are two thousand systematic ones: each change has every third."""
    numbers, each = itertools.count(), 1 if has_more(request.config) else 3

    def is_left_out(case: Any) -> bool:
        return case.meta.phase.name.value == "coverage" and next(numbers) % each > 0

    return is_left_out


@generated.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # large bodies are slow to make, and that is no fault of the API
)
def test_every_answer_is_a_documented_one(
    case: Any, world: World, api: Api, answers: Counter[int], left_out: Callable[[Any], bool]
) -> None:
    if left_out(case):
        return
    world.mend()
    world.guide(case)
    response = case.call(base_url=api.endpoint, headers={"Authorization": f"Bearer {api.token}"}, timeout=ANSWER_S)
    answers[response.status_code] += 1
    case.validate_response(response, checks=CHECKS)
    world.tidy(case, response)


def test_the_served_document_is_the_one_the_requests_are_made_from(api: Api) -> None:
    served = api.get("/openapi.json").expect(200)

    assert served == document()
    operations = [operation for path in served["paths"].values() for operation in path.values()]
    assert {operation["operationId"] for operation in operations} == {kind.op.name for kind in CALLS}


def test_no_operation_but_health_and_the_document_answers_without_a_token(api: Api) -> None:
    stranger = Api(api.endpoint, "not-a-token")
    paths = api.get("/openapi.json").expect(200)["paths"]

    answered = {
        path
        for path, operations in paths.items()
        for method in operations
        if stranger.call(method.upper(), path.replace("{", "").replace("}", ""), timeout_s=ANSWER_S).status != 401
    }

    assert answered == {"/health", "/openapi.json"}
