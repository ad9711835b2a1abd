"""The calls that every agent answers for itself: load balancers ask for its health, Prometheus for its metrics."""

from __future__ import annotations

from typing import Any

from hawker.model import api
from hawker.model.op import Op, Request


class ShowHealth(Request[api.Health]):
    """Whether this agent should get traffic."""

    op = Op("Health", "GET", "/health", served="any", refuses=(503,))


class ShowMetrics(Request[str]):
    """Get an agent's metrics in the OpenMetrics text format."""

    op = Op("Agent_metrics", "GET", "/metrics", served="any", callers="agents")


class ShowProxyHealth(Request[dict[str, Any]]):
    """Get what an agent's proxy knows and serves."""

    op = Op("Agent_proxy", "GET", "/health/proxy", served="any", callers="agents")
