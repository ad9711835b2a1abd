"""How an agent's and a worker's services are started and ended."""

from __future__ import annotations

import pytest

from hawker.services import Service, opened


class One(Service):
    def __init__(self, name: str, told: list[str], *, fails: bool = False) -> None:
        self._name = name
        self._told = told
        self._fails = fails

    async def open(self) -> None:
        if self._fails:
            raise OSError(f"{self._name} cannot be opened")
        self._told.append(f"{self._name} opens")

    async def close(self) -> None:
        self._told.append(f"{self._name} closes")


async def test_services_are_opened_in_order_and_closed_in_reverse() -> None:
    told: list[str] = []
    stack = await opened([One("store", told), One("worker", told)])
    assert told == ["store opens", "worker opens"]
    await stack.aclose()
    assert told[2:] == ["worker closes", "store closes"]


async def test_when_one_cannot_be_opened_those_before_it_are_closed_and_none_after_it_is_opened() -> None:
    told: list[str] = []
    with pytest.raises(OSError, match="worker cannot be opened"):
        await opened([One("store", told), One("worker", told, fails=True), One("broker", told)])
    assert told == ["store opens", "store closes"]


async def test_a_service_that_overrides_nothing_serves_nothing() -> None:
    class Idle(Service):
        """It has nothing to do."""

    idle = Idle()
    assert list(idle.routes()) == []
    await (await opened([idle])).aclose()
