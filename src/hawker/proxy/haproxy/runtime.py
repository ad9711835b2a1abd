"""Speaks HAProxy's runtime API: lines of text over a socket in the file system (its management guide, section 9.3).

Commands go to all worker processes that still serve: after a reload the old ones answer what they have taken, and must
hear, too, that a machine gets no more requests.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterable, Sequence

import msgspec

from hawker.errors import Unreachable
from hawker.proxy.haproxy.config import ACTIVATOR, Server, server_words

ASK_S = 5.0
NOWHERE = 1
"""A port where nobody listens."""
BATCH = 64
"""How many commands are sent at a time: a line is 16 KiB at most."""
_FINE = ("", "New server registered.", "Server deleted.")
_GONE = ("Server deleted.", "No such server.")
_ADDRESS = ("no need to change ", "IP changed from ", "port changed from ")
"""How HAProxy begins to say which address a server has now."""


CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
"""The classes of statuses that HAProxy counts."""
INTERIM = CLASSES.index("1xx")
"""The place of interim answers in `CLASSES`: none of them switches protocols, which is the activator's."""


class Workers(msgspec.Struct, frozen=True):
    """The master process, and those that serve. `old` are still busy from before a reload."""

    master: int
    serving: int = 0
    old: tuple[int, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine in a backend has: `now` counts its requests (waiting ones among them), `total` all there ever
    were; `slots` are for them. `up`: it has refused no connection; `taken`: it is given requests. `answers`: how many
    of each of `CLASSES`."""

    now: int
    total: int
    answers: tuple[int, ...] = (0,) * len(CLASSES)
    slots: int = 0
    up: bool = True
    taken: bool = True


async def ask(path: str, commands: Sequence[str]) -> str:
    """Send commands. Returns the answer as one text. Raises `Unreachable`."""
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 24)
            try:
                writer.write((";".join(commands) + "\n").encode())
                writer.write_eof()  # the master waits for the end of what is sent
                await writer.drain()
                return (await reader.read(-1)).decode("utf-8", "replace")
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"HAProxy does not answer at {path}: {error or 'in time'}") from error


async def workers(master: str) -> Workers:
    """`master` is the path of its socket."""
    found: list[int] = []
    old: list[int] = []
    where = found
    for line in (await ask(master, ["show proc"])).splitlines():
        if line.startswith("#"):
            where = old if "old workers" in line else where
        elif line[:1].isdigit():
            pid, kind = line.split()[:2]
            if kind in ("master", "worker"):
                where.append(int(pid))
    if not found:
        raise Unreachable(f"HAProxy at {master} has no processes")
    return Workers(found[0], found[1] if len(found) > 1 else 0, tuple(old))


class Runtime:
    """The runtime API of one HAProxy. `directory` has its sockets. `old` are workers from before a reload."""

    def __init__(self, directory: str) -> None:
        self.path = f"{directory}/stats.sock"
        self.master = f"{directory}/master.sock"
        self.old: tuple[int, ...] = ()

    async def do(self, commands: Sequence[str], *, old: bool = True) -> list[str]:
        """Send commands. Returns what was wrong, in the worker that serves. `old`: those from before a reload are told,
        too. Raises `Unreachable`."""
        problems: list[str] = []
        for at in range(0, len(commands), BATCH):
            some = commands[at : at + BATCH]
            said = await ask(self.path, some)
            lines = said.splitlines()
            problems += [line for line in lines if line.strip() not in _FINE and not line.startswith(_ADDRESS)]
            for pid in self.old if old else ():
                await ask(self.master, [f"@!{pid} {command}" for command in some])
        return problems

    async def remove(self, backend: str, machines: Sequence[str]) -> list[str]:
        """Remove machines from a backend that get no requests: those to which HAProxy has no connection any more, nor
        keeps one. Returns those that are removed. Raises `Unreachable`."""
        gone: list[str] = []
        await self.do([line for name in machines for line in closing(backend, name)])
        for at in range(0, len(machines), BATCH):
            some = machines[at : at + BATCH]
            commands = [f"del server {backend}/{name}" for name in some]
            said = [line for line in (await ask(self.path, commands)).splitlines() if line.strip()]
            if len(said) == len(some):  # one line for each
                gone += [name for name, line in zip(some, said, strict=True) if line.startswith(_GONE)]
            for pid in self.old:
                await ask(self.master, [f"@!{pid} {command}" for command in commands])
        return gone

    async def refresh(self) -> Workers:
        found = await workers(self.master)
        self.old = found.old
        return found

    async def requests(self) -> int:
        """How many requests are under way, in all workers. Raises `Unreachable`."""
        found = await self.refresh()
        count = 0
        for pid in (found.serving, *found.old):
            if pid:
                said = await ask(self.master, [f"@!{pid} show sess"])
                count += sum(" fe=p" in line for line in said.splitlines())
        return count

    async def busy(self) -> dict[str, tuple[int, int, int]]:
        """Counts of each backend: requests now, all there ever were, machines that take some; of the worker that
        serves."""
        found: dict[str, tuple[int, int, int]] = {}
        queued = now = total = machines = 0
        for line in (await ask(self.path, ["show stat -1 2 -1"])).splitlines():
            fields = line.split(",", 20)  # there are thousands of them, with a hundred columns
            if line.startswith("# "):
                queued, now, total, machines = map(fields.index, ("qcur", "scur", "stot", "act"))
            elif len(fields) > machines:
                count = _number(fields[now]) + _number(fields[queued])
                found[fields[0]] = count, _number(fields[total]), _number(fields[machines])
        return found

    async def usage(self, backends: Iterable[str]) -> dict[str, dict[str, Usage]]:
        """What the machines of each backend have, by id, of all workers together."""
        wanted = list(backends)
        commands = [f"show stat {name} 4 -1" for name in wanted]
        found: dict[str, dict[str, Usage]] = {name: {} for name in wanted}
        for at in range(0, len(commands), BATCH):
            some = commands[at : at + BATCH]
            for row in _rows(await ask(self.path, some)):
                _add(found, row)
            for pid in self.old:
                for row in _rows(await ask(self.master, [f"@!{pid} {command}" for command in some])):
                    _add(found, row)
        return found

    async def handshakes(self, frontend: str) -> tuple[int, int]:
        """Handshakes of TLS that succeeded, and connections that came to none, of the worker that serves; what is under
        way counts among the latter."""
        for line in (await ask(self.path, [f"show stat {frontend} 1 -1"])).splitlines():
            if line.startswith("# "):
                total, sessions, shaken = map(line[2:].split(",").index, ("conn_tot", "stot", "ssl_sess"))
            elif line:
                fields = line.split(",")
                return _number(fields[shaken]), _number(fields[total]) - _number(fields[sessions])
        return 0, 0

    async def map(self, path: str) -> dict[str, str]:
        """The backends of a map, by host."""
        said = (await ask(self.path, [f"show map {path}"])).splitlines()
        return {parts[1]: parts[2] for line in said if len(parts := line.split()) == 3}

    async def addresses(self) -> dict[str, dict[str, tuple[str, int]]]:
        """The addresses of each backend's machines, by id, also of those that get nothing."""
        found: dict[str, dict[str, tuple[str, int]]] = {}
        for line in (await ask(self.path, ["show servers state"])).splitlines():
            parts = line.split()
            if len(parts) > 18 and parts[0].isdigit() and parts[3] != ACTIVATOR:
                found.setdefault(parts[1], {})[parts[3]] = parts[4], int(parts[18])
        return found


def adding(backend: str, server: Server) -> list[str]:
    """Commands that put a machine into a backend and give it requests."""
    at = f"{backend}/{server.machine}"
    return [f"add server {at} {server_words(server)}", f"enable health {at}", f"enable server {at}"]


def opening(backend: str, server: Server) -> list[str]:
    """Commands that give requests to a machine that is in a backend, at this very address. With another address HAProxy
    would keep connections to the old one."""
    at = f"{backend}/{server.machine}"
    return [
        f"set maxconn server {at} {server.slots}",
        f"set server {at} health up",
        f"set server {at} state ready",
    ]


def closing(backend: str, machine: str) -> list[str]:
    """Commands that give a machine no more requests; those under way go on."""
    return [f"set server {backend}/{machine} state maint"]


def emptying(backend: str, machine: str) -> list[str]:
    """Commands by which a machine without requests loses the connections that HAProxy keeps to it. HAProxy drops them
    when an address changes; as long as it has this address, nothing may be sent there."""
    return [f"set server {backend}/{machine} addr 127.0.0.1 port {NOWHERE}"]


def _add(found: dict[str, dict[str, Usage]], row: dict[str, str]) -> None:
    machines = found.get(row["pxname"])
    if machines is None or row["svname"] == ACTIVATOR:
        return
    now, total = _number(row["scur"]) + _number(row["qcur"]), _number(row["stot"])
    answers = tuple(_number(row[f"hrsp_{name}"]) for name in CLASSES)
    before = machines.get(row["svname"])
    if before is None:
        status = row["status"]
        machines[row["svname"]] = Usage(
            now=now,
            total=total,
            answers=answers,
            slots=_number(row["slim"]),
            up=not status.startswith("DOWN"),
            taken=not status.startswith(("MAINT", "DOWN")),
        )
    else:
        machines[row["svname"]] = msgspec.structs.replace(
            before,
            now=before.now + now,
            total=before.total + total,
            answers=tuple(map(operator.add, before.answers, answers)),
        )


def _rows(text: str) -> list[dict[str, str]]:
    """Read CSV that has a line of names before it; no field that is read has a comma or quotes."""
    rows: list[dict[str, str]] = []
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("# "):
            names = line[2:].split(",")
            names = names[: names.index("hrsp_5xx") + 1]
        elif line and names:
            row = dict(zip(names, line.split(",", len(names)), strict=False))
            if len(row) == len(names):
                rows.append(row)
    return rows


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
