"""The kernel's interfaces, addresses, neighbours and routes, by rtnetlink. pyroute2 writes the messages.

Requests go over a plain socket and wait for the kernel's answer: each takes some tens of microseconds. A socket belongs
to the network namespace that its thread was in when it was made, and works on that namespace for good.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from hawker.network import answers

NEWLINK, DELLINK, GETLINK, SETLINK = 16, 17, 18, 19
NEWADDR, DELADDR, GETADDR = 20, 21, 22
NEWROUTE, DELROUTE, GETROUTE = 24, 25, 26
NEWNEIGH, DELNEIGH, GETNEIGH = 28, 29, 30
REQUEST, ACK, ROOT, MATCH = 0x1, 0x4, 0x100, 0x200
DUMP = ROOT | MATCH
REPLACE, EXCL, CREATE = 0x100, 0x200, 0x400
NLMSG_ERROR, NLMSG_DONE = 2, 3
F_MANY, F_INTERRUPTED = 0x2, 0x10
F_ACK_TLVS = 0x200
SOL_NETLINK, CAP_ACK, EXT_ACK, STRICT_CHECK = 270, 10, 11, 12
IFF_UP = 0x1
PERMANENT = 0x80
IFA_F_NODAD = 0x02
RTNH_F_ONLINK = 4
CLONE_NEWNET = 0x4000_0000
NO_ADDRESSES = 1
"""IN6_ADDR_GEN_MODE_NONE: the kernel makes no link-local address."""
LINK_SCOPE = 253
SIOCETHTOOL, ETHTOOL_GLINK = 0x8946, 0xA
SKIP_STATISTICS = 1 << 3
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class Socket:
    """One rtnetlink socket in this thread's network namespace, or in the one that a descriptor stands for. Raises
    `OSError`."""

    def __init__(self, namespace: int | None = None) -> None:
        self._socket = _opened() if namespace is None else _in_namespace(namespace)
        self._sequence = 0
        self._interrupted = False

    def close(self) -> None:
        self._socket.close()

    def tell(self, kind: int, flags: int, message: Any) -> None:
        """Have something changed. Raises `OSError` with the kernel's reason."""
        self._exchange(kind, ACK | flags, message)

    def link(self, **which: Any) -> answers.Link:
        """The link of a name or number."""
        (message,) = self._exchange(GETLINK, 0, link(EXT_MASK=SKIP_STATISTICS, **which))
        return answers.link(message)

    def index(self, name: str) -> int:
        return self.link(IFNAME=name).number

    def links(self) -> list[answers.Link]:
        return self._dump(GETLINK, answers.link, lambda: link(EXT_MASK=SKIP_STATISTICS))

    def addresses(self) -> list[answers.Address]:
        return self._dump(GETADDR, answers.address, address)

    def neighbours(self) -> list[answers.Neighbour]:
        return self._dump(GETNEIGH, answers.neighbour, neighbour)

    def routes(self, family: int, table: int) -> list[answers.Route]:
        return self._dump(GETROUTE, answers.route, lambda: route(family=family, table=table))

    def _dump(self, kind: int, read: Callable[[bytes], T], form: Callable[[], Any]) -> list[T]:
        """Everything of a kind; asked again when it changed meanwhile."""
        while True:
            found = self._exchange(kind, DUMP, form())
            if not self._interrupted:
                return [read(message) for message in found]

    def _exchange(self, kind: int, flags: int, message: Any) -> list[bytes]:
        self._sequence += 1
        self._interrupted = False
        message["header"]["type"] = kind
        message["header"]["flags"] = REQUEST | flags
        message["header"]["sequence_number"] = self._sequence
        message.encode()
        self._socket.send(message.data)
        return list(self._answers())

    def _answers(self) -> Iterator[bytes]:
        while True:
            data = self._socket.recv(1 << 17)
            at, many = 0, False
            while at < len(data):
                length, kind, flags, sequence, _ = answers.HEADER.unpack_from(data, at)
                part, at = data[at : at + length], at + (length + 3 & ~3)
                if sequence != self._sequence:
                    continue  # of a request that was given up
                many = bool(flags & F_MANY)
                self._interrupted |= bool(flags & F_INTERRUPTED)
                if kind in (NLMSG_ERROR, NLMSG_DONE):
                    _check(part)
                    return
                yield part
            if not many:
                return


def link(**attributes: Any) -> Any:
    return _message(ifinfmsg, "IFLA_", attributes)


def address(**attributes: Any) -> Any:
    return _message(ifaddrmsg, "IFA_", attributes)


def neighbour(**attributes: Any) -> Any:
    return _message(ndmsg, "NDA_", attributes)


def route(**attributes: Any) -> Any:
    return _message(rtmsg, "RTA_", attributes)


def without_addresses(index: int) -> Any:
    """Lets the kernel make no addresses of its own on a link."""
    inner = {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", NO_ADDRESSES]]}
    return link(index=index, AF_SPEC={"attrs": [["AF_INET6", inner]]})


def veth(name: str, mac: str, peer_name: str, peer_mac: str, peer_namespace: int, mtu: int) -> Any:
    """Make a veth pair whose other end is in a namespace."""
    peer = {
        "attrs": [
            ["IFLA_IFNAME", peer_name],
            ["IFLA_ADDRESS", peer_mac],
            ["IFLA_MTU", mtu],
            ["IFLA_NET_NS_FD", peer_namespace],
        ]
    }
    kind = {"attrs": [["IFLA_INFO_KIND", "veth"], ["IFLA_INFO_DATA", {"attrs": [["VETH_INFO_PEER", peer]]}]]}
    return link(IFNAME=name, ADDRESS=mac, MTU=mtu, LINKINFO=kind)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def length(address: str) -> int:
    """Bits of an address."""
    return 128 if ":" in address else 32


def activate(device: str) -> None:
    """Let the kernel take notice now that a device has got its carrier: to be asked for it makes it look."""
    value = ctypes.create_string_buffer(struct.pack("=II", ETHTOOL_GLINK, 0))
    request = struct.pack("16sP", device.encode(), ctypes.addressof(value)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, SIOCETHTOOL, request)


def _message(form: Any, prefix: str, attributes: dict[str, Any]) -> Any:
    """Small names are fields of the header, capitals attributes."""
    message = form()
    for name, value in attributes.items():
        if name.islower():
            message[name] = value
    message["attrs"] = [[prefix + name, value] for name, value in attributes.items() if not name.islower()]
    return message


def _opened() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    made.bind((0, 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    for option in (CAP_ACK, EXT_ACK, STRICT_CHECK):
        made.setsockopt(SOL_NETLINK, option, 1)
    return made


def _in_namespace(namespace: int) -> socket.socket:
    """Run this in a thread of its own, which ends in that namespace: no thread has to switch back."""
    results: list[socket.socket | OSError] = []

    def run() -> None:
        try:
            if _libc.setns(namespace, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            results.append(_opened())
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=run, name="hawker-setns")
    thread.start()
    thread.join()
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def _check(part: bytes) -> None:
    """Raise what an acknowledgement or the end of a list says."""
    if len(part) < 20:
        return
    status, flags = struct.unpack_from("=i", part, 16)[0], struct.unpack_from("=H", part, 6)[0]
    if status == 0:
        return
    text = os.strerror(-status)
    if flags & F_ACK_TLVS:
        text = _said(part) or text
    raise OSError(-status, text)


def _said(part: bytes) -> str:
    """The kernel's own words, attribute 1 behind the header of the request."""
    at = 20 + answers.HEADER.size
    while at + 4 <= len(part):
        size, kind = struct.unpack_from("=HH", part, at)
        if size < 4:
            return ""
        if kind == 1:
            return part[at + 4 : at + size].rstrip(b"\0").decode(errors="replace")
        at += size + 3 & ~3
    return ""


def is_gone(error: OSError) -> bool:
    """Whether an error says that what was to be removed or changed is not there."""
    return error.errno in (errno.ENODEV, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENOENT, errno.ENXIO)
