"""A machine's network as its driver asks the host for it."""

from __future__ import annotations

from hawker.network.base import HostNetwork, Wanted
from hawker.worker.drivers.base import Dns, InstanceSpec, StartFailed


def wanted_of(spec: InstanceSpec) -> Wanted | None:
    """None for a machine without a network."""
    if spec.network is None:
        return None
    publish = tuple((port.protocol, port.internal_port, port.host_port) for port in spec.network.publish)
    return Wanted(machine=spec.machine, number=spec.network.number, address=spec.network.address, publish=publish)


def must_publish(spec: InstanceSpec, network: HostNetwork | None) -> None:
    """Raises `StartFailed` for a machine whose ports nobody could reach. Where there is no network, a machine without
    services runs without one."""
    if network is None and spec.network and spec.network.publish:
        raise StartFailed(
            "services: this worker cannot give machines a network, so their ports would lead nowhere; "
            "`hawker doctor` on its host says what is missing"
        )


def resolv_conf(dns: Dns, resolver: str) -> str:
    """A machine's /etc/resolv.conf. `resolver` is the worker's own, "" without one, for a machine that names none."""
    servers = dns.nameservers or ([resolver] if resolver else [])
    lines = [f"nameserver {server}" for server in servers]
    if dns.searches:
        lines.append(f"search {' '.join(dns.searches)}")
    if dns.options:
        lines.append(f"options {' '.join(dns.options)}")
    return "".join(f"{line}\n" for line in lines)


def hosts(name: str, address: str) -> str:
    """A machine's /etc/hosts. `address` is its own, "" for a machine without a network."""
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback", f"{address or '127.0.1.1'}\t{name}"]
    return "".join(f"{line}\n" for line in lines)
