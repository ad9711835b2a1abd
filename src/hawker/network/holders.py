"""Which program of the host has a port that a machine's would be published on.

The filters send what comes for a published port to the machine before any program of the host sees it: one that listens
there would go on, and nobody would reach it. So the worker looks first. What is told is of the calling thread's network
namespace, and of this moment.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path

import msgspec

_KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
_TAKING = {"tcp": "0A", "udp": "07"}
"""States, of <net/tcp_states.h>: TCP_LISTEN; TCP_CLOSE, which UDP has where it is connected to nobody."""


class Holder(msgspec.Struct, frozen=True):
    """`name` and `pid` are "" and 0 where we may not know them."""

    protocol: str
    port: int
    name: str = ""
    pid: int = 0

    def __str__(self) -> str:
        who = f"{self.name} (process {self.pid})" if self.pid else "another program of the host"
        return f"port {self.port}/{self.protocol} of this host is held by {who}"


def holder(protocol: str, port: int, publish_on: Sequence[str] = ()) -> Holder | None:
    """Who takes what comes to a port. `publish_on` are the networks of the addresses that matter, empty: all."""
    if is_free(protocol, port):
        return None
    for inode in _taking(protocol, port, publish_on):
        return _of(inode, Holder(protocol, port))
    return None  # a connection of somebody who is a client, which the filters leave alone


def is_free(protocol: str, port: int) -> bool:
    """Whether `holder` would name nobody, in some 20 µs: right when it says yes."""
    with _probe(protocol) as probe:
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # and IPv4's, too
        if protocol == "tcp":  # what waits for its last packets takes no new ones
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)  # the latter of low ports, whoever has them
    return True


def _probe(protocol: str) -> socket.socket:
    kind = _KINDS[protocol] | socket.SOCK_CLOEXEC
    try:
        return socket.socket(socket.AF_INET6, kind)
    except OSError as error:  # a kernel that was told to do without IPv6
        if error.errno != errno.EAFNOSUPPORT:
            raise
        return socket.socket(socket.AF_INET, kind)


def _taking(protocol: str, port: int, publish_on: Sequence[str]) -> Iterator[str]:
    """The inodes of sockets that take what comes for a port (proc_net_tcp(5))."""
    networks = [ip_network(text, strict=False) for text in publish_on]
    for name in (protocol, f"{protocol}6"):
        with suppress(OSError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if int(number, 16) != port or fields[3] != _TAKING[protocol]:
                    continue
                where = _address(address)
                if not networks or where.is_unspecified or any(where in network for network in networks):
                    yield fields[9]


def _address(text: str) -> IPv4Address | IPv6Address:
    """The kernel writes words of 32 bits in its own order of bytes."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(raw) == 4:
        return IPv4Address(raw)
    return IPv6Address(raw).ipv4_mapped or IPv6Address(raw)


def _of(inode: str, unknown: Holder) -> Holder:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if any(os.readlink(f"/proc/{pid}/fd/{fd}") == f"socket:[{inode}]" for fd in os.listdir(f"/proc/{pid}/fd")):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                return msgspec.structs.replace(unknown, name=name, pid=int(pid))
    return unknown
