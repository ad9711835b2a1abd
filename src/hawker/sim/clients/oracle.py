"""What clients were told, kept outside of the simulated world: the measure of every promise.

An order goes by its *label*, which is also the machine's name and travels in its metadata, so that whatever a worker
holds at the end can be traced to the client that asked for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FILLED, REFUSED, DOUBT, OPEN = "filled", "refused", "doubt", "open"


@dataclass
class Order:
    """One order, over all its attempts. `outcome` is that of the last attempt; `doubtful` says that some attempt ended
    without a definite answer."""

    label: str
    key: str
    app: str
    owner: str
    regions: tuple[str, ...]
    program: str
    began_s: float
    outcome: str = OPEN
    attempts: int = 0
    doubtful: bool = False
    machine: str = ""
    worker: str = ""
    region: str = ""
    asked_s: float = 0.0  # when the attempt began that filled it
    filled_s: float = 0.0
    destroy_asked: bool = False
    destroyed: tuple[float, float] | None = None  # when it was asked for, and when the client was told that it is gone
    auto_destroy: bool = False
    undoing: tuple[str, float] | None = None  # the broker that said it would undo the order; when it was asked
    late: list[tuple[float, str]] = field(default_factory=list)  # attempts that were not answered: when, by whom


class Acknowledged(NamedTuple):
    """An operation on a machine that a client was told is done or begun. `wanted` is what it was to make of the
    machine, `worker` the one that had the machine as far as the client knew, `request` the id in the answer."""

    what: str
    machine: str
    worker: str
    request: str
    asked_s: float
    told_s: float
    wanted: Any


class Oracle:
    """What clients were told: every order by its label, every operation that was acknowledged, and what was wrong with
    an answer the moment it came."""

    def __init__(self) -> None:
        self.orders: dict[str, Order] = {}
        self.acknowledged: list[Acknowledged] = []
        self.violations: list[str] = []
        self.leaks: list[
            tuple[float, Order]
        ] = []  # a change was accepted without the nonce of a lease taken at that time
        # Machines that were ordered anew, which two workers may have for a while, by when the last such order ended.
        self.replaced: dict[str, float] = {}
        self.answers: Counter[str] = Counter()  # by operation and status
        self.paths: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()  # orders by broker

    def machines(self) -> dict[str, Order]:
        """Orders by the machine that filled them."""
        return {order.machine: order for order in self.orders.values() if order.machine}
