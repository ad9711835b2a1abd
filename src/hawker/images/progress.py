"""How far an image has come, told to whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

State = Literal["waiting", "fetching", "fetched", "unpacking", "ready", "sending", "sent"]


class Progress(msgspec.Struct, frozen=True):
    """One layer. `bytes` of `total` are here, as they travel. `ready`: unpacked on top of those below.
    `sending` and `sent`: to a registry."""

    reference: str
    digest: str
    state: State
    bytes: int
    total: int


Watcher = Callable[[Progress], None]
"""Called on the event loop; must not wait. Of a layer that moves, some megabytes may pass between two calls."""


class Watchers:
    """Watchers by image, told of changes by layer: several images may share one."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}  # by reference
        self._layers: dict[str, dict[str, Progress]] = {}  # by reference, then digest

    def add(self, reference: str, watcher: Watcher) -> Callable[[], None]:
        """Tell it where each layer stands and then of every change. Returns what ends that."""
        listening = self._watchers.setdefault(reference, [])
        listening.append(watcher)
        for progress in self._layers.get(reference, {}).values():
            watcher(progress)

        def end() -> None:
            listening.remove(watcher)
            if not listening and self._watchers.get(reference) is listening:
                del self._watchers[reference]

        return end

    def begin(self, reference: str, layers: Iterable[tuple[str, int, State]]) -> None:
        """An image is being fetched: digest, size and state of its layers."""
        self._layers[reference] = {}
        for digest, size, state in layers:
            self._put(Progress(reference, digest, state, 0 if state == "waiting" else size, size))

    def end(self, reference: str) -> None:
        self._layers.pop(reference, None)

    def moved(self, digest: str, state: State, count: int | None = None) -> None:
        """`count` None: all its bytes."""
        for reference, layers in self._layers.items():
            known = layers.get(digest)
            if known is not None and known.state != "ready":
                self._put(Progress(reference, digest, state, known.total if count is None else count, known.total))

    def _put(self, progress: Progress) -> None:
        self._layers[progress.reference][progress.digest] = progress
        for watcher in list(self._watchers.get(progress.reference, ())):
            watcher(progress)
