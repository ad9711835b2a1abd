"""The ports of the host on which a worker publishes its machines' services.

They are given out in the commit that makes or updates a machine, from the worker's own range, and given back in the
commit that destroys it, or that ends an update: until then the old program may be there, with the old ones. A port that
nobody gave out is never published: two workers of one host have ranges of their own. One that a program of the host
has is passed over; where a program took it later, its machine's next start is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from hawker.core import capacity
from hawker.errors import Conflict
from hawker.model.config import PROCESS, Config
from hawker.model.rows import MachineRow, PortRow
from hawker.model.services import Port, published
from hawker.store.tx import Reads, Tx

PORTS = range(20000, 30000)
"""The ports that a worker gives out when its settings name none."""

LOOKED_UP = 32
"""Ports that are looked up in one statement."""


Holder = Callable[[str, int], str]
"""Says of a protocol and port which program of the host has it, or ""; asked within a change of the store."""


def nobody(protocol: str, port: int) -> str:
    return ""


class NoPort(Conflict):
    """Every port of the worker's range is given out."""

    code = "insufficient_capacity"

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(
            f"aborted: could not reserve resource for machine: insufficient ports available to fulfill request "
            f"(ports: {wanted} wanted, {free} free)",
            details={"resource": "ports", "wanted": wanted, "free": free},
            hint="give the worker a larger range: [worker] ports",
        )


def assign(
    tx: Tx, ports: range, machine: str, config: Config, kept: Sequence[Port] = (), holder: Holder = nobody
) -> tuple[Port, ...]:
    """The ports that a machine with this configuration publishes, in the order of its services. The machine keeps a
    port that it had, unless somebody else has that now; `settle` gives back what it does not need any more. Raises
    `NoPort`; nothing is written then.

    A process listens on the host's own ports: it is found where it listens, and nothing is given out.
    """
    wanted = published(config.services)
    if config.runtime == PROCESS:
        return tuple(Port(protocol=protocol, internal_port=port, host_port=port) for protocol, port in wanted)
    given = {
        (p.protocol, p.internal_port): p for p in kept if _has(tx, machine, p) and not holder(p.protocol, p.host_port)
    }
    new = [service for service in wanted if service not in given]
    for service, number in zip(new, _free(tx, ports, machine, [protocol for protocol, _ in new], holder), strict=True):
        given[service] = Port(protocol=service[0], internal_port=service[1], host_port=number)
        tx.put(PortRow(number=number, machine=machine))
    return tuple(given[service] for service in wanted)


def shortfall(reads: Reads, ports: range, config: Config) -> capacity.Shortfall | None:
    """What is missing for another machine with this configuration. Reservations hold no ports: of two orders for the
    last one, the second is told when it is confirmed."""
    wanted = 0 if config.runtime == PROCESS else len(published(config.services))
    free = len(list(islice(_not_given(reads, ports, 0), wanted)))
    return capacity.Shortfall(resource="ports", wanted=wanted, free=free) if wanted > free else None


def settle(tx: Tx, machine: MachineRow) -> None:
    """Give back all that a machine has but does not need any more. May be repeated."""
    needed = {port.host_port for port in machine.ports} if machine.driver != PROCESS else set()
    for row in tx.select(PortRow, "machine = ?", (machine.id,)):
        if row.number not in needed:
            tx.delete(PortRow, row.key)


def release(tx: Tx, machine: str) -> None:
    """Give back all that a machine has. May be repeated."""
    for row in tx.select(PortRow, "machine = ?", (machine,)):
        tx.delete(PortRow, row.key)


def _has(tx: Tx, machine: str, port: Port) -> bool:
    """Whether it was given out: a process has ports that nobody gave it."""
    row = tx.get(PortRow, str(port.host_port))
    return row is not None and row.machine == machine


def _free(tx: Tx, ports: range, machine: str, protocols: Sequence[str], holder: Holder) -> list[int]:
    """One for each. From a place in the range that depends on the machine: a port that was given back is seldom the
    next one to be given out, when its last machine may still be on its way out."""
    if not protocols:
        return []
    found: list[int] = []
    for number in _not_given(tx, ports, int(machine, 16)):
        if not holder(protocols[len(found)], number):
            found.append(number)
            if len(found) == len(protocols):
                return found
    raise NoPort(len(protocols), len(found))


def _not_given(reads: Reads, ports: range, start: int) -> Iterator[int]:
    """The ports of the range that nobody has, from the place `start` on and around. It looks up a few at a time, and
    reads nothing about the rest of the range."""
    for offset in range(0, len(ports), LOOKED_UP):
        some = [ports[(start + n) % len(ports)] for n in range(offset, min(offset + LOOKED_UP, len(ports)))]
        marks = ", ".join("?" * len(some))
        given = reads.query(f"select id from port where id in ({marks})", [str(number) for number in some])
        taken = {int(key) for (key,) in given}
        yield from (number for number in some if number not in taken)
