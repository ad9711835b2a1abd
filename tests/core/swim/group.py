"""Members whose packets arrive at once, in order, unless a test loses them; the clock is the test's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from hawker.core.swim import LAN, Action, Known, Member, Send, Settings, Status, Swim, View


def member(name: str, born: int = 1_000, host: str = "") -> Member:
    return Member(name, born, host or f"{name}.sim", 7946)


def known(*names: str) -> Known:
    return Known(View(member(name), Status.alive, 0) for name in names)


class Group:
    """`lost(sender, target)` says which packets do not arrive. `done`: everything else that was asked for, by name."""

    def __init__(self, names: Iterable[str], settings: Settings = LAN) -> None:
        members = [member(name) for name in names]
        table = Known(View(one, Status.alive, 0) for one in members)
        self.now = 0.0
        self.nodes = {one.name: Swim(one, settings, Random(one.name), known=table) for one in members}
        self.names = {one.address: one.name for one in members}
        self.lost: Callable[[str, str], bool] = lambda sender, target: False
        self.done: list[tuple[str, Action]] = []
        self.sent: list[tuple[str, str, bytes]] = []
        self._still = ""
        self._held: deque[tuple[str, str, bytes]] = deque()
        for node in self.nodes.values():
            node.start(0.0)

    def __getitem__(self, name: str) -> Swim:
        return self.nodes[name]

    def silence(self, *names: str) -> None:
        """Nothing goes in or out of these."""
        self.lost = lambda sender, target: sender in names or target in names

    def run(self, until: float, *, still: str = "") -> None:
        """Lets time pass. One may stand still: it gets its packets, and its time, with the next run."""
        self._still = still
        held, self._held = self._held, deque()
        for sender, target, payload in held:
            self.nodes[target].on_packet(self.now, member(sender).address, payload)
        nodes = [node for name, node in self.nodes.items() if name != still]
        while (now := min(node.due() for node in nodes)) <= until:
            self.now = max(self.now, now)
            for node in nodes:
                if node.due() <= self.now:
                    node.tick(self.now)
            self.deliver()
        self.now = until

    def deliver(self) -> None:
        packets: deque[tuple[str, str, bytes]] = deque()
        while True:
            for name, node in self.nodes.items():
                for action in node.take():
                    if isinstance(action, Send):
                        packets.append((name, self.names[action.to], action.payload))
                    else:
                        self.done.append((name, action))
            if not packets:
                return
            sender, target, payload = packets.popleft()
            self.sent.append((sender, target, payload))
            if target == self._still:
                self._held.append((sender, target, payload))
            elif not self.lost(sender, target):
                self.nodes[target].on_packet(self.now, member(sender).address, payload)

    def status(self, holder: str, name: str) -> Status:
        return self.nodes[holder].members[name].status
