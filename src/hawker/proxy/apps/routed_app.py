"""One app as a proxy serves it: its machines in groups of those that serve the same public ports.

A *group* has the machines that serve the same public ports, in one pool. Machines of an app may differ for a while, as
during a deploy that moves it to another port inside: services belong to one group as soon as they share a public port.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hawker.core.routing import Pool
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.apps.wait_queue import WaitQueue
from hawker.proxy.base import ServicePort
from hawker.proxy.catalog_view.index import App, Machine
from hawker.proxy.catalog_view.published import service_port

Shape = frozenset[tuple[int, frozenset[tuple[int, int]]]]
"""Ports inside with their ranges of public ports, which decide the groups of an app."""


class EndpointGroup:
    """Machines of an app that serve the same public ports. `held` counts requests that wait."""

    def __init__(self, app: str, pool: Pool) -> None:
        self.app = app
        self.pool = pool
        self.wait_queue = WaitQueue()
        self.held = 0


class RoutedApp:
    """One app's groups, by port inside, and the endpoints of its machines."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.groups: dict[int, EndpointGroup] = {}
        self.endpoints: dict[tuple[str, int], Endpoint] = {}  # by machine and port inside
        self.leaving: dict[tuple[str, int], Endpoint] = {}  # machines that are gone, with requests still in flight
        self.shape: Shape = frozenset()
        self.held = 0  # requests that wait for another region
        self.version = 0  # counts the changes of what public ports lead to
        self.used = True  # since it was last checked whether it may be dropped
        self.dropped = False
        self._ports: dict[int, tuple[EndpointGroup, ServicePort] | None] = {}

    def at(self, port: int) -> tuple[EndpointGroup, ServicePort] | None:
        """Which machines serve a public port, and how."""
        if port not in self._ports:
            self._ports[port] = self._look(port)
        return self._ports[port]

    def services_changed(self) -> None:
        self.version += 1
        self._ports.clear()

    @property
    def busy(self) -> bool:
        """Whether requests are in flight at its machines, wait for them, or are carried past this proxy."""
        groups = self.groups.values()
        return self.held > 0 or any(group.held or group.wait_queue.count or group.pool.busy for group in groups)

    def _look(self, port: int) -> tuple[EndpointGroup, ServicePort] | None:
        for _, machine in sorted(self.app.machines.items(), reverse=True):
            for service in machine.services:
                public = service.at(port)
                if public is not None and service.internal_port in self.groups:
                    return self.groups[service.internal_port], service_port(public)
        return None


def shape_of(machines: Iterable[Machine]) -> Shape:
    found: dict[int, set[tuple[int, int]]] = {}
    for machine in machines:
        for service in machine.services:
            ranges = found.setdefault(service.internal_port, set())
            ranges.update((port.first, port.last) for port in service.ports)
    return frozenset((port, frozenset(ranges)) for port, ranges in found.items())


def joined(shape: Shape) -> Sequence[set[int]]:
    """Ports inside that share a public port, directly or by way of others, together."""
    sets: list[tuple[set[int], set[tuple[int, int]]]] = []
    for port, ranges in sorted(shape, key=lambda item: item[0]):
        ports, public = {port}, set(ranges)
        apart = []
        for other in sets:
            if any(a <= d and c <= b for a, b in public for c, d in other[1]):
                ports |= other[0]
                public |= other[1]
            else:
                apart.append(other)
        sets = [*apart, (ports, public)]
    return [ports for ports, _ in sets]
