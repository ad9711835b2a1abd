"""What an agent imports when it starts: what its roles need, all of which its check has tried, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.test_proxy_settings import read
from tests.kit.ports import free_port

STARTED = """
import asyncio, json, sys
from pathlib import Path
from hawker.agent import running
from hawker.agent.agent import Agent
from hawker.agent.settings import read_settings
from hawker.host import live

settings = read_settings(Path(sys.argv[1]))
running.load(settings)
loaded = sorted(sys.modules)

async def main():
    agent = Agent(settings, live())
    await agent.open()
    print(json.dumps([loaded, sorted(sys.modules)]))
    await agent.close()

asyncio.run(main())
"""

NOBODYS = ["structlog", "rich", "pygments", "acme", "requests", "httpx2", "pyroute2", "dns", "zstandard", "yaml"]
CONTAINERS = ["hawker.worker.drivers.container.driver", "hawker.worker.drivers.microvm", "hawker.network.manager"]
WORKERS = ["hawker.worker", "hawker.supervisor", "hawker.images.service", "hawker.init"]
PROXYS = ["hawker.proxy.service", "hawker.proxy.known", "h2", "cryptography.x509"]
BROKERS = ["hawker.broker"]


@pytest.mark.parametrize(
    ("roles", "unwanted", "most"),
    [
        ('[worker]\nlisten = "{}"\ncgroups = false\n', [*BROKERS, *PROXYS], 690),
        ('[worker]\nlisten = "{}"\ncgroups = false\ndrivers = ["process"]\n', [*BROKERS, *PROXYS, *CONTAINERS], 640),
        ('[broker]\nlisten = "{}"\n', [*WORKERS, *PROXYS], 520),
        ('[proxy]\nlisten = {{ "80" = "{}" }}\n[catalog]\nlisten = "{}"\n', [*WORKERS, *BROKERS], 660),
    ],
    ids=["worker", "worker of processes", "broker", "proxy"],
)
def test_an_agent_imports_what_its_roles_need(tmp_path: Path, roles: str, unwanted: list[str], most: int) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    read(tmp_path, roles.format(*places))
    command = (sys.executable, "-c", STARTED, tmp_path / "agent.toml")
    loaded, started = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    surplus = {name for name in started if any(f"{name}.".startswith(f"{each}.") for each in [*NOBODYS, *unwanted])}
    assert surplus == set()
    assert len(started) <= most, len(started)
    assert {name for name in started if name.startswith("hawker.")} <= set(loaded), "--check has tried it"
