"""A host with two workers and their machines, and an internet, each in a network namespace: for what machines reach.

Sockets made inside a namespace stay there, so that everything can be tried from one test. A listener never accepts: the
kernel completes connections, and that is all that is asked. The machine's own network has no part in it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import selectors
import socket
import subprocess
from collections.abc import Coroutine, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from tests.kit.namespaces import Network

from hawker.network.base import Attachment, Settings, Wanted
from hawker.network.manager import Manager

HOST4, HOST6 = "203.0.113.1", "2001:db8::1"
INTERNET4, INTERNET6 = "203.0.113.9", "2001:db8::9"
PATIENCE_S = 0.6
"""How long a connection is waited for that should not come about. Those that should take a millisecond or two."""
PORT = 8080
T = TypeVar("T")


COUNTS = ("set begun {", "set taken {")
"""The kernel's own, of connections: its elements come and go."""


class Try(msgspec.Struct, frozen=True):
    """A connection somebody tries, from an address of its own choice if `source` is given."""

    by: str
    address: str
    port: int = PORT
    source: str = ""


class Site:
    """`with Site() as site:`; `site.run(...)` runs what is awaited, in the host's namespace."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.network = self._stack.enter_context(Network())
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._sockets = self._stack.enter_context(ExitStack())
        self._stack.callback(self._close_managers)
        self.managers: dict[str, Manager] = {}
        self.attached: dict[str, Attachment] = {}
        self.wanted: dict[str, Wanted] = {}
        self.pids: dict[str, int] = {}
        self.network.switch("wire")
        for name, ten, four, six in (("host", 1, HOST4, HOST6), ("internet", 9, INTERNET4, INTERNET6)):
            self.network.host(name)
            self.network.plug(name, f"10.1.0.{ten}", "wire")
            device = "eth1" if name == "host" else "eth2"  # as the network numbers its ports
            self.ip(name, f"addr add {four}/24 dev {device}", f"addr add {six}/64 dev {device} nodad")

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def ip(self, where: str, *commands: str) -> str:
        """Run `ip` there, as an operator would. Returns what it printed, to be compared with itself only."""
        with self.network.inside(where):
            printed = [
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True).stdout
                for command in commands
            ]
        return "".join(printed)

    def state(self, where: str = "host") -> set[str]:
        """All that a network namespace has, as a set of lines without numbers that the kernel gives."""
        shown = self.ip(where, "-d route show table all", "-6 -d route show table all", "neigh show nud permanent")
        links = json.loads(self.ip(where, "-j addr"))
        named = [f"{link['ifname']} {its['local']}/{its['prefixlen']}" for link in links for its in link["addr_info"]]
        named += [f"{link['ifname']} {link['address']} {'UP' in link['flags']}" for link in links]
        with self.network.inside(where):
            nft = subprocess.run(["nft", "-s", "list", "ruleset"], check=True, capture_output=True, text=True).stdout
        # The kernel's own table follows the addresses, some milliseconds later.
        routes = {line.strip() for line in shown.splitlines() if "table local" not in line}
        return {*named, *routes, *_lines(nft)}

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        with self.network.inside("host"):
            return self._runner.run(call)

    def worker(self, name: str, settings: Settings | None = None) -> Manager:
        manager = self.managers[name] = Manager(name, settings)
        self.run(manager.open())
        return manager

    def process(self, name: str) -> int:
        """A process in a new network namespace, as a runtime makes for a container. Returns its id."""
        self.network.host(name)
        self.ip(name, "link set lo down")
        with self.network.inside(name):
            process = subprocess.Popen(["sleep", "infinity"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.pids[name] = process.pid
        return process.pid

    def machine(self, name: str, worker: str, network: int, publish: tuple[tuple[str, int, int], ...] = ()) -> str:
        """A machine with a listener on `PORT`. Returns its address."""
        number = len(self.attached) + 1
        address = f"fdaa:0:{network:x}:0:{len(worker):x}:0:{number:x}:2"
        self.wanted[name] = Wanted(machine=f"{number:014x}", number=network, address=address, publish=publish)
        attach = self.managers[worker].attach_namespace(self.wanted[name], self.process(name))
        self.attached[name] = self.run(attach)
        self.listen(name)
        return address

    def listen(self, where: str, port: int = PORT, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket there for both families."""
        with self.network.inside(where):
            made = self._sockets.enter_context(socket.socket(socket.AF_INET6, kind))
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind(("::", port))
            if kind == socket.SOCK_STREAM:
                made.listen(1024)
        return made

    def socket(self, where: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
        with self.network.inside(where):
            return self._sockets.enter_context(socket.socket(family, kind, protocol))

    def reached(self, tries: Iterable[Try]) -> set[Try]:
        """Those of the tries that get a connection. All are made at once."""
        found: set[Try] = set()
        with ExitStack() as stack, selectors.DefaultSelector() as waiting:
            for each in tries:
                with self.network.inside(each.by):
                    six = ":" in each.address
                    made = stack.enter_context(socket.socket(socket.AF_INET6 if six else socket.AF_INET))
                    made.setblocking(False)
                    if each.source:
                        made.bind((each.source, 0))
                    if made.connect_ex((each.address, each.port)) not in (0, errno.EINPROGRESS):
                        continue  # there is no way at all: a socket that never began has no error to ask for
                waiting.register(made, selectors.EVENT_WRITE, each)
            while waiting.get_map() and (ready := waiting.select(PATIENCE_S)):
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.add(key.data)
        return found

    def _close_managers(self) -> None:
        for manager in self.managers.values():
            self.run(manager.close())


def _lines(ruleset: str) -> set[str]:
    """Lines of rules and elements, each with where it stands."""
    found, path = set(), list[str]()
    for line in ruleset.replace("elements = {", "").splitlines():
        text = line.strip()
        if text.endswith("{") and " " in text and not text.startswith("iif"):
            path.append(text)
        elif text == "}":
            path.pop()
        elif not (path and path[-1] in COUNTS):
            found |= {f"{' '.join(path)} {item.strip(' }')}" for item in text.split(",") if item.strip(" }")}
    return found
