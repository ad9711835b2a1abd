"""The lamps of a simulated host: what is outside a worker stays when the worker is killed."""

from __future__ import annotations

from hawker.sim.hosts.world import World


class Lamps:
    """`lit` are those that burn. Crash tests cut a worker off before and after each effect."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lit: set[str] = set()

    async def turn(self, light: str, on: bool) -> None:
        what = f"lamp {light} {'on' if on else 'off'}"
        self._world.point("before", what)
        if on:
            self.lit.add(light)
        else:
            self.lit.discard(light)
        self._world.point("after", what)
