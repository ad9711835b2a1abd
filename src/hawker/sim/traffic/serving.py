"""Machines' programs that take requests, in a simulation: each request occupies its machine for as long as it says.

A program listens at its machine's ports once it has booted, answers, and notes what it was brought. It runs as a
process of its own: a suspended one hears nothing, though its system still takes connections for it, and the end of one
ends its connections. What must never reach it is judged where it happens (S18).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from hawker.model.catalog import LogId, Position
from hawker.model.door import AUTOSTART, AUTOSTOP
from hawker.model.rows import LogHeadRow, RunRow
from hawker.sim.checks.paths import Paths
from hawker.sim.clients.messages import message
from hawker.sim.clients.owners import HARD
from hawker.sim.fleet import Fleet
from hawker.sim.hosts.node import Node
from hawker.sim.hosts.world import Placed
from hawker.sim.platform.processes import PROCESS, Connection, Process
from hawker.worker.drivers.base import InstanceSpec

SETTLES_S = 0.002
"""The two sides of a connection on one host may differ about its end for so long."""
ON_ITS_WAY_S = 0.05
"""A request that a proxy sent before it knew of a stop arrives within this time."""


class Asked(NamedTuple):
    """A request as a machine receives it."""

    id: str
    method: str
    app: str
    work_s: float
    streamed: bool


class Server:
    """The program of one instance. `active` are the requests that it works on."""

    def __init__(self, serving: Serving, node: Node, placed: Placed) -> None:
        self.node = node
        self.spec = placed.spec
        self.machine = placed.spec.machine
        self.app = str(placed.spec.env.get("FLY_APP_NAME", ""))
        self.hard = int(placed.spec.env.get(HARD, 0))
        self.active: dict[_Connection, Asked] = {}
        self.process = Process(f"program {self.machine}", node.station)
        self.stopping_s: float | None = None
        self.asleep = False  # its proxy has put it to rest
        self.hung = self.suspended = False  # if either is set, it does not run
        self.unhung_s = -ON_ITS_WAY_S  # when its last hang ended
        self.unread: frozenset[Connection] = frozenset()  # as it was suspended
        self.serving = serving
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self.process)
        assert placed.program.listens_s is not None
        node.net.loop.call_later(placed.program.listens_s, self._open, context=self._context)

    def _open(self) -> None:
        net, network = self.node.net, self.spec.network
        try:
            for port in (*self.spec.listens, *(network.publish if network else ())):
                net.listen(lambda: _Connection(self), port.host_port)
                if network:
                    net.listen(lambda: _Connection(self), port.internal_port, inside=network.address)
        except OSError:  # another program of the host has it
            self.node.world.end(self.spec.key, code=98)

    def run_if_it_may(self) -> None:
        loop = self.node.net.loop
        if self.hung or self.suspended:
            loop.pause(self.process)
        else:
            loop.resume(self.process)

    def unread_now(self) -> frozenset[Connection]:
        return frozenset(end for end in self.node.station.ends if end.unread_by(self.process))

    def end(self, *, silently: bool) -> None:
        self.node.net.loop.kill(self.process)
        self.node.net.close_all(self.process, silently=silently)
        self.active.clear()


class Serving:
    """All programs, by instance. `delivered` counts how often each request has reached a program whole. `on_turn` is
    called with an app at the very moment in which one of its machines is stopped, resumed or started."""

    def __init__(self, fleet: Fleet, paths: Paths) -> None:
        self._fleet = fleet
        self._paths = paths
        self.servers: dict[str, Server] = {}
        self.delivered: Counter[str] = Counter()
        self.violations: list[str] = []
        self.on_turn: Callable[[str], None] = lambda app: None
        self.wakes = Counter[str]()  # starts and resumes by machine, whoever asked for them

    def add(self, node: Node) -> None:
        node.world.on_sign = lambda what, placed: self._sign(node, what, placed)
        node.world.on_hang = lambda hung: self._hang(node, hung)

    def on_program(self, node: Node, what: str, spec: InstanceSpec) -> None:
        if what == "started":
            placed = node.world.instances[spec.key]
            if placed.program.listens_s is not None:
                server = self.servers[spec.key] = Server(self, node, placed)
                self.on_turn(server.app)
                self.wakes[spec.machine] += 1
                if self._by(AUTOSTART, node, spec.machine):
                    self._paths.take("a sleeping machine was started for a request")
        elif ended := self.servers.pop(spec.key, None):
            if ended.active:
                self._paths.take("a machine ended while it worked on a request")
            ended.end(silently=what == "lost")

    def _sign(self, node: Node, what: str, placed: Placed) -> None:
        server = self.servers.get(placed.spec.key)
        if server is None:
            return
        self.on_turn(server.app)
        if what == "resume":
            self._resume(server)
            server.suspended = False
            server.run_if_it_may()
            return
        if self._by(AUTOSTOP, node, server.machine):
            self._fleet.record.note("rest", node.name, f"{what} {server.machine}")
            self._paths.take("a machine was put to rest by its proxy")
            server.asleep = True
            if server.active and not server.hung:  # a program that hangs does not notice who has left
                ids = [asked.id for asked in server.active.values()]
                self._wrong(f"machine {server.machine} of app {server.app} was put to rest with {ids} in flight")
        else:
            server.stopping_s = node.net.loop.time()
        if what == "suspend":
            server.suspended, server.unread = True, server.unread_now()
            server.run_if_it_may()

    def _hang(self, node: Node, hung: bool) -> None:
        for server in self.servers.values():
            if server.node is node and server.hung is not hung:
                server.hung = hung
                server.unhung_s = self._fleet.loop.time()
                server.run_if_it_may()
                self._paths.take("a program hung while it worked on a request", hung and bool(server.active))

    def _resume(self, server: Server) -> None:
        if server.asleep and (unread := server.unread_now() - server.unread):
            self._wrong(f"{len(unread)} requests came to machine {server.machine} while it was suspended by its proxy")
        server.asleep, server.stopping_s = False, None
        self.wakes[server.machine] += 1
        if self._by(AUTOSTART, server.node, server.machine):
            self._paths.take("a suspended machine was resumed for a request")

    def _by(self, cause: str, node: Node, machine: str) -> bool:
        """Whether a run with this cause acts on the machine now."""
        store = self._fleet.store(node)
        runs = store.read.select(RunRow, "status = 'active'") if store else ()
        return any(run.resource == machine and cause in run.cause for run in runs)

    # --- what comes --------------------------------------------------------------------------------------------------

    def took(self, server: Server, asked: Asked) -> None:
        now = self._fleet.loop.time()
        self.delivered[asked.id] += 1
        self._fleet.record.note("request", server.node.name, f"{asked.id} at {server.machine}")
        where = f"machine {server.machine} of app {server.app}"
        if asked.app != server.app:
            self._wrong(f"{asked.id} for app {asked.app} reached {where}")
        if asked.method == "POST" and self.delivered[asked.id] > 1:
            self._wrong(f"POST {asked.id} was delivered {self.delivered[asked.id]} times, the last time to {where}")
        if now - server.unhung_s < ON_ITS_WAY_S:
            pass  # it reads what came while it hung
        elif server.asleep:
            self._wrong(f"{asked.id} reached {where}, which its proxy is putting to rest")
        elif server.stopping_s is not None and self._late(server, server.stopping_s):
            self._wrong(f"{asked.id} reached {where}, which is being stopped for {now - server.stopping_s:.3f} s")
        if server.hard and len(server.active) > server.hard:
            self._fleet.net.later(SETTLES_S, self._over, server, dict(server.active))

    def _late(self, server: Server, since_s: float) -> bool:
        process = server.node.process
        went_on_s = process.went_on_s if process else 0.0
        if self._is_behind(server.node):
            return False
        return self._fleet.loop.time() - max(since_s, went_on_s) > ON_ITS_WAY_S

    def _is_behind(self, node: Node) -> bool:
        """Whether the node's replica is behind its own log, as when the disk is full: then its proxy cannot know of a
        stop."""
        log = LogId(node.name, "region")
        store, member = self._fleet.store(node), node.agent and node.member
        head = store.read.get(LogHeadRow, log.tier) if store else None
        return bool(head and member and member.replica.position(log) < Position(head.epoch, head.head))

    def _over(self, server: Server, then: dict[_Connection, Asked]) -> None:
        """Report a machine that has more requests in flight than it takes, leaving out those that have ended
        meanwhile."""
        still = [asked.id for connection, asked in then.items() if server.active.get(connection) is asked]
        if len(still) > server.hard:
            self._wrong(
                f"machine {server.machine} has {len(still)} requests in flight, and takes {server.hard}: {still}"
            )

    def _wrong(self, what: str) -> None:
        self.violations.append(f"S18: {self._fleet.loop.time():.3f}: {what}")


class _Connection(asyncio.Protocol):
    """A connection of a program: one request after another."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self not in self._server.active:
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.active.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _read(self) -> None:
        found = message(self._held)
        if found is None:
            return
        lines, fields, length, rest = found
        if len(rest) < length:
            return
        self._held = rest[length:]
        if "x-id" not in fields:  # a health check
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        asked = Asked(
            fields["x-id"], lines[0].split(" ")[0], fields["x-app"], float(fields["x-work"]), "x-streamed" in fields
        )
        self._server.active[self] = asked
        self._server.serving.took(self._server, asked)
        loop = asyncio.get_running_loop()
        body = f"{asked.id} {self._server.machine}".encode()
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        if asked.streamed:
            half = len(answer) - len(body) // 2
            self._timer = loop.call_later(asked.work_s / 2, self._begin, answer[:half], answer[half:], asked.work_s / 2)
        else:
            self._timer = loop.call_later(asked.work_s, self._end, answer)

    def _begin(self, first: bytes, rest: bytes, work_s: float) -> None:
        self._transport.write(first)
        self._timer = asyncio.get_running_loop().call_later(work_s, self._end, rest)

    def _end(self, answer: bytes) -> None:
        self._server.active.pop(self, None)
        self._transport.write(answer)
        if self._held:
            self._read()
