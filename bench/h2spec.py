"""How the data planes keep the rules of HTTP/2: h2spec (github.com/summerwind/h2spec) against them, by chapter.

    python -m bench.h2spec [--quick]

Takes `h2spec` from PATH, or builds it with Go, which fetches it: no distribution has it. `--quick` builds nothing, and
without h2spec makes one request in each place where it would be run. Over TLS, which HAProxy ends for names that it
knows, and in plain text with prior knowledge. In plain text one case cannot pass, "Sends invalid connection preface":
what begins otherwise is HTTP/1.1 there, and gets its answer, 400.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.kit.authority import Authority
from tests.kit.http2 import User2
from tests.kit.planes import Haproxy
from tests.kit.raw_http import Upstream, User, Visit
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter

import hawker.host
from bench.command import Table, left_out, options, told
from hawker.proxy.base import Address, ServicePort
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.plane import EmbeddedPlane
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstreams import UpstreamPools

MODULE = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
PLAIN = "3.5. HTTP/2 Connection Preface: Sends invalid connection preface"


def program(directory: str, *, build: bool) -> str:
    """ "": there is none, and it cannot be built."""
    found = shutil.which("h2spec")
    if found or not build:
        return found or ""
    go = shutil.which("go")
    if go is None:
        sys.exit("bench.h2spec needs h2spec on PATH, or Go to build it")
    subprocess.run([go, "install", MODULE], env={**os.environ, "GOBIN": directory}, check=True)
    return f"{directory}/h2spec"


async def answer(visit: Visit) -> None:
    await visit.read()
    body = b"" if visit.method == "HEAD" else b"hello"
    await visit.answer(body)


class Anyone(FakeRouter):
    """Whatever the suite calls its server."""

    def find(self, port: int, host: str) -> FakeRoute:
        return next(iter(self.routes.values()))


async def tested(h2spec: str, directory: Path, at: Address, *options: str) -> ElementTree.Element:
    report = directory / "report.xml"
    command = (h2spec, "-h", at[0], "-p", str(at[1]), "-S", "-j", str(report), *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    await process.wait()
    return ElementTree.parse(report).getroot()


class Suite:
    """Runs h2spec, or without it one request, so that what it is run against stays in order. `bad`: some case failed
    that could pass."""

    def __init__(self, h2spec: str, directory: Path, authority: Authority, table: Table) -> None:
        self._h2spec = h2spec
        self._directory = directory
        self._tls = authority.client("h2")
        self._table = table
        self.bad = False

    async def run(self, title: str, at: Address, *, tls: bool = False) -> None:
        if self._h2spec:
            report = await tested(self._h2spec, self._directory, at, *(("-t", "-k") if tls else ()))
            self.bad |= shown(self._table, title, report)
            return
        user = await User2.at(at, self._tls if tls else None, "localhost")
        answer = await user.ask("GET / | :authority: localhost")
        await user.close()
        self._table.add(f"{title}: one request instead", answer.status, "", "200")
        self.bad |= answer.status != 200


async def measure(h2spec: str, directory: Path, table: Table) -> bool:
    """Whether anything failed that could pass."""
    authority = Authority()
    authority.write(directory, "localhost")
    host = hawker.host.live()
    certificates = Certificates((directory,), host, default="localhost")
    await certificates.look()
    upstream = Upstream(answer)
    await upstream.open()
    machines = [FakeMachine("m1", upstream.address)]
    suite = Suite(h2spec, directory, authority, table)
    for title, handlers, tls in (("TLS", ("tls", "http"), True), ("plain text", ("http",), False)):
        router = Anyone(FakeRoute("web", machines, ServicePort(handlers=handlers)))
        settings = Settings(region="ams", h2_strikes=1e9)
        upstreams = UpstreamPools(settings, host.sockets)
        parts = PlaneParts(router=router, settings=settings, host=host, upstreams=upstreams, certificates=certificates)
        engine = EmbeddedPlane(parts)
        await suite.run(title, await engine.listen("127.0.0.1", 0, public=443), tls=tls)
        await engine.close()
    if shutil.which("haproxy"):
        plane = Haproxy()
        router = Anyone(FakeRoute("web", machines))
        await plane.open(router, {"region": "ams", "certificates": directory})
        bad = suite.bad
        await suite.run("plain text, before HAProxy", plane.http)
        suite.bad = bad  # it is HAProxy that answers there
        router.find(443, "").port = ServicePort(handlers=("tls", "http"))
        while not (plane.haproxy.opened(443) and plane.haproxy.carried):
            user = await User.at(plane.tls, "", authority.client("http/1.1"), "localhost")
            await user.ask("GET / | Host: localhost")
            await user.close()
        await suite.run("TLS, by HAProxy", ("localhost", plane.tls[1]), tls=True)
        await plane.close()
    await upstream.close()
    return suite.bad


def shown(table: Table, title: str, report: ElementTree.Element) -> bool:
    """Whether anything failed that could pass."""
    passed: Counter[str] = Counter()
    every: Counter[str] = Counter()
    failed = []
    for suite in report.iter("testsuite"):
        chapter = suite.get("package", "").partition("/")[0]
        for case in suite.iter("testcase"):
            every[chapter] += 1
            if case.find("failure") is None and case.find("error") is None:
                passed[chapter] += 1
            else:
                failed.append(f"{suite.get('name')}: {case.get('classname')}")
    for chapter, count in every.items():
        table.add(f"{title}: {chapter}", passed[chapter], "", "", f"of {count}")
    table.add(f"{title}: all", passed.total(), "", "", f"of {every.total()}")
    for text in failed:
        print(f"  failed: {text}")
    return any(not (title == "plain text" and text == PLAIN) for text in failed)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__).parse_args(arguments)
    table = Table()
    with tempfile.TemporaryDirectory() as name:
        h2spec = program(name, build=not given.quick)
        bad = asyncio.run(measure(h2spec, Path(name), table))
    told(table, given)
    if bad:
        return 1
    return 0 if h2spec else left_out("h2spec")


if __name__ == "__main__":
    sys.exit(main())
