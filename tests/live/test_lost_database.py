"""A real agent whose database was lost beside programs that run: nothing of them ends until a person has decided."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, environment, hawker
from tests.kit.markets import SLEEPER, UP_S, Client, free_port
from tests.kit.processes import alive
from tests.kit.waiting import eventually, wait_until

from hawker.client.wire import PeerUnreachable

pytestmark = pytest.mark.slow

CONFIG = """
name = "ord-1"
region = "ord"
directory = "{directory}"
[tokens]
cluster = "c"
[tokens.users]
alice = "a"
[worker]
listen = "127.0.0.1:{worker}"
cgroups = false
drivers = ["process"]
[broker]
listen = "127.0.0.1:{broker}"
"""


@contextmanager
def agent(config: Path, broker: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [*PROGRAM, "agent", "--config", str(config)]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(ENDS_S)


async def test_an_agent_without_its_database_ends_nothing_and_takes_over_when_it_is_told_to(tmp_path: Path) -> None:
    directory, config = tmp_path / "w", tmp_path / "agent.toml"
    worker, broker = free_port(), free_port()
    config.write_text(CONFIG.format(directory=directory, worker=worker, broker=broker))
    client = Client(f"http://127.0.0.1:{broker}", "a")

    async def serves() -> bool:
        with suppress(PeerUnreachable):
            return (await client.call("GET", "/hawker/workers")).status == 200
        return False

    async def programs() -> list[int]:
        return [each["pid"] for each in await client.ok("GET", f"/apps/k/machines/{made['id']}/ps")]

    with agent(config, broker) as process:
        await eventually(serves, "the agent serves", UP_S)
        await client.ok("POST", "/apps", {"app_name": "k"})
        made = await client.ok("POST", "/apps/k/machines?wait=true", {"region": "ord", "config": SLEEPER})
        before = await programs()
        process.send_signal(signal.SIGKILL)
        process.wait(ENDS_S)
    for path in directory.glob("worker.db*"):
        path.unlink()
    told = hawker("agent", "--config", config)
    assert told.status == 1
    assert (
        "of worker ord-1, is empty beside 1 program that runs, 1 directory of a machine, 1 machine in the catalog"
        in told.err
    )
    assert f"hawker worker recover {directory}" in told.err
    assert all(map(alive, before))
    assert hawker("worker", "recover", directory).status == 0
    with agent(config, broker):
        await eventually(serves, "the agent serves", UP_S)
        machine = await client.ok("GET", f"/apps/k/machines/{made['id']}")
        assert (machine["state"], machine["config"]) == ("started", made["config"])
        assert await programs() == before
        assert [app["name"] for app in (await client.ok("GET", "/apps"))["apps"]] == ["k"]
        await client.ok("DELETE", f"/apps/k/machines/{made['id']}?force=true")
        wait_until(lambda: not any(map(alive, before)), "the program has ended")
    await client.close()
    assert hawker("worker", "verify", directory).status == 0
