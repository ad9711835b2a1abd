"""Users' requests at the proxies of a simulation, from their edges to machines, and what is promised of them.

The proxies are the live ones with their embedded data plane, in every worker's agent and in every broker's; what they
ask of the kernel itself is answered by `sim.hosts.kernel`. The names go on in the list of invariants of the design:

S18  Every request that an edge took has one answer, or a visible end, within its time. A machine never has more in
     flight than its hard limit; none reaches a machine that is stopped, suspended or on its way there, or another
     app's; none is in flight at a machine that its proxy puts to rest. What is not idempotent is delivered once at
     most. (While it happens: `serving`.) Where there are no faults, all but these have good answers: what is not
     idempotent and in flight at a machine that its owner stops, and what is more than an app takes. No edge says of
     an app that has long been there that it is not, whatever it has lost.
L8   When faults are over and load has ended, machines with autostop sleep, but for `min_machines_running`; then each
     app answers, at all edges at once, and one machine is started for that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hawker.model.machine import State
from hawker.model.rows import MachineRow
from hawker.sim.checks.paths import Paths
from hawker.sim.clients.operator import Operator
from hawker.sim.clients.owners import Owner, Served
from hawker.sim.clients.users import END_S, PORT, Outcome, Users, Wish, early, untimely, wishes
from hawker.sim.faults.faults import Faults
from hawker.sim.fleet import IDLE_LOOK_S, IDLE_S, Fleet
from hawker.sim.hosts.node import Node
from hawker.sim.traffic.serving import Serving

PEAK = 4.0
SLEEP_S = IDLE_S + 20.0
"""A look stops one machine of an app at most, and what was opened last counts as used then."""
KNOWN_S = 30.0
"""Wait until every edge knows the apps and their machines."""
_RUNS = frozenset((State.started, State.starting, State.restarting, State.updating))


class Traffic:
    """Owner, users and machines' programs of a fleet. `prepare` once agents serve, `ask` while there is load,
    `finale` when all is at rest."""

    def __init__(self, fleet: Fleet, owner: Owner, operator: Operator, faults: Faults, paths: Paths) -> None:
        self._fleet = fleet
        self.owner = owner
        self.serving = Serving(fleet, paths)
        self._operator = operator
        self._faults = faults
        self._violations: list[str] = []
        self._on_edge: Callable[[str], None] = lambda edge: None
        self.edges = [node for node in fleet.nodes.values() if node.settings.proxy and node.settings.proxy.listen]
        self.users = {
            region: Users({node.name: (node.station.address, PORT) for node in self.edges if _in(node, region)})
            for region in dict.fromkeys(node.settings.region for node in self.edges)
        }
        for region in self.users:
            fleet.net.station(f"users-{region}", region)
        for node in fleet.workers:
            self.serving.add(node)

    # --- a run -------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """The apps and their machines are there, and have answered at every edge."""
        fleet = self._fleet
        await fleet.in_process("operator", self._operator.make_apps(list(self.owner.served)))
        await fleet.in_process(self.owner.name, self.owner.make())
        await self._answers("first")

    def ask(self, until_s: float) -> list[asyncio.Task[Any]]:
        seconds = until_s - self._fleet.loop.time()
        found: list[Wish] = []
        for app in self.owner.served.values():
            edges = [node.name for node in self.edges]
            found += wishes(str(self._fleet.plan.seed), app.name, edges, seconds, PEAK)
        return [
            *self._send(sorted(found)),
            self._fleet.in_process(self.owner.name, self.owner.run(until_s)),
            self._fleet.in_process(self.owner.name, self._untimely(until_s)),
        ]

    async def _untimely(self, until_s: float) -> None:
        """Users who ask in the moments in which machines are stopped and started, and edges come back, and what becomes
        of them."""
        rng = random.Random(f"{self._fleet.plan.seed}/requests/untimely")
        edges = [node.name for node in self.edges]
        asking: list[asyncio.Task[Any]] = []

        def on_turn(app: str) -> None:
            if wish := untimely(rng, len(asking), app, edges):
                asking.extend(self._send([wish]))

        def on_edge(edge: str) -> None:
            for app in self.owner.served:
                asking.extend(self._send([early(rng, len(asking), app, edge)]))

        self.serving.on_turn, self._on_edge = on_turn, on_edge
        await asyncio.sleep(until_s - self._fleet.loop.time())
        self.serving.on_turn = self._on_edge = lambda name: None
        await asyncio.gather(*asking)

    def on_node(self, node: Node, what: str) -> None:
        if what in ("start", "serve") and node in self.edges:
            self._on_edge(node.name)

    def _send(self, found: list[Wish]) -> list[asyncio.Task[Any]]:
        regions = {node.name: node.settings.region for node in self.edges}
        parts = {region: [wish for wish in found if regions[wish.edge] == region] for region in self.users}
        return [
            self._fleet.in_process(f"users-{region}", self.users[region].run(part))
            for region, part in parts.items()
            if part
        ]

    async def finale(self) -> None:
        """L8. Nothing is asked for any more, and all is at rest."""
        await self._sleep("after the load")
        before = self._running()
        wakes = Counter(self.serving.wakes)
        await self._answers("last")
        for app in self.owner.served.values():
            woken = {m: n - wakes[m] for m, n in self.serving.wakes.items() if n > wakes[m] and self._is_of(m, app)}
            most = 0 if before[app.name] else 1
            if sum(woken.values()) != most:
                self._wrong(f"{before[app.name]} machines of app {app.name} ran, and these were started: {woken}")
        await self._sleep("after the last requests")

    # --- promises ----------------------------------------------------------------------------------------------------

    def check(self) -> Iterator[str]:
        """What was broken, in the end."""
        yield from self._violations
        yield from self.serving.violations
        for users in self.users.values():
            for outcome in users.outcomes.values():
                yield from self._of_one(outcome)

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for users in self.users.values():
            found.update({f"request {what}": count for what, count in users.counts().items()})
        return found

    def _of_one(self, found: Outcome) -> Iterator[str]:
        wish = found.wish
        where = f"S18: request {wish.id} at {wish.edge}, sent at {found.sent_s:.3f}"
        delivered = self.serving.delivered[wish.id]
        if found.sent and not found.status and not found.left:
            users = f"users-{self._region(wish)}"
            if not self._faults.troubled(wish.edge, users, found.sent_s, found.ended_s):
                what = "was cut off without an answer" if found.over else f"no answer and no end within {END_S:g} s"
                yield f"{where}: {what}; delivered {delivered} times"
        elif found.status == 200 and not found.cut:
            if not found.body.startswith(f"{wish.id} "):
                yield f"{where}: was answered {found.body!r}"
            if not delivered:
                yield f"{where}: was answered by nobody"
        if not self._faults.plan and not found.left and self._failed(found):
            yield f"{where}: got {found.status or 'no answer'}, and nothing was wrong: {found.body[:200]}"
        if found.status == 404 and not wish.id.startswith("first-"):
            yield f"{where}: got 404, and everybody has known the app for long: {found.body[:200]}"
        if found.more:
            yield f"{where}: there is more after its answer: {found.more[:60]!r}"

    def _failed(self, found: Outcome) -> bool:
        """Whether it had no good answer, for no good reason: its owner stopped the machine under it, and it may not be
        sent again, or there are more requests than the app takes."""
        wish = found.wish
        if (found.status == 200 and not found.cut) or wish.id.startswith("first-"):
            return False
        ended = self.serving.delivered[wish.id] and (wish.streamed or wish.method == "POST")
        return not ended and not found.body.startswith("PR03:")

    async def _answers(self, which: str) -> None:
        """Ask every app at several edges in one moment, with no more requests than one machine's soft limit: each must
        be answered."""
        for attempt in range(3):
            found = []
            for app in self.owner.served.values():
                for number in range(app.soft):
                    edge = self.edges[(number + attempt) % len(self.edges)].name
                    found.append(Wish(0.0, f"{which}-{attempt}-{app.name}-{number}", edge, app.name, "GET", 0.2))
            for task in self._send(found):
                await task
            bad = [
                outcome
                for users in self.users.values()
                for id_, outcome in users.outcomes.items()
                if id_.startswith(f"{which}-{attempt}-") and (outcome.status != 200 or outcome.cut)
            ]
            if which == "last" or not bad:
                break
            await asyncio.sleep(KNOWN_S / 3)
        for outcome in bad:
            self._wrong(f"request {outcome.wish.id} at {outcome.wish.edge} got {outcome.status}: {outcome.body[:200]}")

    async def _sleep(self, when: str) -> None:
        """Wait until no app has more machines running than it is to keep; it keeps those that it had."""
        fleet = self._fleet
        before = self._running()
        until = fleet.loop.time() + SLEEP_S
        while True:
            running = self._running()
            awake = {
                app.name: running[app.name] for app in self.owner.served.values() if running[app.name] > app.minimum
            }
            if not awake or fleet.loop.time() > until:
                break
            await asyncio.sleep(IDLE_LOOK_S)
        if awake:
            self._wrong(f"{when} machines run on for {SLEEP_S:g} s: {awake}")
        for app in self.owner.served.values():
            if running[app.name] < min(app.minimum, before[app.name]):
                self._wrong(f"{when} {running[app.name]} machines of app {app.name} run, {app.minimum} are to be kept")

    def _running(self) -> Counter[str]:
        """Machines by app that run, or are on their way there, as their workers know."""
        found: Counter[str] = Counter()
        for row in self._rows():
            found[row.app] += row.state in _RUNS
        return found

    def _rows(self) -> Iterator[MachineRow]:
        for node in self._fleet.workers:
            if store := self._fleet.store(node):
                yield from store.read.select(MachineRow, "state <> 'destroyed' order by id")

    def _is_of(self, machine: str, app: Served) -> bool:
        return any(row.id == machine and row.app == app.name for row in self._rows())

    def _region(self, wish: Wish) -> str:
        return self._fleet.nodes[wish.edge].settings.region

    def _wrong(self, what: str) -> None:
        self._violations.append(f"L8: {self._fleet.loop.time():.3f}: {what}")


def _in(node: Node, region: str) -> bool:
    return node.settings.region == region
