"""What an idle guest is told to become a machine: pairs of a word and a value, see `init/guest_configuration.c`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from hashlib import blake2b

from hawker.model.image import ImageConfig
from hawker.network.base import Attachment
from hawker.worker.drivers.base import TERMINAL, InstanceSpec, StartFailed
from hawker.worker.drivers.container.command import NoCommand, resolve
from hawker.worker.drivers.networks import hosts, resolv_conf

Pair = tuple[str, bytes | str | int]
INTERFACE = 2  # the index of eth0: the first after the loopback
SEED_BYTES = 64

# <linux/rtnetlink.h>, <linux/neighbour.h>, <linux/if_addr.h>
_NEWLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 20, 24, 28
_REQUEST, _ACK, _REPLACE, _CREATE = 1, 4, 0x100, 0x400
_UP = 1
_NODAD, _PERMANENT = 0x02, 0x80


def told(
    spec: InstanceSpec, image: ImageConfig, attachment: Attachment | None, *, clock_ns: int, seed: bytes
) -> list[Pair]:
    """The pairs, in the order in which the guest carries them out. Raises `StartFailed` for what a guest cannot
    have."""
    if spec.mounts:
        paths = ", ".join(mount.path for mount in spec.mounts)
        raise StartFailed(
            f"mounts ({paths}): a microVM takes no directories of its host; leave them out or use containers"
        )
    try:
        command = resolve(spec, image)
    except NoCommand as error:
        raise StartFailed(str(error)) from error
    hostname = spec.hostname or spec.machine
    given = {*spec.env, *(entry.partition("=")[0] for entry in image.env)}
    pairs: list[Pair] = [("clock", clock_ns), ("seed", seed), ("disks", ""), ("hostname", hostname)]
    pairs += _network(attachment)
    pairs += [("file", _file(path, content)) for path, content in _own_files(spec, hostname, attachment)]
    pairs += [("tmpfs", f"{tmpfs.size_mib} {tmpfs.path}") for tmpfs in spec.tmpfs]
    pairs += [("file", _file(file.path, file.content, file.mode)) for file in spec.files]
    pairs.append(("directory", command.cwd))
    if spec.root.read_only:
        pairs.append(("readonly", ""))
    pairs.append(("pids", spec.limits.pids))
    pairs += [
        ("environment", f"{name}={value}") for name, value in command.env.items() if name != "HOME" or name in given
    ]
    pairs += [("argument", argument) for argument in command.argv]
    pairs += [("user", command.user), ("cwd", command.cwd)]
    if spec.tty:
        pairs.append(("terminal", " ".join(map(str, TERMINAL))))
    return pairs


def _own_files(spec: InstanceSpec, hostname: str, attachment: Attachment | None) -> list[tuple[str, bytes]]:
    identity = blake2b(spec.machine.encode(), digest_size=16, person=b"machine-id").hexdigest()
    return [
        ("/etc/hostname", f"{hostname}\n".encode()),
        ("/etc/hosts", hosts(hostname, attachment.address6 if attachment else "").encode()),
        ("/etc/resolv.conf", resolv_conf(spec.dns, attachment.resolver if attachment else "").encode()),
        ("/etc/machine-id", f"{identity}\n".encode()),
    ]


def _file(path: str, content: bytes, mode: int = 0o644) -> bytes:
    return f"{mode:o} {path}".encode() + b"\0" + content


# --- the network -----------------------------------------------------------------------------------------------------


def _network(attachment: Attachment | None) -> list[Pair]:
    up = _link(1, up=True)
    if attachment is None:
        return [("netlink", up)]
    settings = {"accept_dad": "0", "dad_transmits": "0", "accept_ra": "0", "autoconf": "0"}
    own = [("write", f"/proc/sys/net/ipv6/conf/eth0/{name}\0{value}") for name, value in settings.items()]
    messages = [up, *guest_network(attachment)]
    return [*own, *(("netlink", message) for message in messages)]


def guest_network(attachment: Attachment) -> Sequence[bytes]:
    """What sets up `eth0`: its hardware address, its addresses, and everything else by way of the gateways, whose
    hardware address is known, so that nobody is asked for it."""
    messages = [_link(INTERFACE, mac=attachment.mac, mtu=attachment.mtu), _link(INTERFACE, up=True)]
    for family, address, gateway in (
        (socket.AF_INET6, attachment.address6, attachment.gateway6),
        (socket.AF_INET, attachment.address4, attachment.gateway4),
    ):
        messages += [
            _address(family, address),
            _neighbour(family, gateway, attachment.gateway_mac),
            _route(family, gateway, None),
            _route(family, None, gateway),
        ]
    return messages


def _message(kind: int, body: bytes, *attributes: tuple[int, bytes]) -> bytes:
    for number, value in attributes:
        body += struct.pack("<HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("<IHHII", 16 + len(body), kind, _REQUEST | _ACK | _CREATE | _REPLACE, 1, 0) + body


def _link(index: int, *, up: bool = False, mac: str = "", mtu: int = 0) -> bytes:
    body = struct.pack("<BxHiII", 0, 0, index, _UP if up else 0, _UP if up else 0)
    attributes = [(1, bytes.fromhex(mac.replace(":", "")))] if mac else []  # IFLA_ADDRESS
    if mtu:
        attributes.append((4, struct.pack("<I", mtu)))  # IFLA_MTU
    raw = _message(_NEWLINK, body, *attributes)
    return raw[:6] + struct.pack("<H", _REQUEST | _ACK) + raw[8:]  # the interface is there already


def _address(family: int, address: str) -> bytes:
    raw = socket.inet_pton(family, address)
    body = struct.pack("<BBBBI", family, len(raw) * 8, _NODAD if family == socket.AF_INET6 else 0, 0, INTERFACE)
    return _message(_NEWADDR, body, (1, raw), (2, raw))  # IFA_ADDRESS, IFA_LOCAL


def _neighbour(family: int, address: str, mac: str) -> bytes:
    body = struct.pack("<BxxxiHBB", family, INTERFACE, _PERMANENT, 0, 0)
    return _message(
        _NEWNEIGH, body, (1, socket.inet_pton(family, address)), (2, bytes.fromhex(mac.replace(":", "")))
    )  # NDA_DST, NDA_LLADDR


def _route(family: int, to: str | None, gateway: str | None) -> bytes:
    """A route to one address on the link itself, or to everything by way of a gateway."""
    table, static, link, universe, unicast = 254, 4, 253, 0, 1  # RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_*, RTN_UNICAST
    raw = socket.inet_pton(family, to) if to else b""
    scope = link if to and family == socket.AF_INET else universe
    body = struct.pack("<BBBBBBBBI", family, len(raw) * 8, 0, 0, table, static, scope, unicast, 0)
    attributes = [(4, struct.pack("<I", INTERFACE))]  # RTA_OIF
    if to:
        attributes.append((1, raw))  # RTA_DST
    if gateway:
        attributes.append((5, socket.inet_pton(family, gateway)))  # RTA_GATEWAY
    return _message(_NEWROUTE, body, *attributes)
