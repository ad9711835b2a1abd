"""What a proxy holds, as metrics beside the counters of its data plane."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hawker.proxy.service import Health


class Gauges(Collector):
    """Read whenever somebody asks. `register` it with a registry."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
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
            yield GaugeMetricFamily(f"hawker_proxy_{name}", what, value=float(value))
