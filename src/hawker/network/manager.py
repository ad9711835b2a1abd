"""The network of a worker's machines on this host.

One thread changes it, one change after the other. Nothing is made on a host before its first machine is attached, and
what reads and writes the kernel's state (a tenth of a second of imports, and ten megabytes) is loaded then, or at once
where a worker before this one left something.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from hawker.errors import Invalid
from hawker.network import addresses, nft, plan, ruleset
from hawker.network.base import AddressTaken, Attachment, NetworkError, Settings, Wanted
from hawker.network.holders import holder
from hawker.network.watching import Watch

if TYPE_CHECKING:
    from hawker.network.keeper import Keeper
    from hawker.network.kernel import Kernel

IDLE_S = 5.0
"""How long filters stay after the last machine has gone: a machine may come back at once."""
NET_ADMIN, SYS_ADMIN = 12, 21
POOL_LEAST = 16
MTU_LEAST, MTU_MOST = 1280, 65_535
"""IPv6 asks for the least."""
CONNECTIONS_MOST = 1 << 24
TRACKED = 262_144
"""What Linux keeps where memory is not small (`nf_conntrack_max`, since 5.15)."""
_NET = Path("/proc/thread-self/net")
R = TypeVar("R")


class Manager:
    """The `HostNetwork` of one worker. `worker` names it among all that share the host: two managers of one name cannot
    be open at once. Everything raises `NetworkError`; wrong settings are `Invalid`."""

    def __init__(
        self,
        worker: str,
        settings: Settings | None = None,
        *,
        kernel: Callable[[str, Settings], Kernel] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._worker = worker
        self._settings = checked(settings or Settings())
        if self._settings.connections is None:
            self._settings = replace(self._settings, connections=an_eighth_of_tracked())
        self._pool = IPv4Network(self._settings.pool4)
        self._make = kernel
        self._idle_s = idle_s
        self._keeper: Keeper | None = None
        self._watch: Watch | None = None
        self._tidying: asyncio.TimerHandle | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock: socket.socket | None = None
        self._four: dict[str, str] = {}  # IPv4 addresses given, by host end
        self._planned: set[str] = set()  # host ends that somebody asked about since this opened
        self._taken: set[str] = set()  # by others

    @property
    def own(self) -> str:
        return addresses.worker_address(self._worker)

    @staticmethod
    def problem() -> str:
        """What this host lacks for machines to have a network, or ""."""
        return problem()

    async def open(self) -> None:
        """Look at what is there. Changes nothing."""
        if self._thread is not None:
            return
        if found := problem():
            raise NetworkError(found)
        self._lock = _lock(self._worker)
        self._thread = ThreadPoolExecutor(1, "hawker-network")
        self._four, self._planned = {}, set()
        try:
            self._taken = await self._run(partial(_routed, self._pool))
            if await self._run(partial(_anything_of, self._worker)):
                keeper = await self._run(self._kept)
                self._four, self._taken = dict(keeper.given), set(keeper.taken)
            self._watch = Watch(self.restore, await self._run(threading.get_native_id))
            self._watch.open()
        except OSError as error:
            await self.close()
            raise NetworkError(f"netlink cannot be used: {error.strerror}") from error
        except BaseException:
            await self.close()
            raise

    async def close(self, *, remove: bool = False) -> None:
        """Let go. Machines keep their network. Without any, and always with `remove`, nothing of it is left but that
        the host forwards."""
        try:
            if self._tidying is not None:
                self._tidying.cancel()
                self._tidying = None
            if self._watch is not None:
                await self._watch.close()
                self._watch = None
            if self._thread is not None:
                await self._run(partial(self._let_go, remove))
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            if self._lock is not None:
                self._lock.close()

    def plan(self, wanted: Wanted) -> Attachment:
        device = addresses.device(self._worker, wanted.machine)
        if device not in self._four:
            taken = self._taken | set(self._four.values())
            try:
                self._four[device] = addresses.pick4(self._worker, wanted.machine, self._pool, taken)
            except LookupError as error:
                raise NetworkError(str(error)) from error
        self._planned.add(device)
        return plan.attachment(self._worker, wanted, self._four[device], self._settings.mtu)

    def holder(self, protocol: str, port: int) -> str:
        found = holder(protocol, port, self._settings.publish_on)
        return str(found) if found else ""

    async def attach_namespace(self, wanted: Wanted, pid: int) -> Attachment:
        keeper = await self._run(self._kept)
        while True:
            attached = self.plan(wanted)
            try:
                await self._run(partial(self._refuse_held, keeper, wanted, attached))
                await self._run(partial(keeper.attach_namespace, wanted, attached, pid))
                return attached
            except AddressTaken as taken:  # by another worker, since this one looked
                if taken.address != attached.address4:
                    raise
                self._give_up(attached)

    async def attach_tap(self, wanted: Wanted) -> Attachment:
        attached = self.plan(wanted)
        try:
            keeper = await self._run(self._kept)
            await self._run(partial(self._refuse_held, keeper, wanted, attached))
            await self._run(lambda: keeper.attach(wanted, attached))
        except AddressTaken as taken:
            if taken.address == attached.address4:
                self._give_up(attached)  # its guest has this one; the next start gets another
            raise
        return attached

    async def detach(self, machine: str) -> None:
        device = addresses.device(self._worker, machine)
        if self._keeper is None and device not in self._planned:
            return
        keeper = await self._run(self._kept)
        await self._run(lambda: keeper.detach(device))
        self._planned.discard(device)
        self._four.pop(device, None)
        if keeper.idle:
            self._tidy_later()

    async def reconcile(self, machines: Mapping[str, Wanted]) -> None:
        planned = [(wanted, self.plan(wanted)) for wanted in machines.values()]
        its = {attached.interface: (wanted, attached) for wanted, attached in planned}
        if its or self._keeper is not None:
            await self._run(lambda: self._kept().reconcile(its, frozenset(self._planned)))
        self._four = {device: address for device, address in self._four.items() if device in self._planned}

    async def restore(self) -> None:
        """Put back what somebody else removed of the filters of machines that are attached. It happens by itself."""
        if (keeper := self._keeper) is not None:
            await self._run(keeper.restore)

    def _tidy_later(self) -> None:
        if self._tidying is None:
            self._tidying = asyncio.get_running_loop().call_later(self._idle_s, self._tidy)

    def _tidy(self) -> None:
        self._tidying = None
        if self._thread is not None and self._keeper is not None:
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._keeper.tidy)
            done.add_done_callback(self._tidied)

    def _tidied(self, done: asyncio.Future[bool]) -> None:
        if done.cancelled() or self._thread is None:
            return
        if done.exception() or not done.result():
            self._tidy_later()

    def _kept(self) -> Keeper:
        """In the thread. Raises `NetworkError`."""
        if self._keeper is None:
            from hawker.network.keeper import Keeper
            from hawker.network.kernel import Kernel

            try:
                self._keeper = Keeper(self._worker, (self._make or Kernel)(self._worker, self._settings))
            except OSError as error:
                raise NetworkError(f"netlink cannot be used: {error.strerror}") from error
        return self._keeper

    def _let_go(self, remove: bool) -> None:
        """In the thread."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close(remove)

    def _refuse_held(self, keeper: Keeper, wanted: Wanted, attached: Attachment) -> None:
        """Check the ports, in the network's thread. A machine that has its ports keeps them: a program that came later
        is cut off already."""
        if keeper.has(attached.interface):
            return
        for protocol, _, port in wanted.publish:
            if said := self.holder(protocol, port):
                raise NetworkError(f"{said}; stop that, or give the worker other ports ([worker] ports)")

    def _give_up(self, attached: Attachment) -> None:
        self._taken.add(attached.address4)
        del self._four[attached.interface]

    async def _run(self, change: Callable[[], R]) -> R:
        """Run a change in the network's one thread. Cancelling the caller does not stop the change half-way."""
        if self._thread is None:
            raise NetworkError("the network is not open")
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, change))


def checked(settings: Settings) -> Settings:
    """Raises `Invalid` for what is no network or address."""
    for field in ("publish_on", "allowed", "denied"):
        for text in getattr(settings, field):
            try:
                ip_network(text, strict=False)
            except ValueError:
                raise Invalid(f"worker.network.{field}", text, 'write networks such as "10.1.0.0/16"') from None
    for text in settings.resolvers:
        try:
            ip_address(text)
        except ValueError:
            raise Invalid("worker.network.resolvers", text, 'write addresses such as "192.0.2.53"') from None
    try:
        size = IPv4Network(settings.pool4).num_addresses
    except ValueError:
        size = 0
    if size < POOL_LEAST:
        remedy = f'write an IPv4 network of {POOL_LEAST} addresses or more, such as "100.64.0.0/10"'
        raise Invalid("worker.network.pool4", settings.pool4, remedy)
    if not MTU_LEAST <= settings.mtu <= MTU_MOST:
        raise Invalid("worker.network.mtu", settings.mtu, f"give bytes from {MTU_LEAST} to {MTU_MOST}")
    if settings.connections is not None and not 0 <= settings.connections <= CONNECTIONS_MOST:
        remedy = f"give a number up to {CONNECTIONS_MOST}, 0 for any number of connections"
        raise Invalid("worker.network.connections", settings.connections, remedy)
    return settings


def an_eighth_of_tracked() -> int:
    """The share of the host's connection table that one machine may fill: seven machines that fill theirs leave some of
    the table free."""
    try:
        most = int(Path("/proc/sys/net/netfilter/nf_conntrack_max").read_text())
    except OSError:  # nothing on this host keeps any yet
        most = TRACKED
    return max(1, most // 8)


def problem() -> str:
    """What this host lacks for machines to have a network, or ""."""
    missing = _missing_capabilities()
    if missing:
        return f"this needs root: the process lacks {' and '.join(missing)}"
    if not Path("/proc/sys/net/ipv6").is_dir():
        return "the kernel has no IPv6 (it was started with ipv6.disable=1, or built without)"
    return nft.problem()


def _missing_capabilities() -> list[str]:
    status = Path("/proc/self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    wanted = {"CAP_NET_ADMIN": NET_ADMIN, "CAP_SYS_ADMIN": SYS_ADMIN}
    return [name for name, bit in wanted.items() if not effective >> bit & 1]


def _anything_of(worker: str) -> bool:
    """Whether something of a worker is on the host, of this thread's network namespace: the agent before this one may
    have been killed."""
    prefix = addresses.device_prefix(worker)
    if any(name.startswith(prefix) for _, name in socket.if_nameindex()):
        return True
    own = IPv6Address(addresses.worker_address(worker)).packed.hex()
    if any(line.startswith(own) for line in (_NET / "if_inet6").read_text().splitlines()):
        return True
    return ruleset.table(worker) in nft.table_names()


def _routed(pool: IPv4Network) -> set[str]:
    """The addresses of a pool that this thread's network namespace has routes to: other workers' machines have them."""
    lines = (line.split() for line in (_NET / "route").read_text().splitlines()[1:])
    single = (IPv4Address(bytes.fromhex(line[1])[::-1]) for line in lines if line[7] == "FFFFFFFF")
    return {str(address) for address in single if address in pool}


def _lock(worker: str) -> socket.socket:
    """Held until it is closed or its process ends. Abstract names belong to a network namespace, as what they guard."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0hawker-network-{addresses.tag(worker)}")
    except OSError as error:
        lock.close()
        raise NetworkError(f"another process has the network of worker {worker} on this host") from error
    return lock
