"""How a worker's host reaches a port of one of its machines.

A process listens on the host itself. A container or microVM has addresses of its own, by both of which its host reaches
it: its program may listen on either family. Where it has no network, its published ports are left.

What listens on the host need not be the machine's: whoever may talk to its ports may talk to those that its own
programs listen on, `own_ways`, and to nothing else of the host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence

from hawker.model.config import PROCESS
from hawker.model.rows import MachineRow
from hawker.network.addresses import number
from hawker.network.base import HostNetwork, NetworkError, Wanted
from hawker.worker.drivers.base import Process
from hawker.worker.machine.inside.probing import Address

LOOPBACK, LOOPBACK6 = "127.0.0.1", "::1"


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


def own_ways(processes: Iterable[Process], port: int) -> list[Address]:
    """To the sockets that a machine's programs listen on at this port of the host, each at an address of its own
    family: at the other one it may be somebody else who listens. Loopbacks first."""
    found = {}
    for process in processes:
        for protocol, shown in process.listen:
            text, _, number = shown.rpartition(":")
            if protocol == "tcp" and int(number) == port:
                address = _to(ipaddress.ip_address(text.strip("[]")))
                found[address] = not ipaddress.ip_address(address).is_loopback
    return [(address, port) for address in sorted(found, key=lambda each: (found[each], each))]


def _to(bound: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(bound, ipaddress.IPv6Address) and bound.ipv4_mapped is not None:
        bound = bound.ipv4_mapped
    if not bound.is_unspecified:
        return str(bound)
    return LOOPBACK6 if bound.version == 6 and _has_ipv6() else LOOPBACK


def _has_ipv6() -> bool:
    """Programs may listen on all addresses of IPv6 where the host has none, for those of IPv4."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind((LOOPBACK6, 0))
    except OSError:
        return False
    return True
