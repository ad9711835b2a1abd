"""What an agent imports when it starts: what its roles need, all of which its check has tried, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.test_proxy_settings import read
from tests.kit.ports import free_port

IMPORTED = """
import asyncio, json, sys
from pathlib import Path
from hawker.agent import running
from hawker.agent.agent import Agent
from hawker.agent.settings import read_settings
from hawker.host import live

settings = read_settings(Path(sys.argv[1]))

def loaded():
    running.load(settings)
    print(json.dumps(sorted(sys.modules)))

async def started():
    agent = Agent(settings, live())
    await agent.open()
    print(json.dumps(sorted(sys.modules)))
    await agent.close()

if sys.argv[2] == "start":
    asyncio.run(started())
else:
    loaded()
"""

NOBODYS = ["structlog", "rich", "pygments", "acme", "requests", "httpx2", "pyroute2", "dns", "zstandard", "yaml"]
NOBODYS += ["prometheus_client", "http.server", "importlib.metadata"]
CONTAINERS = ["hawker.worker.drivers.container.driver", "hawker.worker.drivers.microvm", "hawker.network.manager"]
WORKERS = ["hawker.worker", "hawker.supervisor", "hawker.images.service", "hawker.init"]
PROXYS = ["hawker.proxy.service", "hawker.proxy.catalog_view", "h2", "cryptography.x509"]
NEIGHBOURS = ["cryptography"]
"""What an agent needs that has neighbours in the catalog: it seals what it tells them."""
BROKERS = ["hawker.broker"]


def imported(config: Path, what: str) -> set[str]:
    """The modules of a process that has started an agent, or only loaded what one needs."""
    command = (sys.executable, "-c", IMPORTED, config, what)
    return set(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


@pytest.mark.parametrize(
    ("roles", "unwanted", "most"),
    [
        ('[worker]\nlisten = "{}"\ncgroups = false\n', [*BROKERS, *PROXYS, *NEIGHBOURS], 652),
        (
            '[worker]\nlisten = "{}"\ncgroups = false\ndrivers = ["process"]\n',
            [*BROKERS, *PROXYS, *CONTAINERS, *NEIGHBOURS],
            597,
        ),
        ('[broker]\nlisten = "{}"\n', [*WORKERS, *PROXYS, *NEIGHBOURS], 465),
        ('[proxy]\nlisten = {{ "80" = "{}" }}\n[catalog]\nlisten = "{}"\n', [*WORKERS, *BROKERS], 625),
    ],
    ids=["worker", "worker of processes", "broker", "proxy"],
)
def test_an_agent_imports_what_its_roles_need(tmp_path: Path, roles: str, unwanted: list[str], most: int) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    read(tmp_path, roles.format(*places))
    started = imported(tmp_path / "agent.toml", "start")
    surplus = {name for name in started if any(f"{name}.".startswith(f"{each}.") for each in [*NOBODYS, *unwanted])}
    assert surplus == set()
    assert len(started) <= most, len(started)
    loaded = imported(tmp_path / "agent.toml", "load")
    assert {name for name in started if name.startswith("hawker.")} <= loaded, "--check has tried it"
    assert "cryptography.hazmat.primitives.ciphers.aead" in loaded, "and what the first neighbour needs"
