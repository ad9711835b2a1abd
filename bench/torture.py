"""What becomes of odd requests and answers: public suites and attacks, through both data planes.

    python -m bench.torture [--quick] [--http11probe REPOSITORY] [--cache DIRECTORY] [--suite NAME] [--list]

Each request is sent to a proxy before a machine, and all that reaches the machine is read by two strict parsers, h11
and llhttp. They must see the same requests, as many as the user was answered, and, where a suite takes a request, those
that it says. The plane `haproxy` comes twice: before it carries an app, and when it does.

`REPOSITORY` is a clone of github.com/MDA2AV/Http11Probe, whose cases are left out without it. The other suites are
fetched from PyPI; `--quick` asks for none, and tries a few of our own cases.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from tests.kit.planes import Embedded, Haproxy
from tests.kit.raw_http import User
from tests.kit.routers import FakeMachine, FakeRoute
from tests.kit.waiting import until

from bench.command import Table, options, told
from bench.torture_answers import Said, answered, lies, said
from bench.torture_h2 import Anyone, Case2, asked
from bench.torture_h2 import cases as cases2
from bench.torture_machine import Machine, Reader, by_h11
from bench.torture_suites import Asked, Case, Verdict, gunicorn, llhttp, own, probe
from bench.torture_sweep import sweep
from hawker.proxy.haproxy.backends import HOSTS_MOST

SILENCE_S = 0.15
"""What was not answered by then waits for more of the request."""
BUSY_S = 1.5
"""The same for what went wrong, which is tried again: the host may be busy."""
SETTLED_S = 0.02
"""What did not end by then after its last answer goes on."""

VERDICTS: tuple[Verdict, ...] = ("taken", "refused", "stricter", "laxer", "wrong")
Tried = tuple[Case | Case2 | Said, Verdict, str]


def misread(case: Case, seen: list[Asked]) -> str:
    """How another strict reader takes what the user has sent, where it takes it, and otherwise."""
    here = [asked[1:] for asked in seen]
    raw = b"".join(case.parts)
    reader = Reader(raw)
    if not reader.problem and not reader.silent and reader.requests[: len(here)] != here:
        return f"llhttp reads {reader.requests} of what was sent"
    there = by_h11(raw)
    if there is not None and there[: len(here)] != here:
        return f"h11 reads {there} of what was sent"
    return ""


class Heard(msgspec.Struct):
    """`statuses` but 1xx; `said`: the proxy's own words."""

    statuses: list[int]
    said: str
    closed: bool


class Way:
    """To the machine through a plane."""

    def __init__(self, plane: Embedded, carried: bool) -> None:
        self._plane = plane
        self._carried = carried
        self._warm: set[str] = set()
        self.machine = Machine()

    async def open(self) -> None:
        await self.machine.open()
        router = Anyone(FakeRoute("web", [FakeMachine("m1", self.machine.address)]))
        await self._plane.open(router, {"region": "ams", "token": "secret"})
        if isinstance(self._plane, Haproxy) and not self._carried:
            self._plane.delegator.slots = 0

    async def close(self) -> None:
        await self._plane.close()
        await self.machine.close()

    async def tried(self, case: Case) -> tuple[Verdict, str]:
        if self._carried:
            for host in re.findall(rb"(?im)^host: *([a-z0-9.-]{1,64})(?::\d+)?\r$", b"".join(case.parts)):
                await self._warmed(host.decode().lower())
        for silence_s, settled_s in ((SILENCE_S, SETTLED_S), (BUSY_S, BUSY_S)):
            self.machine.begin()
            heard = await self._told(case, silence_s, settled_s)
            with suppress(TimeoutError):
                await until(lambda: all(link.closed or not link.pending for link in self.machine.links), 1.0)
            verdict, how = judged(case, heard, self.machine)
            if verdict != "wrong":
                break
            await asyncio.sleep(BUSY_S)  # what is late is not the next one's
        return verdict, how

    async def _warmed(self, host: str) -> None:
        """Have HAProxy carry this host. It knows some names of an app only, and has learned a few by itself."""
        if host in self._warm or len(self._warm) == HOSTS_MOST // 2:
            return
        self._warm.add(host)
        for _ in range(100):
            decided = sum(self._plane.context.counters.statuses.values())
            user = await User.at(self._plane.http)
            await user.ask(f"GET / | Host: {host}")
            await user.close()
            if sum(self._plane.context.counters.statuses.values()) == decided:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"HAProxy does not carry {host}")

    async def _told(self, case: Case, silence_s: float, settled_s: float) -> Heard:
        reader, writer = await asyncio.open_connection(*self._plane.http)
        data = b""
        closed = False
        most = len(case.requests) if case.wants == "taken" and case.requests is not None else 0
        with suppress(ConnectionError):
            for number, part in enumerate(case.parts):
                writer.write(part)
                before = len(_statuses(data))
                while not closed:
                    answered = len(_statuses(data))
                    if answered > before and number < len(case.parts) - 1:
                        break
                    silence = settled_s if answered > before and answered >= most else silence_s
                    try:
                        more = await asyncio.wait_for(reader.read(1 << 16), silence)
                    except TimeoutError:
                        break
                    except ConnectionError:
                        more = b""
                    closed = not more
                    data += more
        writer.transport.abort()
        said = re.search(rb"(?m)^P[A-Z]\d\d: (?:this is no request that is taken: )?(.*)$", data)
        return Heard(_statuses(data), said[1].decode() if said else "", closed)


def _statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.[01] ([2-5]\d\d) ", data)]


def judged(case: Case, heard: Heard, machine: Machine) -> tuple[Verdict, str]:
    if problem := machine.misread():
        return "wrong", problem
    seen = machine.requests
    good = [status for status in heard.statuses if status < 300]
    if len(good) != len(seen):
        return "wrong", f"answered {heard.statuses}, and the machine saw {seen}"
    refused = len(heard.statuses) > len(good) or (heard.closed and not good)
    bad = next((status for status in heard.statuses if status >= 400), "closed" if heard.closed else "waits")
    how = f"{bad} {heard.said}".strip()
    if case.ends and good and not heard.closed:
        return "laxer", "taken, and its connection goes on"
    if case.open:
        whole = seen == list(case.requests or ())
        return ("refused", how) if whole else ("wrong", f"the machine saw {seen}, and then {how}")
    if case.wants == "taken":
        if refused:
            early = seen == list((case.requests or ())[: len(seen)])
            return ("stricter", how) if early else ("wrong", f"the machine saw {seen}, and then {how}")
        if case.requests is not None and seen != list(case.requests):
            return "wrong", f"the machine saw {seen}, not {case.requests}"
        lost = case.fields - machine.fields[0] if machine.fields else case.fields
        return ("wrong", f"the machine did not see {sorted(lost)}") if lost else ("taken", "")
    if case.suite.startswith("sweep") and (otherwise := misread(case, seen)):
        return "wrong", f"the machine saw {seen}, {otherwise}"
    if case.wants == "either":
        return "refused" if refused or not good else "taken", how
    if not refused and good:
        return "laxer", f"taken as {seen}"
    if seen != list((case.requests or ())[: len(seen)]):
        return "laxer", f"{how}, and what follows is taken: {seen}"
    return "refused", how


def read(repository: str, cache: Path) -> list[Case]:
    cases = [*gunicorn(cache), *llhttp(cache)]
    if repository:
        more, unread = probe(repository)
        cases += more
        print(f"Http11Probe: {unread} cases are not shown byte for byte, and left out")
    return [*cases, *own(), *sweep()]


QUICK = {"own": 5, "sweep: lengths": 5, "sweep: bytes": 5}
"""So many cases of these suites, which need nothing that is fetched."""


async def measure(cases: list[Case], answers: list[Said], attacks: Sequence[Case2]) -> dict[str, list[Tried]]:
    found: dict[str, list[Tried]] = {"embedded": [], "haproxy, first": [], "haproxy, carried": []}

    async def go(name: str, kind: type[Embedded], carried: bool) -> None:
        way = Way(kind(), carried)
        await way.open()
        try:
            found[name] += [(case, *await way.tried(case)) for case in cases]
        finally:
            await way.close()
        if attacks:
            found[name] += await asked(kind(), attacks, carried=carried)
        found[name] += [(answer, *outcome) for answer, outcome in await answered(answers, kind, carried=carried)]

    async with asyncio.TaskGroup() as group:
        group.create_task(go("embedded", Embedded, False))
        group.create_task(go("haproxy, first", Haproxy, False))
        group.create_task(go("haproxy, carried", Haproxy, True))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--http11probe", default="", metavar="REPOSITORY")
    parser.add_argument("--cache", type=Path, metavar="DIRECTORY")
    parser.add_argument("--suite", default="")
    parser.add_argument("--list", action="store_true", help="every case that is not as its suite says")
    given = parser.parse_args(arguments)
    if given.quick:
        every = [*own(), *sweep()]
        cases = [case for suite, count in QUICK.items() for case in [c for c in every if c.suite == suite][:count]]
        found = asyncio.run(measure(cases, list(lies())[:3], list(cases2())[:5]))
    else:
        with tempfile.TemporaryDirectory() as name:
            cache = given.cache or Path(name)
            cases = [case for case in read(given.http11probe, cache) if given.suite in case.suite]
            answers = [answer for answer in said(cache) if given.suite in answer.suite]
        attacks = list(cases2()) if given.suite in "sweep: HTTP/2" else []
        found = asyncio.run(measure(cases, answers, attacks))
    table = Table()
    shown(table, found, every=given.list)
    told(table, given)
    return 1 if any(verdict == "wrong" for tried in found.values() for _, verdict, _ in tried) else 0


def shown(table: Table, found: dict[str, list[Tried]], *, every: bool) -> None:
    suites = Counter(case.suite for case, _, _ in next(iter(found.values())))
    for suite, count in suites.items():
        for way, tried in found.items():
            verdicts = Counter(verdict for case, verdict, _ in tried if case.suite == suite)
            told_of = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict])
            if verdicts:
                table.add(f"{suite}: wrong through {way}", verdicts["wrong"], "", "0", f"of {count}: {told_of}")
    for way, tried in found.items():
        reasons: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        for case, verdict, how in tried:
            if verdict == "wrong" or (every and verdict in ("stricter", "laxer")):
                reasons[verdict, case.suite, how].append(case.name)
        for (what, suite, how), names in sorted(reasons.items()):
            print(f"\n{way}, {suite}, {what}: {how}\n  " + "\n  ".join(names))


if __name__ == "__main__":
    sys.exit(main())
