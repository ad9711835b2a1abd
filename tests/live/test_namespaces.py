"""The networks that `tests/kit/namespaces.py` makes: a cut loses packets without a word, and nothing of one is left."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests.kit.namespaces import Network, missing_for_namespaces

MISSING = missing_for_namespaces()
pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

ONE, OTHER, PORT = "10.1.0.1", "10.2.0.1", 4280


def two_hosts(network: Network) -> None:
    """`one` and `other`, each on a switch of its own."""
    network.switch("near")
    network.switch("far", above="near")
    for name, address, switch in (("one", ONE, "near"), ("other", OTHER, "far")):
        network.host(name)
        network.plug(name, address, switch)


def devices() -> list[str]:
    """Of this thread's network namespace."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return [line.partition(":")[0] for line in lines if ":" in line]


def test_a_cut_loses_packets_without_a_word_until_it_is_mended() -> None:
    with Network() as network:
        two_hosts(network)
        with network.inside("one"):
            server = socket.create_server((ONE, PORT))
        with server, network.inside("other"):
            socket.create_connection((ONE, PORT), timeout=5).close()
            network.cut("far")
            with pytest.raises(TimeoutError):
                socket.create_connection((ONE, PORT), timeout=0.1)
            network.mend("far")
            socket.create_connection((ONE, PORT), timeout=5).close()


def test_processes_of_hosts_are_found_and_none_outlives_its_network() -> None:
    before = devices()
    with Network() as network:
        two_hosts(network)
        with network.inside("one"):
            lone = subprocess.Popen(["sleep", "3600"])
        assert network.processes("one") == [lone.pid]
        assert network.processes("other") == []
        assert devices() == before, "the machine's own network has no part in it"
    assert lone.wait(5) == -signal.SIGKILL
