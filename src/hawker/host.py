"""The outside world a part may touch: wall clock, randomness, ids made of both, and sockets that it was handed.

Live it is `live()`. The simulator puts a virtual clock and a seeded `Random` in its place; connections and timers come
from the running event loop, which the simulator replaces too. Nothing else in Hawker reads a clock or draws a number.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from hawker.listening import Listening
from hawker.model.values import MachineId, Ulid, read_ulid, ulid
from hawker.sockets import Sockets


class Host:
    """`wall_s` gives Unix seconds; `rng` is drawn from for ids, jitter and ties; `vfs` names the SQLite file system
    that databases are kept on, None for the real one; `listening` are the process's sockets that others connect to.
    `steady_s` is for `steady_ms`; without it nobody sets the clock. `sockets` is what the system knows of them."""

    def __init__(
        self,
        wall_s: Callable[[], float],
        rng: random.Random,
        vfs: str | None = None,
        listening: Listening | None = None,
        steady_s: Callable[[], float] | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        self._wall_s = wall_s
        self._steady_s = steady_s or wall_s
        self.rng = rng
        self.vfs = vfs
        self.listening = listening or Listening()
        self.sockets = sockets or Sockets()
        self._last_ulid = (0, 0)

    def now_ms(self) -> int:
        return int(self._wall_s() * 1000)

    def steady_ms(self) -> int:
        """Unix milliseconds by a clock that nobody sets: the wall clock's value at the start of this process, counted
        on. Deadlines that are compared again and again use it, so setting the clock makes them neither longer nor
        shorter."""
        return int(self._steady_s() * 1000)

    def ulid(self) -> Ulid:
        """A ULID greater than every one before it from this host, also within a millisecond and if the clock goes
        back."""
        last_ms, last_random = self._last_ulid
        at_ms = self.now_ms()
        if at_ms > last_ms:
            self._last_ulid = at_ms, self.rng.getrandbits(79)  # 79: room to count up within the millisecond
        else:
            self._last_ulid = last_ms, last_random + 1
        return ulid(*self._last_ulid)

    def go_on_after(self, last: str) -> None:
        """Make the next ULIDs greater than this one, since the clock may have gone back after it was made."""
        self._last_ulid = max(self._last_ulid, read_ulid(last))

    def machine_id(self) -> MachineId:
        """14 hexadecimal digits. 56 random bits: among a million machines a clash has odds of one in 140,000."""
        return MachineId(f"{self.rng.getrandbits(56):014x}")

    def token(self, bits: int = 256) -> str:
        return f"{self.rng.getrandbits(bits):0{bits // 4}x}"


def live(listening: Listening | None = None) -> Host:
    """The real clock, and randomness from the operating system: nobody can guess an id or a token."""
    began_s = time.time() - time.monotonic()
    return Host(
        wall_s=time.time,
        rng=random.SystemRandom(),
        listening=listening,
        steady_s=lambda: began_s + time.monotonic(),
    )


def clock_s() -> float:
    """The running loop's clock, which is virtual in a simulation. Durations that are stored or decide anything are
    measured with it."""
    return asyncio.get_running_loop().time()
