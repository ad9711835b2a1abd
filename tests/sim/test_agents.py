"""The live agents on virtual time: a broker and a worker, real HTTP, real SQLite, and one order of events a seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import asdict

SCRIPT = """
import sys
from tests.sim.test_agents import an_order
print(*an_order(int(sys.argv[1])))
"""


def an_order(seed: int) -> tuple[str, str]:
    """An app and a machine, made over HTTP. Returns the digest of the run and the machine's end."""
    import asyncio

    from hawker.agent.settings import AgentSettings, BrokerRole, TokenSettings, WorkerRole
    from hawker.client.connection import Peer
    from hawker.model.guest import Resources
    from hawker.sim.hosts.node import DIRECTORY, Node, the_agent
    from hawker.sim.hosts.world import Program
    from hawker.sim.platform.logs import logs_into
    from hawker.sim.platform.loop import SimLoop, run
    from hawker.sim.platform.net import Net
    from hawker.sim.platform.processes import Process
    from hawker.sim.platform.record import Record

    async def main(loop: SimLoop) -> tuple[str, str]:
        record = Record(loop.time)
        net = Net(loop, record, str(seed), ["ord", "fra"])
        tokens = TokenSettings(cluster="c" * 20, users={"alice": "t" * 20})
        room = Resources(cpus_shared=16, cpus_dedicated=1, memory_mib=4096, disk_mib=10240, machines=10)
        worker = Node(
            net,
            str(seed),
            AgentSettings(
                name="ord-1",
                region="ord",
                directory=DIRECTORY,
                tokens=tokens,
                worker=WorkerRole(listen="0.0.0.0:4281", capacity=asdict(room)),
            ),
            {"serve": Program()},
            the_agent,
        )
        address = f"ord-1@ord={worker.station.address}:4281"
        broker = Node(
            net,
            str(seed),
            AgentSettings(
                name="fra-b",
                region="fra",
                directory=DIRECTORY,
                tokens=tokens,
                broker=BrokerRole(listen="0.0.0.0:4280", workers=[address]),
            ),
            {},
            the_agent,
        )
        client = Process("client", net.station("client", "fra"))
        worker.start()
        broker.start()

        async def talk() -> bytes:
            peer = Peer(broker.station.address, 4280, headers={"authorization": "Bearer " + "t" * 20})
            await asyncio.sleep(1)
            assert broker.serving
            assert worker.serving
            made = await peer.request("POST", "/v1/apps", body=b'{"app_name": "web"}', timeout_s=5)
            assert made.status == 201, made
            config = b'{"config": {"image": "host", "init": {"exec": ["serve"]}}, "region": "ord"}'
            ordered = await peer.request("POST", "/v1/apps/web/machines?wait=1", body=config, timeout_s=5)
            assert ordered.status == 200, ordered
            return ordered.body

        with logs_into(record):
            body = await loop.run_in(client, talk())
        assert not loop.unhandled
        for node in (worker, broker):
            node.kill()
        return record.digest(), hashlib.blake2b(body, digest_size=8).hexdigest()

    return run(main)


def test_an_order_over_http_is_filled_on_the_simulated_network_and_the_same_way_every_time() -> None:
    first = an_order(1)
    assert an_order(1) == first
    assert an_order(2) != first


def digest_elsewhere(seed: int, python: str, hash_seed: str) -> tuple[str, str]:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    if python != sys.executable:
        root = Path(__file__).parents[2]
        env["PYTHONPATH"] = os.pathsep.join((str(root / "src"), str(root)))
    done = subprocess.run([python, "-c", SCRIPT, str(seed)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    digest, machine = done.stdout.split()
    return digest, machine


@pytest.mark.parametrize("hash_seed", ["0", "1", "77"])
def test_the_digest_does_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    assert digest_elsewhere(1, sys.executable, hash_seed) == an_order(1)
