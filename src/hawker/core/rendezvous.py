"""Which worker decides something that must be decided once: rendezvous hashing (Thaler and Ravishankar 1998).

Every broker that knows the same workers names the same one, and when a worker comes or goes only the keys that are its
own change hands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

SETTLED_MS = 60_000
"""News of a new worker reaches every broker in less time. Until then the worker decides nothing that they must agree
on."""
LOOKED_AT = 3
"""How many workers in rank order are asked: what was decided before new workers came is found on the next in rank."""


def ranked(key: str, workers: Iterable[str]) -> list[str]:
    """The workers, the one that decides first. Depends on the set of them, not on its order."""
    return sorted(workers, key=lambda name: weight(key, name), reverse=True)


def weight(key: str, name: str) -> tuple[bytes, str]:
    """The weight of `name` for `key`; the greatest weight ranks first."""
    return blake2b(f"{key}/{name}".encode(), digest_size=8).digest(), name


def settled(since_ms: Mapping[str, int], now_ms: int) -> list[str]:
    """Workers that have been there for long enough, by when each one's database was made. Those of a fleet that is as
    new as they are count as well."""
    oldest = min(since_ms.values(), default=0)
    latest = max(now_ms - SETTLED_MS, oldest + SETTLED_MS)
    return [name for name, since in since_ms.items() if since <= latest]
