"""In which order an agent ends."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, BrokerRole, TokenSettings, WorkerRole
from hawker.host import live
from hawker.http.server import Server


async def test_the_broker_stops_serving_before_the_worker_beside_it() -> None:
    """Orders that it still answers may be with that worker."""
    ended: list[str] = []

    class Serving:
        def __init__(self, role: str) -> None:
            self._role = role

        async def close(self) -> None:
            ended.append(self._role)

    settings = AgentSettings(
        name="ord-1",
        region="ord",
        directory=Path("/var/lib/hawker"),
        tokens=TokenSettings(cluster="token"),
        worker=WorkerRole(listen="127.0.0.1:4281"),
        broker=BrokerRole(listen="127.0.0.1:4280"),
    )
    agent = Agent(settings, live())
    agent._servers = [cast(Server, Serving(role)) for role in ("worker", "broker")]
    await agent.close()
    assert ended == ["broker", "worker"]
