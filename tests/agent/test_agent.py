"""In which order an agent ends."""

from __future__ import annotations

from typing import cast

from hawker.agent.agent import Listeners
from hawker.agent.listener import Listener


async def test_the_broker_stops_serving_before_the_worker_beside_it() -> None:
    """Orders that it still answers may be with that worker."""
    ended: list[str] = []

    class Serving:
        def __init__(self, role: str) -> None:
            self._role = role

        async def close(self) -> None:
            ended.append(self._role)

    listeners = [cast(Listener, Serving(role)) for role in ("worker", "broker")]
    await Listeners(listeners, None).close()
    assert ended == ["broker", "worker"]
