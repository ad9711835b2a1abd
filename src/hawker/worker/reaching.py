"""How a worker's host reaches a port of one of its machines.

A process listens on the host itself. A container or microVM has addresses of its own, by both of which its host reaches
it: its program may listen on either family. Where it has no network, its published ports are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hawker.model.config import PROCESS
from hawker.model.rows import MachineRow
from hawker.network.addresses import number
from hawker.network.base import HostNetwork, NetworkError, Wanted
from hawker.worker.probing import Address

LOOPBACK = "127.0.0.1"


def ways_of(network: HostNetwork | None) -> Callable[[MachineRow, int], Sequence[Address]]:
    """For machines that run: the likeliest way first, none where there is none."""

    def ways(row: MachineRow, port: int) -> list[Address]:
        if row.driver == PROCESS:
            return [(LOOPBACK, port)]
        if network is None:
            published = [p for p in row.ports if p.internal_port == port and p.protocol == "tcp"]
            return [(LOOPBACK, each.host_port) for each in published]
        wanted = Wanted(machine=row.id, number=number(row.private_ip), address=row.private_ip)
        try:
            attached = network.plan(wanted)
        except NetworkError:  # its IPv4 addresses are all given
            return [(row.private_ip, port)]
        return [(attached.address6, port), (attached.address4, port)]

    return ways
