"""What a worker runs machines with: the drivers that its host can run, and a word about those that it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hawker.agent.settings import AgentSettings, TokenSettings, WorkerRole
from hawker.agent.worker_parts import live_worker_parts
from hawker.errors import Invalid
from hawker.host import live
from hawker.worker.drivers.base import Exit

MODULE = """
from hawker.worker.drivers.process import ProcessDriver

def make(site):
    return Named(site.directory, site.settings["depth"])

class Named(ProcessDriver):
    name = "submarine"

    def __init__(self, directory, depth):
        super().__init__(directory, cgroups=False)
        self.depth = depth
"""


UNUSED = """
import asyncio, sys
from pathlib import Path
import hawker.agent.agent, hawker.worker.daemon
from hawker.agent.worker_parts import live_worker_parts
from hawker.host import live
from tests.agent.test_worker_parts import ignore, settings

async def main():
    parts = await live_worker_parts(*settings(Path(sys.argv[1])), live())
    await parts.drivers.open(ignore)
    await parts.drivers.fingerprints()
    if parts.network:
        await parts.network.reconcile({})
        await parts.network.detach("unknown")
    print(sorted({"pyroute2", "dns", "httpx2"} & sys.modules.keys()))
    await parts.drivers.stop_all(grace_s=0)
    await parts.drivers.close()
    await parts.close()

asyncio.run(main())
"""


def settings(directory: Path, **role: Any) -> tuple[AgentSettings, WorkerRole]:
    worker = WorkerRole(listen="127.0.0.1:0", cgroups=False, **role)
    tokens = TokenSettings(cluster="c" * 32)
    return AgentSettings(name="ord-1", region="ord", directory=directory, tokens=tokens, worker=worker), worker


def ignore(ended: Exit) -> None:
    """Nobody asks."""


async def test_a_worker_of_processes_alone_has_neither_images_nor_a_network(tmp_path: Path) -> None:
    parts = await live_worker_parts(*settings(tmp_path, drivers=["process"]), live())
    assert (parts.drivers.name, parts.images, parts.network) == ("process", None, None)
    assert os.listdir(tmp_path) == []
    await parts.close()


def test_a_worker_whose_machines_need_none_of_it_loads_nothing_for_networks_and_registries(tmp_path: Path) -> None:
    """Together they are a third of an agent's memory and start."""
    argv = [sys.executable, "-c", UNUSED, str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert said.splitlines()[-1] == "[]"


async def test_a_host_without_a_runtime_runs_processes_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    parts = await live_worker_parts(*settings(tmp_path / "agent", settings={"process": {}}), live())
    try:
        await parts.drivers.open(ignore)
        found = await parts.drivers.fingerprints()
        assert found["process"].healthy
        assert not found["container"].healthy
        assert found["container"].problem == "neither crun nor runc is installed"
        assert not found["microvm"].healthy
        assert found["microvm"].problem == "neither qemu-system-x86_64 nor firecracker is installed"
        assert parts.drivers.opened() == {"process"}
        await parts.drivers.stop_all(grace_s=0)
        await parts.drivers.close()
    finally:
        await parts.close()


async def test_a_worker_runs_commands_of_the_host_only_where_its_configuration_names_the_driver(tmp_path: Path) -> None:
    """They run without isolation, as the agent's own user: any user of the API would have what it has."""
    parts = await live_worker_parts(*settings(tmp_path), live())
    try:
        await parts.drivers.open(ignore)
        found = (await parts.drivers.fingerprints())["process"]
        assert not found.healthy
        assert "only if worker.drivers names it" in found.problem
        assert "process" not in parts.drivers.opened()
        await parts.drivers.stop_all(grace_s=0)
        await parts.drivers.close()
    finally:
        await parts.close()


async def test_a_third_party_brings_a_driver_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "submarine_driver.py").write_text(MODULE)
    installed = tmp_path / "submarine-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: submarine\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[hawker.drivers]\nsubmarine = submarine_driver:make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"submarine": {"depth": 20_000}}
    parts = await live_worker_parts(*settings(tmp_path / "agent", drivers=["submarine"], settings=own), live())
    try:
        await parts.drivers.open(ignore)
        assert parts.drivers.opened() == {"submarine"}
        assert parts.drivers.of("submarine").depth == 20_000  # type: ignore[attr-defined]  # the driver's own
        await parts.drivers.stop_all(grace_s=0)
        await parts.drivers.close()
    finally:
        await parts.close()
        sys.modules.pop("submarine_driver", None)


@pytest.mark.parametrize("role", [{"drivers": ["proces"]}, {"settings": {"proces": {}}}])
async def test_a_driver_that_does_not_exist_is_refused_by_name(role: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r'worker\.drivers: "proces" .*there are process, container, microvm'):
        await live_worker_parts(*settings(tmp_path, **role), live())


async def test_a_setting_that_a_driver_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"worker\.microvm"):
        await live_worker_parts(*settings(tmp_path, settings={"microvm": {"kernal": "/boot"}}), live())
