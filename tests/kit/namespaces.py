"""A network of its own for tests: hosts in network namespaces of the kernel, on switches whose links can be cut.

    with Network() as network:
        network.switch("ord")
        network.switch("mad", above="ord")
        network.host("ord-1")
        network.plug("ord-1", "10.1.0.1", "ord")
        with network.inside("ord-1"):
            ...  # sockets made and processes started here are that host's
        network.cut("mad")  # from everything on the other side of its link to "ord"

The namespaces have no names. They live as long as a file descriptor of ours or a process inside them, so nothing can be
left on the machine, whatever becomes of the tests, and no name can clash. The machine's own network has no part in it.
A cut loses packets without a word, as between real sites: the hosts' own links stay up, and nobody asks who has an
address, because everybody knows everybody's. Needs root and `ip`, of iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec
from tests.kit.waiting import wait_until

CLONE_NEWNET = 0x4000_0000
PREFIX = 8
"""Bits of an address that a net has in common."""
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def missing_for_namespaces() -> str:
    """Why there can be no `Network` here, or "" when there can."""
    if shutil.which("ip") is None:
        return "needs ip, of iproute2"
    try:
        os.close(_in_thread(_namespace))
    except OSError as error:
        return f"needs to make network namespaces: {error.strerror}"
    return ""


class Port(msgspec.Struct, frozen=True):
    """An interface of a host."""

    host: str
    address: str


class Network:
    """Switches in a tree, hosts on them. At the end every process of a host is killed."""

    def __init__(self) -> None:
        self._hosts: dict[str, int] = {}  # descriptors that keep their namespaces
        self._ports: list[Port] = []
        self._switches: dict[str, int] = {}
        self._core = _in_thread(_namespace)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def switch(self, name: str, above: str | None = None) -> None:
        """A switch, connected to the one `above`."""
        number = self._switches[name] = len(self._switches)
        commands = [f"link add sw{number} type bridge", f"link set sw{number} up"]
        if above is not None:
            commands += [
                f"link add up{number} type veth peer name down{number}",
                f"link set up{number} master sw{number} up",
                f"link set down{number} master sw{self._switches[above]} up",
            ]
        self._ip(self._core, commands)

    def host(self, name: str) -> None:
        """A host without a network."""
        self._hosts[name] = _in_thread(_namespace)
        self._ip(self._hosts[name], ["link set lo up"])

    def plug(self, host: str, address: str, switch: str) -> None:
        """Give a host an address on a switch. It knows all earlier ones of the same net and is known to them."""
        number = len(self._ports) + 1
        device = f"eth{number}"
        near = [(n, port) for n, port in enumerate(self._ports, 1) if _net(port.address) == _net(address)]
        made = [
            f"link add {device} type veth peer name port{number} netns /proc/{os.getpid()}/fd/{self._core}",
            f"link set {device} address {_mac(number)} addrgenmode none",
            f"addr add {address}/{PREFIX} dev {device}",
            f"link set {device} up",
        ]
        known = [f"neigh add {port.address} lladdr {_mac(n)} dev {device}" for n, port in near]
        self._ip(self._hosts[host], made + known)
        self._ip(self._core, [f"link set port{number} master sw{self._switches[switch]} up"])
        for n, port in near:
            self._ip(self._hosts[port.host], [f"neigh add {address} lladdr {_mac(number)} dev eth{n}"])
        self._ports.append(Port(host, address))

    def cut(self, switch: str) -> None:
        """Lose everything between a switch, with what is below it, and the one above."""
        self._ip(self._core, [f"link set up{self._switches[switch]} down"])

    def mend(self, switch: str) -> None:
        self._ip(self._core, [f"link set up{self._switches[switch]} up"])

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """This thread is on the host until the block's end, as is whatever it starts."""
        own = _open_own()
        try:
            _enter(self._hosts[name])
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(own)

    def processes(self, name: str) -> list[int]:
        """The processes of a host that run."""
        wanted = os.fstat(self._hosts[name]).st_ino
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_in(pid, wanted)]

    def kill_all(self, name: str) -> None:
        """The host's power fails. Returns once nothing of it runs."""

        def killed() -> bool:
            for pid in (pids := self.processes(name)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended by itself meanwhile
            return not pids

        wait_until(killed, f"every process of {name} has ended")

    def close(self) -> None:
        """May be called again."""
        for name in self._hosts:
            self.kill_all(name)
        for namespace in self._hosts.values():
            os.close(namespace)
        self._hosts.clear()
        if self._core >= 0:
            os.close(self._core)
            self._core = -1

    def _ip(self, namespace: int, commands: list[str]) -> None:
        def run() -> subprocess.CompletedProcess[str]:
            _enter(namespace)
            lines = "".join(f"{command}\n" for command in commands)
            return subprocess.run(["ip", "-batch", "-"], input=lines, capture_output=True, text=True)

        done = _in_thread(run)
        assert done.returncode == 0, f"{done.stderr.strip()}; commands: {commands}"


def _is_in(pid: int, namespace: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == namespace
    except OSError:  # it has ended; a zombie is in no namespace any more
        return False


def _net(address: str) -> str:
    return address.partition(".")[0]


def _mac(number: int) -> str:
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


def _in_thread(call: Callable[[], T]) -> T:
    """Call it where a change of namespace ends with the thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again where it was called for
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _namespace() -> int:
    """Give this thread a new network namespace. Returns a descriptor of it."""
    _checked(_libc.unshare(CLONE_NEWNET))
    return _open_own()


def _open_own() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    _checked(_libc.setns(namespace, CLONE_NEWNET))


def _checked(status: int) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
