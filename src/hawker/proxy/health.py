"""Tells how a proxy is, for whoever sends it requests, and as metrics beside the counters of its data plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from hawker.core.metrics import Family


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a proxy should get traffic: `reason` why not, "" when it should. `skipped` counts rows of the catalog
    that made no sense; `apps` and `doors` are those in memory; `closed` are ports that apps claim and that could not be
    opened, with the reason; `certificates` are those that cannot be used or end soon."""

    reason: str = ""
    skipped: int = 0
    bad: dict[str, str] = {}
    apps: int = 0
    doors: int = 0
    opening: int = 0
    closed: dict[int, str] = {}
    certificates: dict[str, str] = {}

    @property
    def ok(self) -> bool:
        return not self.reason


class Gauges:
    """The metrics of a proxy's health, read whenever somebody asks. Register it with a registry."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def collect(self) -> Iterable[Family]:
        now = self._health()
        for name, what, value in (
            ("fit", "Whether users' requests should be sent here: 0 while the catalog is behind", now.ok),
            ("apps", "Apps whose machines are in memory", now.apps),
            ("doors", "Machines of this proxy's worker that it leads to", now.doors),
            ("opening", "Of these, machines that are being started or waited for", now.opening),
            ("ports_closed", "Ports that apps have to themselves and that could not be opened", len(now.closed)),
            ("certificates_bad", "Certificates that cannot be used, or end soon", len(now.certificates)),
            ("rows_skipped", "Rows of the catalog that made no sense, since the start", now.skipped),
        ):
            yield Family("gauge", f"hawker_proxy_{name}", what).add(value)
