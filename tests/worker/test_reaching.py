"""Where a worker looks for a port of its machines: on the host, at their own addresses, at what is published."""

from __future__ import annotations

from hawker.model.guest import Resources
from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.model.services import Port
from hawker.network.base import Attachment, NetworkError, Wanted
from hawker.network.manager import Manager
from hawker.worker.reaching import ways_of

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
