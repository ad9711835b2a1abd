"""Where a worker looks for a port of its machines: on the host, at their own addresses, at what is published."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.model.services import Port
from hawker.network.base import Attachment, NetworkError, Wanted
from hawker.network.manager import Manager
from hawker.supervisor import proc
from hawker.worker.drivers.base import Process
from hawker.worker.machine.inside.reaching import own_ways, ways_of

ADDRESS = "fdaa:0:1:a7b:7d:f066:b83b:2"


def machine(driver: str) -> MachineRow:
    return MachineRow(
        id="0123456789abcd",
        app="web",
        name="one",
        region="ord",
        state=State.started,
        desired="started",
        version="v",
        config={"image": "shop:1"},
        resources=Resources(),
        created_at_ms=1,
        updated_at_ms=1,
        cause="a test",
        private_ip=ADDRESS,
        driver=driver,
        ports=(
            Port(protocol="tcp", internal_port=80, host_port=30001),
            Port(protocol="udp", internal_port=53, host_port=30002),
        ),
    )


def test_a_process_listens_on_the_host_itself() -> None:
    assert ways_of(None)(machine("process"), 80) == [("127.0.0.1", 80)]


def test_a_container_is_asked_at_both_of_its_addresses() -> None:
    network = Manager("a")
    attached = network.plan(Wanted(machine="0123456789abcd", number=1, address=ADDRESS))
    assert ways_of(network)(machine("container"), 80) == [(ADDRESS, 80), (attached.address4, 80)]


def test_without_a_network_it_is_asked_where_it_is_published_if_it_is() -> None:
    ways = ways_of(None)
    assert ways(machine("container"), 80) == [("127.0.0.1", 30001)]
    assert ways(machine("container"), 53) == []
    assert ways(machine("container"), 81) == []


def test_its_private_address_is_left_when_there_is_no_other() -> None:
    class Full(Manager):
        def plan(self, wanted: Wanted) -> Attachment:
            raise NetworkError("all addresses are given")

    assert ways_of(Full("a"))(machine("microvm"), 80) == [(ADDRESS, 80)]


def listening(*sockets: str) -> Process:
    listen = [("tcp", each) for each in sockets]
    return Process(pid=1, ppid=0, started_at_ms=0, cpu_s=0.0, rss_bytes=0, directory="/", command="", listen=listen)


@pytest.mark.parametrize(
    ("at", "family"), [("127.0.0.1", socket.AF_INET), ("", socket.AF_INET), ("::1", None), ("::", None)]
)
def test_a_process_is_talked_to_where_it_listens_itself(at: str, family: socket.AddressFamily | None) -> None:
    family = family or socket.AF_INET6
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("this host has no IPv6")
    with socket.create_server((at, 0), family=family) as server:
        port = server.getsockname()[1]
        own = msgspec.convert(proc.describe([os.getpid()]), list[Process])
        for address in own_ways(own, port):
            socket.create_connection(address).close()
            taken, _ = server.accept()
            taken.close()
        assert own_ways(own, port)


def test_of_the_host_a_process_opens_nothing_that_others_listen_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert own_ways([listening("0.0.0.0:80", "[::]:81")], server.getsockname()[1]) == []


def test_a_process_that_listens_on_ipv6_alone_does_not_open_the_same_port_of_ipv4() -> None:
    assert ("127.0.0.1", 80) not in own_ways([listening("[0000:0000:0000:0000:0000:0000:0000:0001]:80")], 80)


def test_of_several_sockets_those_of_loopback_are_asked_first() -> None:
    mapped = "[0000:0000:0000:0000:0000:ffff:0a00:0002]:80"
    assert own_ways([listening(mapped), listening("0.0.0.0:80", "127.0.0.1:8")], 80) == [
        ("127.0.0.1", 80),
        ("10.0.0.2", 80),
    ]
