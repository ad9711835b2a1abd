"""Names and addresses on a host, all made from the worker's and the machine's id. Nothing here is looked up or kept.

A machine's IPv6 address is `fdaa` (16 bits), its network (32), its host (32), the machine (32), 2: machines of one
network have the first 48 bits in common. A worker's own address there has network 0, which no app has, and ends in 3.
"""

from __future__ import annotations

from hashlib import blake2b
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

GATEWAY6 = "fe80::1"
GATEWAY4 = "169.254.1.1"
GATEWAY_MAC = "02:68:6b:00:00:01"
"""Every host end has these. A machine that was suspended goes on elsewhere and finds its gateway as it knew it."""
RESOLVER = "fdaa::3"
"""Where machines ask for names, on every host. Each worker's filters lead it to the worker's own address."""
RESOLVER_PORT = 1053
"""The port there: a name server of the host's own may have port 53 of every address."""
DEVICES = "hk"
"""What the name of every host end begins with, whatever its worker."""
SPACE6 = IPv6Network("fdaa::/16")

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def tag(worker: str) -> str:
    """Five letters and digits for a worker, part of the names of its interfaces."""
    return _text(_digest("worker", worker), 5)


def device_prefix(worker: str) -> str:
    """What the names of all host ends of a worker begin with."""
    return DEVICES + tag(worker)


def device(worker: str, machine: str) -> str:
    """A host end: 15 characters, the most that Linux takes."""
    return device_prefix(worker) + _text(_digest("machine", worker, machine), 8)


def mac(worker: str, machine: str) -> str:
    """The hardware address of the machine's interface: locally administered, unicast."""
    octets = bytearray(_digest("mac", worker, machine)[:6])
    octets[0] = octets[0] & 0xFC | 0x02
    return ":".join(f"{octet:02x}" for octet in octets)


def mark(host_end: str) -> int:
    """What the connections of a host end's machine carry: never 0, which is no mark."""
    return int.from_bytes(_digest("mark", host_end)[:4], "big") | 1


def link_local(hardware: str) -> str:
    """The address that a guest's kernel makes itself of its hardware address (RFC 4291, appendix A)."""
    octets = bytes.fromhex(hardware.replace(":", ""))
    low = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(IPv6Address(b"\xfe\x80" + bytes(6) + low))


def network(address: str) -> str:
    """The first 48 bits of an address, the rest zero: what machines of one network have in common."""
    return str(IPv6Address(int(IPv6Address(address)) >> 80 << 80))


def number(address: str) -> int:
    """The number of the network that an address belongs to."""
    return int(IPv6Address(address)) >> 80 & 0xFFFF_FFFF


def worker_address(worker: str) -> str:
    """The worker's own: where its resolver listens, and whom machines see when the host calls them."""
    return str(IPv6Address(0xFDAA << 112 | _host(worker) << 48 | 3))


def machine_address(network: int, worker: str, machine: str) -> str:
    """The private address of a machine that this worker makes, with all its eight groups, as the API shows it."""
    host, low = _host(worker), int(machine, 16) & 0xFFFF_FFFF
    groups = (network >> 16, network & 0xFFFF, host >> 16, host & 0xFFFF, low >> 16, low & 0xFFFF)
    return ":".join(["fdaa", *(f"{group:x}" for group in groups), "2"])


def is_machine(address: str, pool: IPv4Network) -> bool:
    """Whether an address is such as machines have."""
    found = ip_address(address)
    return found in pool if isinstance(found, IPv4Address) else found in SPACE6


def pick4(worker: str, machine: str, pool: IPv4Network, taken: set[str] | frozenset[str]) -> str:
    """The first address for a machine that is not taken, from a place that depends on both ids only. The pool's first
    and last addresses are never used. Raises `LookupError` when every other one is taken."""
    size = pool.num_addresses - 2
    start = int.from_bytes(_digest("address", worker, machine)[:8], "big")
    for step in range(size):
        address = str(IPv4Address(int(pool.network_address) + 1 + (start + step) % size))
        if address not in taken:
            return address
    raise LookupError(f"all {size} addresses of {pool} are in use")


def _host(worker: str) -> int:
    return int.from_bytes(blake2b(worker.encode(), digest_size=4).digest(), "big")


def _digest(*parts: str) -> bytes:
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _text(digest: bytes, length: int) -> str:
    bits = int.from_bytes(digest, "big")
    return "".join(_LETTERS[bits >> 5 * place & 31] for place in range(length))
