"""The private names' content, from the catalog: each network's apps and machines, read when they are asked for and kept
until the catalog changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from ipaddress import AddressValueError, IPv6Address
from typing import Any, Protocol

from hawker.network.names import NO_GROUP, Machine, Network

KEPT = 1024
"""Networks kept at a time: more than have machines on one host."""


class View(Protocol):
    """`hawker.catalog.view.View`: a replica to be read."""

    on_applied: list[Callable[[tuple[str, ...]], None]]

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...


class Zone:
    """Networks by their number. `region` is the worker's own; `distance` gives what is known of regions' round-trip
    times in ms; `api` is where the API answers."""

    def __init__(
        self,
        view: View,
        region: str,
        *,
        distance: Callable[[], Mapping[str, float]] = dict,
        api: tuple[str, ...] = (),
        kept: int = KEPT,
    ) -> None:
        self._view = view
        self._region = region
        self._distance = distance
        self._api = api
        self._kept = kept
        self._apps: dict[int, list[str]] | None = None
        self._regions: frozenset[str] | None = None
        self._networks: dict[int, Network] = {}
        view.on_applied.append(self._changed)

    def close(self) -> None:
        if self._changed in self._view.on_applied:
            self._view.on_applied.remove(self._changed)

    def network(self, number: int) -> Network:
        """The network of this number; an empty one where there is none."""
        found = self._networks.get(number)
        if found is None:
            if len(self._networks) >= self._kept:
                self._networks.clear()
            found = self._networks[number] = self._read(number)
        return found

    def _read(self, number: int) -> Network:
        if self._apps is None:
            self._apps = defaultdict(list)
            for name, its in self._view.rows("select id, number from apps"):
                self._apps[its].append(name)
        if self._regions is None:
            self._regions = frozenset(region for (region,) in self._view.rows("select distinct region from workers"))
        return Network(
            here=self._region,
            machines={app: self._machines(app) for app in self._apps.get(number, ())},
            regions=self._regions,
            distance=self._distance(),
            api=self._api,
        )

    def _machines(self, app: str) -> tuple[Machine, ...]:
        columns = "id, region, private_ip, state, process_group, cordoned, hidden"
        rows = self._view.rows(f"select {columns} from machines where app = ? order by id", (app,))
        return tuple(
            Machine(
                id=id_,
                app=app,
                region=region,
                address=str(IPv6Address(address)),
                state=state,
                group=group or NO_GROUP,
                cordoned=bool(cordoned),
                hidden=bool(hidden),
            )
            for id_, region, address, state, group, cordoned, hidden in rows
            if _is_address(address)
        )

    def _changed(self, tables: tuple[str, ...]) -> None:
        if "apps" in tables:
            self._apps = None
        if "workers" in tables or "forgotten" in tables:
            self._regions = None
        if {"apps", "machines", "workers", "forgotten"}.intersection(tables):
            self._networks.clear()


def _is_address(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except AddressValueError:  # of a worker that gives its machines none, or a newer one's
        return False
