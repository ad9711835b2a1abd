"""What other agents, and whoever reads metrics, ask any agent."""

from __future__ import annotations

from typing import Any

from hawker.model.op import Op, Request


class ShowMetrics(Request[str]):
    """Its metrics in the OpenMetrics text format."""

    op = Op("Agent_metrics", "GET", "/metrics", served="any", callers="agents")


class ShowProxyHealth(Request[dict[str, Any]]):
    """What its proxy knows and serves."""

    op = Op("Agent_proxy", "GET", "/health/proxy", served="any", callers="agents")
