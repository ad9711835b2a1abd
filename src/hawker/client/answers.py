"""The shapes of the API's answers and of what it is asked, for the methods that make its calls."""

from __future__ import annotations

from typing import Any

from hawker.errors import Unreachable

Object = dict[str, Any]
QUIET_S = 45.0
"""Three of the comments that a stream of events is never without."""


def present(**fields: Any) -> Object:
    return {name: value for name, value in fields.items() if value is not None}


def one(answer: Any) -> Object:
    """An answer that is an object. Raises `Unreachable` for any other, as the next two do: it is not this API's."""
    if isinstance(answer, dict):
        return answer
    raise _not_the_api(answer)


def many(answer: Any) -> list[Object]:
    if isinstance(answer, list):
        return [one(entry) for entry in answer]
    raise _not_the_api(answer)


def data(answer: Any) -> Object:
    return one(one(answer).get("data"))


def _not_the_api(answer: Any) -> Unreachable:
    return Unreachable(f"the answer is not one of this API: {str(answer)[:80]}", hint="is the endpoint a market's?")
