"""The outside world a part may touch, as one frozen record: wall clock, randomness, ids made of both.

Live it is `live()`. The simulator puts a virtual clock and a seeded `Random` in its place; connections and timers come
from the running event loop, which the simulator replaces too. Nothing else in Hawker reads a clock or draws a number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from hawker.model.values import MachineId, Ulid, ulid


@dataclass(frozen=True)
class Host:
    """`wall_s` gives Unix seconds; `rng` is drawn from for ids, jitter and ties."""

    wall_s: Callable[[], float]
    rng: random.Random

    def now_ms(self) -> int:
        return int(self.wall_s() * 1000)

    def ulid(self) -> Ulid:
        return ulid(self.now_ms(), self.rng.getrandbits(80))

    def machine_id(self) -> MachineId:
        """14 hexadecimal digits. 56 random bits: among a million machines a clash has odds of one in 140,000."""
        return MachineId(f"{self.rng.getrandbits(56):014x}")

    def token(self, bits: int = 256) -> str:
        return f"{self.rng.getrandbits(bits):0{bits // 4}x}"


def live() -> Host:
    """The real clock, and randomness from the operating system: nobody can guess an id or a token."""
    return Host(wall_s=time.time, rng=random.SystemRandom())
