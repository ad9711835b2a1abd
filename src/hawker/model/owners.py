"""Owners that are no users: who brings one of an agent's other tokens."""

from __future__ import annotations

AGENT = "agent"
"""Behind the token that agents share: it may speak for others (`hawker-owner`) and reach agents' own paths."""
SCRAPER = "metrics"
"""Behind the token that reads `/metrics` and `/health/proxy`, and nothing else."""
