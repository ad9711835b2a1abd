"""Rare paths: what a campaign must have seen, or it has shown nothing about them.

A path is noted where it is taken: by a log line of an agent, by a start of a program, by what clients were told, or at
the end in the workers' rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hawker.model.rows import DecisionRow, LogFloorRow, RunRow
from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import Node
from hawker.worker.drivers.base import InstanceSpec

STEPS = ("prepare", "launch", "stop", "clear", "purge", "backoff", "suspend", "resume", "settle")

NAMED: tuple[str, ...] = (
    "a reservation raced and was refused",
    "an order in doubt was released",
    "an order in doubt was found again by its key",
    "a reservation lapsed",
    "a kill between accept and reply",
    "an order was refused because a disk was full",
    "a database failed and its agent started anew",
    "a parked run was tried again",
    "an agent could not open at first",
    "a write was torn",
    "a program outlived its agent",
    "a member was suspected",
    "a suspicion was refuted",
    "a member was declared dead",
    "a hole in a log was found",
    "a log was brought up to date by a range",
    "a member held more of a log than its owner",
    "a machine was started again after its host lost power",
    "a machine was ordered anew",
    "a superseded machine was removed",
    "the beginning of a log was cut off",
    "an agent died where a log was cut",
    *(f"a run resumed at {step}" for step in STEPS),
)
"""What a campaign of a hundred seeds must have seen, each at least once."""

COMMON: tuple[str, ...] = (
    "an order in doubt was released",
    "an order in doubt was found again by its key",
    "a program outlived its agent",
    "a write was torn",
    "a suspicion was refuted",
    "a hole in a log was found",
    "a log was brought up to date by a range",
    "a machine was started again after its host lost power",
)
"""What even a few seeds must have seen."""


OF_USERS: tuple[str, ...] = (
    "a machine was put to rest by its proxy",
    "a sleeping machine was started for a request",
    "a suspended machine was resumed for a request",
    "a request was tried again elsewhere",
    "a held request was given up",
    "a user left before the answer",
    "a machine ended while it worked on a request",
    "a program hung while it worked on a request",
)
"""The common paths of runs with users."""


_VERSIONS = {"missing": "a hole in a log was found", "merged": "a log was brought up to date by a range"}


class Paths:
    """Counts the paths of one run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._taken: Counter[str] = Counter()
        self.running: dict[str, tuple[str, str]] = {}  # by machine: the host and the instance that runs
        self.violations: list[str] = []
        self._started: set[str] = set()
        self._lost: set[str] = set()  # instances that went with their host's power: they may be started again

    def take(self, path: str, times: int = 1) -> None:
        self._taken[path] += times

    def taken(self, fired: Mapping[str, int]) -> Counter[str]:
        """`fired`: faults by their kind."""
        found = self._taken + self._fleet.oracle.paths
        found["a write was torn"] += sum(node.disk.fates["torn"] for node in self._fleet.nodes.values())
        found["a kill between accept and reply"] += fired.get("kill before the reply", 0)
        return +found

    def on_log(self, node: str, event: str, fields: dict[str, Any]) -> None:
        match event:
            case "run.resumed":
                self.take(f"a run resumed at {fields['step']}")
            case "member.changed":
                before, after = fields.get("before"), fields.get("after")
                if after == "suspect":
                    self.take("a member was suspected")
                elif after == "dead":
                    self.take("a member was declared dead")
                elif before == "suspect" and after == "alive":
                    self.take("a suspicion was refuted")
            case "step.aborted" if "not started: generation" in str(fields.get("why")):
                self.take("a superseded machine was not started")
            case "catalog.ahead":
                self.take("a member held more of a log than its owner")
            case "machine.superseded":
                self.take("a superseded machine was removed")
            case "request.failed" | "uvicorn.error" | "uvicorn.critical":
                self.violations.append(f"{node}: a fault of ours in a request: {event} {fields}")

    def on_node(self, node: Node, what: str, why: str) -> None:
        if what in ("fail", "end"):
            self._note_versions(node)
        if what == "serve":
            self._note_cut(node)
        if what == "end" and why == "failed":
            self.take("a database failed and its agent started anew")
        elif what == "end" and why.startswith("could not open"):
            self.take("an agent could not open at first")
        elif what == "end" and node.world.instances:
            self.take("a program outlived its agent")

    def _note_cut(self, node: Node) -> None:
        """Whether the last that the agent before had done was to cut its log. A sweep makes several cuts in a row."""
        if store := self._fleet.store(node):
            before = "seq < (select max(seq) from log where kind = 'worker.started')"
            last = store.read.query(f"select kind from log where {before} order by seq desc limit 1")
            self.take("an agent died where a log was cut", last == [("log.cut",)])

    def _note_versions(self, node: Node) -> None:
        """What an agent's catalog went through, before it is gone."""
        if node.agent is None:
            return
        if proxy := node.agent.proxy:
            self.take("a request was tried again elsewhere", proxy.plane.counters.retries)
        for metric in node.agent.metrics.catalog_versions.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and (path := _VERSIONS.get(sample.labels["outcome"])):
                    self.take(path, int(sample.value))

    def on_program(self, node: Node, what: str, spec: InstanceSpec) -> None:
        """Checks on the world itself: one program a machine anywhere (S5), and a run on disk before it (S8)."""
        fleet = self._fleet
        fleet.record.note("program", node.name, f"{what} {spec.key} of {spec.machine}")
        if what != "started":
            self.running.pop(spec.key, None)
            if what == "lost":
                self._lost.add(spec.key)
            return
        for key, (other, machine) in self.running.items():
            if machine == spec.machine and other != node.name and machine in fleet.oracle.replaced:
                self.take("two generations of a machine ran at once")
            elif machine == spec.machine:
                self.violations.append(
                    f"S5: {spec.key} of machine {machine} started on {node.name}, {key} runs on {other}"
                )
        self.running[spec.key] = node.name, spec.machine
        again = spec.key in self._started
        self._started.add(spec.key)
        if again and spec.key not in self._lost and not fleet.losses[node.name]:
            self.violations.append(f"S5: {spec.key} of machine {spec.machine} was started a second time on {node.name}")

    def at_end(self, requests: Mapping[str, int]) -> None:
        """Paths that the workers' rows tell of, and what came of users' requests."""
        for node in self._fleet.nodes.values():
            self._note_versions(node)
        self.take("a held request was given up", requests.get("request 503", 0))
        self.take("a user left before the answer", requests.get("request left", 0))
        for node in self._fleet.workers:
            store = self._fleet.store(node)
            if store is None:
                continue
            self.take("the beginning of a log was cut off", store.read.get(LogFloorRow, LogFloorRow.KEY) is not None)
            for row in store.read.select(DecisionRow):
                outcomes = [attempt["outcome"] for attempt in row.decision["attempts"]]
                self.take("a reservation raced and was refused", outcomes.count("refused"))
                self.take("a reservation in doubt was tried elsewhere", outcomes.count("in_doubt"))
                reasons = [refusal["reason"] for refusal in row.decision["refusals"]]
                self.take("an order was refused because a disk was full", reasons.count("disk_full"))
            records = store.read.query("select kind, cause from log where kind like 'reservation.%'")
            kinds = Counter(kind for kind, _ in records)
            given_up = sum(
                1 for kind, cause in records if kind == "reservation.released" and "gave the order up" in cause
            )
            self.take("a reservation lapsed", kinds["reservation.lapsed"])
            self.take("an order in doubt was released", given_up)
            self.take(
                "a machine was started again after its host lost power",
                len(
                    store.read.select(
                        RunRow, "flow = 'machine.exit' and body like '%was gone when the worker started%'"
                    )
                ),
            )
