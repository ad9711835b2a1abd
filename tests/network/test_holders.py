"""Which program of the host has a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hawker.network.holders import Holder, holder

MINE = Path("/proc/self/comm").read_text().strip()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_who_takes_what_comes_to_a_port_is_known_by_name(protocol: str, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM) as taking:
        taking.bind((address, 0))
        port = taking.getsockname()[1]
        if protocol == "tcp":
            taking.listen()
        found = holder(protocol, port)
        assert found == Holder(protocol, port, MINE, os.getpid())
        assert str(found) == f"port {port}/{protocol} of this host is held by {MINE} (process {os.getpid()})"
    assert holder(protocol, port) is None


def test_whoever_only_calls_out_holds_nothing_and_who_is_elsewhere_is_not_in_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as client:
            assert holder("tcp", client.getsockname()[1]) is None
        assert holder("udp", port) is None
        assert holder("tcp", port, ["127.0.0.0/8"])
        assert holder("tcp", port, ["203.0.113.7"]) is None


def test_a_holder_whom_we_may_not_know_is_some_program() -> None:
    assert str(Holder("tcp", 80)) == "port 80/tcp of this host is held by another program of the host"
