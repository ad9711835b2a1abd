"""A worker's part of this host's network as the kernel has it: read as a `State`, and changed by operations.

Everything blocks, for some tens of microseconds; one thread at a time uses a `Kernel`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import closing, suppress
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

from hawker.network import addresses, answers
from hawker.network import netlink as nl
from hawker.network.base import AddressTaken, Attachment, NetworkError, Settings
from hawker.network.nft import Library, Tables
from hawker.network.plan import (
    Add,
    Address,
    Configure,
    Element,
    Elements,
    Link,
    Neighbour,
    Operation,
    Remove,
    RemoveLink,
    Route,
    Rules,
    State,
)

SYSCTL = Path("/proc/sys/net")
INSIDE = "eth0"
MAIN_TABLE = 254
Item = Address | Neighbour | Route
NETLINK_NETFILTER = 12
DELETE = 1 << 8 | 2
REQUEST, ACK = 0x1, 0x4
MARK, MARK_MASK = 8, 21
_HEADER = struct.Struct("=IHHII")


class Connections:
    """Forgets machines' connections in the network namespace it is made in. The kernel goes on translating those it has
    begun with: who keeps sending to a published port would be led to a machine that is gone for as long as he does not
    pause. Raises `OSError`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))

    def close(self) -> None:
        self._socket.close()

    def forget(self, mark: int) -> None:
        """All that carry a mark, of both families."""
        body = b"\0\0\0\0" + b"".join(
            struct.pack("=HHI", 8, kind, socket.htonl(it))
            for kind, it in (
                (MARK, mark),
                (MARK_MASK, 0xFFFF_FFFF),
            )
        )
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), DELETE, REQUEST | ACK, 1, 0) + body)
        status = struct.unpack_from("=i", self._socket.recv(1 << 12), _HEADER.size)[0]
        if status:
            raise OSError(-status, os.strerror(-status))


class Kernel:
    """Raises `NetworkError` with what the kernel refused. `OSError` from the constructor: no netlink or libnftables."""

    def __init__(
        self, worker: str, settings: Settings, *, netlink: type[nl.Socket] = nl.Socket, library: type[Library] = Library
    ) -> None:
        self._prefix = addresses.device_prefix(worker)
        self._own = addresses.worker_address(worker)
        self._pool = IPv4Network(settings.pool4)
        self._mtu = settings.mtu
        self._library = library()
        self._tables = Tables(worker, settings, self._library)
        self._open = netlink
        self._netlink = netlink()
        self._connections = Connections()
        self._index: dict[str, int] = {}
        self.mark = self._tables.mark

    def close(self) -> None:
        self._netlink.close()
        self._connections.close()
        self._library.close()

    def read(self) -> tuple[State, frozenset[str]]:
        """What is there of this worker, and the IPv4 addresses of the pool that others have routes to."""
        mark, elements = self._tables.read()
        links = self._links()
        names = {index: name for name, index in self._index.items()}
        routes, taken = self._routes(names)
        state = State(
            rules=mark,
            elements=elements,
            links=links,
            addresses=self._addresses(names),
            neighbours=self._neighbours(names),
            routes=routes,
        )
        return state, taken

    def filters(self) -> tuple[str, frozenset[Element]]:
        """The mark and the elements that are there."""
        return self._tables.read()

    def indexes(self) -> dict[str, int]:
        """The numbers of the links that `read` found."""
        return dict(self._index)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Rules(mark):
                self._tables.make(mark)
            case Elements(gone, new):
                self._tables.change(gone, new)
                for it in gone:
                    if it.set == "marks":
                        with _named("connection tracking"):
                            self._connections.forget(int(it.value[0]))
            case RemoveLink(name):
                self._remove_link(name)
            case Configure(link):
                self._configure(link)
            case Remove(it):
                self._remove(it)
            case Add(it):
                self._add(it)

    def connect(self, namespace: int, attached: Attachment) -> None:
        """Give a network namespace its end of a pair, whose other end is `interface` here, and its loopback. What is
        there from an earlier time is kept when it is this very pair."""
        with _named("the machine's namespace"), closing(self._open(namespace)) as inside:
            if not self._is_pair(inside, attached):
                self._remove_link(attached.interface)
                made = nl.veth(attached.interface, attached.gateway_mac, INSIDE, attached.mac, namespace, attached.mtu)
                self._netlink.tell(nl.NEWLINK, nl.CREATE | nl.EXCL, made)
            # This end is up before the other: so both have their carrier when the second one is, and send at once. The
            # kernel would let this one begin in its own time, up to a second later, and lose packets until then.
            self._bring_up(self._look_up(attached.interface))
            _furnish(inside, attached)
            nl.activate(attached.interface)

    def index(self, name: str) -> int:
        """The number of the link that has this name now, 0 if there is none."""
        self._index.pop(name, None)
        try:
            return self._look_up(name)
        except OSError as error:
            if nl.is_gone(error):
                return 0
            raise NetworkError(f"{name}: {error.strerror}") from error

    def let_forward(self) -> None:
        """Let the host pass packets on. Interfaces that took their routes from router advertisements go on to."""
        if _read(SYSCTL / "ipv4/ip_forward") != "1":
            _write(SYSCTL / "ipv4/ip_forward", "1")
        if _read(SYSCTL / "ipv6/conf/all/forwarding") != "1":
            for conf in sorted((SYSCTL / "ipv6/conf").iterdir()):
                if conf.name not in ("all", "lo") and _read(conf / "accept_ra") == "1":
                    with suppress(FileNotFoundError):  # it has just gone
                        (conf / "accept_ra").write_text("2")
            _write(SYSCTL / "ipv6/conf/all/forwarding", "1")

    def _is_pair(self, inside: nl.Socket, attached: Attachment) -> bool:
        index = self.index(attached.interface)
        if not index:
            return False
        try:
            there = inside.link(IFNAME=INSIDE)
        except OSError as error:
            if nl.is_gone(error):
                return False
            raise
        return there.peer == index and there.mac == attached.mac

    def _look_up(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = self._netlink.index(name)
        return self._index[name]

    def _links(self) -> frozenset[Link]:
        every = self._netlink.links()
        self._index = {each.name: each.number for each in every if each.name == "lo" or self._is_own(each.name)}
        return frozenset(self._described(each) for each in every if self._is_own(each.name))

    def _is_own(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def _described(self, its: answers.Link) -> Link:
        up = bool(its.flags & nl.IFF_UP)
        ready = up and its.mode == nl.NO_ADDRESSES and its.mac == addresses.GATEWAY_MAC
        return Link(its.name, ready, _read(SYSCTL / f"ipv4/conf/{its.name}/route_localnet") == "1")

    def _addresses(self, names: dict[int, str]) -> frozenset[Address]:
        return frozenset(
            Address(names[its.link], its.address)
            for its in self._netlink.addresses()
            if its.link in names and (names[its.link] != "lo" or its.address == self._own)
        )

    def _neighbours(self, names: dict[int, str]) -> frozenset[Neighbour]:
        return frozenset(
            Neighbour(names[its.link], its.address, its.mac)
            for its in self._netlink.neighbours()
            if its.link in names and its.state & nl.PERMANENT and names[its.link] != "lo"
        )

    def _routes(self, names: dict[int, str]) -> tuple[frozenset[Route], frozenset[str]]:
        found, taken = set(), set()
        for family in (nl.family("::"), nl.family("")):
            for its in self._netlink.routes(family, MAIN_TABLE):
                if its.table != MAIN_TABLE or its.length != nl.length(its.address) or not its.address:
                    continue
                name = names.get(its.link, "lo")
                if name != "lo" and addresses.is_machine(its.address, self._pool):
                    found.add(Route(name, its.address, its.source))
                elif family == nl.family("") and ip_address(its.address) in self._pool:
                    taken.add(its.address)
        return frozenset(found), frozenset(taken)

    def _remove_link(self, name: str) -> None:
        self._index.pop(name, None)
        with _named(name), _gone_is_fine():
            self._netlink.tell(nl.DELLINK, 0, nl.link(IFNAME=name))

    def _configure(self, link: Link) -> None:
        with _named(link.name):
            index = self._look_up(link.name)
            if self._netlink.link(index=index).mac != addresses.GATEWAY_MAC:  # only then: its neighbours are forgotten
                self._netlink.tell(nl.SETLINK, 0, nl.link(index=index, ADDRESS=addresses.GATEWAY_MAC))
            self._bring_up(index)
            local = SYSCTL / f"ipv4/conf/{link.name}/route_localnet"
            if (_read(local) == "1") != link.loopback:
                _write(local, "1" if link.loopback else "0")

    def _bring_up(self, index: int) -> None:
        """First of all it may make no addresses: coming up it would."""
        self._netlink.tell(nl.SETLINK, 0, nl.without_addresses(index))
        self._netlink.tell(nl.SETLINK, 0, nl.link(index=index, flags=nl.IFF_UP, change=nl.IFF_UP))

    def _add(self, it: Item) -> None:
        with _named(f"{it.device}: {it.address}"):
            match it:
                case Address():
                    self._netlink.tell(nl.NEWADDR, nl.CREATE | nl.REPLACE, self._address(it))
                case Neighbour():
                    self._netlink.tell(nl.NEWNEIGH, nl.CREATE | nl.REPLACE, self._neighbour(it))
                case Route():
                    self._add_route(it)

    def _add_route(self, it: Route) -> None:
        try:
            self._netlink.tell(nl.NEWROUTE, nl.CREATE | nl.EXCL, self._route(it))
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
            raise AddressTaken(it.device, it.address) from error

    def _remove(self, it: Item) -> None:
        with _named(f"{it.device}: {it.address}"), _gone_is_fine():
            match it:
                case Address():
                    self._netlink.tell(nl.DELADDR, 0, self._address(it))
                case Neighbour():
                    self._netlink.tell(nl.DELNEIGH, 0, self._neighbour(it))
                case Route():
                    self._netlink.tell(nl.DELROUTE, 0, self._route(it))

    def _address(self, it: Address) -> Any:
        return _address(self._look_up(it.device), it.address)

    def _neighbour(self, it: Neighbour) -> Any:
        return _neighbour(self._look_up(it.device), it.address, it.mac)

    def _route(self, it: Route) -> Any:
        more = {"PREFSRC": it.source} if it.source else {}
        return nl.route(
            family=nl.family(it.address),
            dst_len=nl.length(it.address),
            table=MAIN_TABLE,
            proto=4,
            type=1,
            scope=0 if ":" in it.address else nl.LINK_SCOPE,
            DST=it.address,
            OIF=self._look_up(it.device),
            **more,
        )


def _furnish(inside: nl.Socket, attached: Attachment) -> None:
    """Everything in a machine's namespace. May be repeated."""
    replaced = nl.CREATE | nl.REPLACE
    inside.tell(nl.SETLINK, 0, nl.link(IFNAME="lo", flags=nl.IFF_UP, change=nl.IFF_UP))
    index = inside.index(INSIDE)
    inside.tell(nl.SETLINK, 0, nl.without_addresses(index))
    inside.tell(nl.SETLINK, 0, nl.link(index=index, flags=nl.IFF_UP, change=nl.IFF_UP))
    for address in (attached.address6, attached.address4):
        inside.tell(nl.NEWADDR, replaced, _address(index, address))
    # The kernel makes this route itself, but some milliseconds after it has said that the address is there.
    local = nl.route(family=nl.family("::"), dst_len=128, table=255, type=2, proto=2, DST=attached.address6, OIF=index)
    inside.tell(nl.NEWROUTE, replaced, local)
    for gateway in (attached.gateway6, attached.gateway4):
        inside.tell(nl.NEWNEIGH, replaced, _neighbour(index, gateway, attached.gateway_mac))
        default = nl.route(
            family=nl.family(gateway),
            table=MAIN_TABLE,
            proto=4,
            type=1,
            flags=nl.RTNH_F_ONLINK,
            GATEWAY=gateway,
            OIF=index,
        )
        inside.tell(nl.NEWROUTE, replaced, default)


def _address(index: int, address: str) -> Any:
    more = {"LOCAL": address} if ":" not in address else {}
    scope = nl.LINK_SCOPE if address in (addresses.GATEWAY4, addresses.GATEWAY6) else 0
    return nl.address(
        family=nl.family(address),
        prefixlen=nl.length(address),
        index=index,
        scope=scope,
        ADDRESS=address,
        FLAGS=nl.IFA_F_NODAD if ":" in address else 0,
        **more,
    )


def _neighbour(index: int, address: str, mac: str) -> Any:
    return nl.neighbour(family=nl.family(address), ifindex=index, state=nl.PERMANENT, DST=address, LLADDR=mac)


class _named:
    """Says of an error what it was about."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise NetworkError(f"{self._what}: {error.strerror}") from error


class _gone_is_fine:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, OSError) and nl.is_gone(error)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except OSError as error:
        raise NetworkError(f"{path} cannot be set to {value}: {error.strerror}") from error
