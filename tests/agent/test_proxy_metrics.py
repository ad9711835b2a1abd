"""What an agent's `/metrics` tell of its proxy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.kit.markets import free_port, running_agent
from tests.kit.waiting import eventually

from hawker.client.connection import Peer
from hawker.errors import Unreachable


@pytest.fixture
def config(tmp_path: Path) -> tuple[Path, int, int]:
    api, backhaul, http = free_port(), free_port(), free_port()
    path = tmp_path / "agent.toml"
    path.write_text(
        f'name = "a"\nregion = "ord"\ndirectory = "{tmp_path}/a"\nstop_machines_on_exit = true\n'
        f'[tokens]\ncluster = "c"\n[worker]\nlisten = "127.0.0.1:{api}"\ndrivers = ["process"]\ncgroups = false\n'
        f'[proxy]\nbackhaul = "127.0.0.1:{backhaul}"\nlisten = {{ "80" = "127.0.0.1:{http}" }}\n'
    )
    return path, api, http


async def test_requests_and_what_the_proxy_holds_are_counted(config: tuple[Path, int, int]) -> None:
    path, api, http = config
    with running_agent(path, api):
        user = Peer("127.0.0.1", http)
        statuses = []

        async def answered() -> bool:
            with contextlib.suppress(Unreachable):  # the agent's API listens before its proxy does
                statuses.append((await user.request("GET", "/", timeout_s=10)).status)
            return bool(statuses)

        await eventually(answered, "the proxy answers", 30)
        await user.close()
        agent = Peer("127.0.0.1", api, headers={"authorization": "Bearer c"})
        told = (await agent.request("GET", "/metrics", timeout_s=10)).body.decode().splitlines()
        await agent.close()
    assert statuses == [404]
    assert 'hawker_proxy_requests_total{status="404"} 1.0' in told
    assert {"hawker_proxy_fit 1.0", "hawker_proxy_doors 0.0", "hawker_proxy_rows_skipped 0.0"} <= set(told)
