"""How the data planes keep the rules of HTTP/2: h2spec (github.com/summerwind/h2spec) against them, by chapter.

    python -m bench.h2spec

Takes `h2spec` from PATH, or builds it with Go. Over TLS, which HAProxy ends for names that it knows, and in plain text
with prior knowledge. In plain text one case cannot pass, "Sends invalid connection preface": what begins otherwise is
HTTP/1.1 there, and gets its answer, 400.
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
from pathlib import Path

from tests.kit.authority import Authority
from tests.kit.planes import Haproxy
from tests.kit.raw_http import Upstream, User, Visit
from tests.kit.routers import FakeMachine, FakeRoute, FakeRouter

import hawker.host
from hawker.proxy.base import Address, ServicePort
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.engine import Engine
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy.plane import HaproxyEngine

MODULE = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
PLAIN = "3.5. HTTP/2 Connection Preface: Sends invalid connection preface"


def program(directory: str) -> str:
    found = shutil.which("h2spec")
    if found:
        return found
    go = shutil.which("go")
    if go is None:
        sys.exit("h2spec is not on PATH, and Go is not there to build it")
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


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        h2spec = program(name)
        authority = Authority()
        authority.write(directory, "localhost")
        host = hawker.host.live()
        certificates = Certificates((directory,), host, default="localhost")
        await certificates.look()
        upstream = Upstream(answer)
        await upstream.open()
        machines = [FakeMachine("m1", upstream.address)]
        bad = False
        for title, handlers, options in (("TLS", ("tls", "http"), ("-t", "-k")), ("plain text", ("http",), ())):
            router = Anyone(FakeRoute("web", machines, ServicePort(handlers=handlers)))
            engine = Engine(router, Settings(region="ams", h2_strikes=1e9), host, certificates)
            at = await engine.listen("127.0.0.1", 0, public=443)
            report = await tested(h2spec, directory, at, *options)
            await engine.close()
            bad |= shown(title, report)
        if shutil.which("haproxy"):
            plane = Haproxy()
            router = Anyone(FakeRoute("web", machines))
            await plane.open(router, {"region": "ams", "certificates": directory})
            shown("plain text, before HAProxy", await tested(h2spec, directory, plane.http))
            router.find(443, "").port = ServicePort(handlers=("tls", "http"))
            assert isinstance(plane.engine, HaproxyEngine)
            while not (plane.engine.opened(443) and plane.engine.carried):
                user = await User.at(plane.tls, "", authority.client("http/1.1"), "localhost")
                await user.ask("GET / | Host: localhost")
                await user.close()
            bad |= shown("TLS, by HAProxy", await tested(h2spec, directory, ("localhost", plane.tls[1]), "-t", "-k"))
            await plane.close()
        await upstream.close()
    sys.exit(bad)


def shown(title: str, report: ElementTree.Element) -> bool:
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
    print(f"\n{title}")
    for chapter, count in every.items():
        print(f"  {chapter:<10} {passed[chapter]:>4} of {count}")
    print(f"  {'all':<10} {passed.total():>4} of {every.total()}")
    for text in failed:
        print(f"  failed: {text}")
    return any(not (title == "plain text" and text == PLAIN) for text in failed)


if __name__ == "__main__":
    asyncio.run(main())
