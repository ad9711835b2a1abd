"""Changing a worker's part of a host's network, one change after the other. Everything blocks.

What is there is read from the kernel at the beginning, when everything is put right, and when a change fails; otherwise
a change is the few operations that one machine needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from hawker.network import plan
from hawker.network.base import AddressTaken, Attachment, NetworkError, Wanted
from hawker.network.kernel import Kernel
from hawker.network.plan import Link, Operation, State

Machines = dict[str, tuple[Wanted, Attachment]]
"""Machines by the name of their host end."""
SETTLED_MOST = 4
"""How many times in a row the keeper tries to put everything right."""


class _Have(msgspec.Struct, frozen=True):
    """What a host end has. `index` is the kernel's number of the link: one of the same name may have come since."""

    state: State = State()
    index: int = 0


class Keeper:
    """Everything raises `NetworkError`. `taken` are the addresses of the IPv4 pool that others on this host have,
    `given` those that were found on this worker's own host ends."""

    def __init__(self, worker: str, kernel: Kernel) -> None:
        self._worker = worker
        self._kernel = kernel
        self._machines: Machines = {}  # attached
        self._have: dict[str, _Have] = {}
        self._settled = False
        self.taken: frozenset[str] = frozenset()
        self.given: Mapping[str, str] = {}
        self._look()

    def close(self, remove: bool) -> None:
        """Let go; with `remove` leave nothing."""
        try:
            if remove:
                self._clear(frozenset())
            else:
                self.tidy()
        finally:
            self._kernel.close()

    @property
    def idle(self) -> bool:
        """Whether no machine is attached."""
        return not self._machines

    def has(self, device: str) -> bool:
        """Whether a machine is attached by this host end."""
        return device in self._machines

    def tidy(self) -> bool:
        """When there are no machines, leave nothing on the host but the setting that it forwards. Returns False if a
        link is there: its machine is just coming, and nothing else is known of it yet, or just going."""
        if self.idle:
            if self._look().links:
                return False
            self._clear(frozenset())
        return True

    def reconcile(self, machines: Machines, planned: frozenset[str]) -> None:
        """Put right what these machines need. Of all others remove everything, but the links that are `planned`:
        somebody has made them, or is about to."""
        self._machines = dict(machines)
        if machines:
            self._kernel.let_forward()
            self._settle(planned)
        else:
            self._clear(planned)

    def restore(self) -> None:
        """Make the filters what the machines need that are attached, and if they were not, everything else, too."""
        if not (self._settled and self._machines):
            return
        mark, elements = self._kernel.filters()
        wanted = (plan.of_machine(self._worker, *its).elements for its in self._machines.values())
        if mark != self._kernel.mark or not all(each <= elements for each in wanted):
            self._settle(None)

    def attach_namespace(self, wanted: Wanted, attached: Attachment, pid: int) -> None:
        namespace = _namespace(pid)
        try:
            self._kernel.connect(namespace, attached)
            self._attach(wanted, attached, Link(attached.interface))
        except BaseException:
            with suppress(NetworkError):  # the first error is the one to tell
                self.detach(attached.interface)
            raise
        finally:
            os.close(namespace)

    def attach(self, wanted: Wanted, attached: Attachment) -> None:
        """Give a host end that is there what its machine needs."""
        self._attach(wanted, attached, Link(attached.interface, ready=False))

    def detach(self, device: str) -> None:
        """Remove all of a host end, wherever it came from."""
        self._machines.pop(device, None)
        state = self._have.pop(device, _Have()).state
        if self._kernel.index(device) and not state.links:
            state = plan.union([state, State(links=frozenset({Link(device)}))])
        try:
            self._apply(plan.difference(state, State()))
        except NetworkError:  # somebody else changed what is ours
            self._settled = False
            self._look()
            self._apply(plan.difference(self._have.pop(device, _Have()).state, State()))

    def _attach(self, wanted: Wanted, attached: Attachment, link: Link) -> None:
        device = attached.interface
        index = self._kernel.index(device)
        if not index:
            raise NetworkError(f"the machine's interface {device} is not there")
        self._machines[device] = (wanted, attached)
        try:
            self._put(link, index)
        except BaseException:
            self._machines.pop(device, None)
            self._settled = False
            raise
        if device not in self._machines:
            raise NetworkError(f"the machine's interface {device} has gone")

    def _put(self, link: Link, index: int) -> None:
        """`link` is what is known of one that is new."""
        device = link.name
        if not self._settled:
            self._kernel.let_forward()
            self._settle(None)
            return
        have = self._have.get(device, _Have())
        if have.index != index:  # another link than then: of what was there only the elements are left
            have = _Have(State(elements=have.state.elements, links=frozenset({link})), index)
        target = plan.of_machine(self._worker, *self._machines[device])
        self._check_ports(device, target)
        try:
            self._apply(plan.difference(have.state, target))
        except AddressTaken:
            raise
        except NetworkError:  # somebody else changed what is ours
            self._settle(None)
        else:
            self._have[device] = _Have(target, index)

    def _check_ports(self, device: str, target: State) -> None:
        """Say which port it is that another machine has: nftables would not."""
        ports = {it.key for it in target.elements if it.is_port}
        for other, have in self._have.items() if ports else ():
            taken = ports.intersection(it.key for it in have.state.elements if it.is_port)
            if taken and other != device and self._kernel.index(other):
                protocol, port = min(taken)
                raise NetworkError(f"port {port}/{protocol} of this host is published by another machine of the worker")

    def _look(self) -> State:
        """Read what is there. Returns it."""
        actual, self.taken = self._kernel.read()
        indexes, parts = self._kernel.indexes(), plan.parts(actual)
        self._have = {device: _Have(state, indexes.get(device, 0)) for device, state in parts.items() if device}
        routes = {route for have in self._have.values() for route in have.state.routes if ":" not in route.address}
        self.given = {route.device: route.address for route in routes}
        return actual

    def _settle(self, planned: frozenset[str] | None) -> None:
        """Read everything, and put everything right. None leaves alone all host ends of which nothing is known. A
        program that ends meanwhile takes its link with it: then it is begun again without that."""
        for tries_left in reversed(range(SETTLED_MOST)):
            try:
                self._settle_once(planned)
                return
            except AddressTaken:
                raise
            except NetworkError:
                if not tries_left:
                    raise

    def _settle_once(self, planned: frozenset[str] | None) -> None:
        actual = self._look()
        there = {link.name for link in actual.links}
        self._machines = {device: its for device, its in self._machines.items() if device in there}
        wanted = plan.desired(self._worker, self._kernel.mark, self._machines.values(), there)
        self._apply(plan.difference(actual, plan.union([wanted, *self._strange(planned)])))
        for device, its in self._machines.items():
            self._have[device] = _Have(plan.of_machine(self._worker, *its), self._have[device].index)
        self._settled = True

    def _clear(self, planned: frozenset[str]) -> None:
        """Remove everything, but links that are `planned`, and then the filters that judge them."""
        actual = self._look()
        self._machines = {}
        left = plan.union(self._strange(planned))
        base = plan.of_worker(self._worker, self._kernel.mark) if left.links and actual.rules else State()
        self._apply(plan.difference(actual, plan.union([base, left])))
        self._settled = False

    def _strange(self, planned: frozenset[str] | None) -> list[State]:
        """The state of host ends whose machine is not known and which are still there. Forgets those that have gone."""
        left = {
            device: have
            for device, have in self._have.items()
            if device not in self._machines and have.state.links and (planned is None or device in planned)
        }
        self._have = {device: have for device, have in self._have.items() if device in left or device in self._machines}
        return [have.state for have in left.values()]

    def _apply(self, operations: list[Operation]) -> None:
        for operation in operations:
            self._kernel.apply(operation)


def _namespace(pid: int) -> int:
    """A descriptor of a process's network namespace."""
    try:
        found = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"process {pid} has no network namespace: {error.strerror}") from error
    if os.fstat(found).st_ino == os.stat("/proc/thread-self/ns/net").st_ino:
        os.close(found)
        raise NetworkError(f"process {pid} has the host's network namespace, not one of its own")
    return found
