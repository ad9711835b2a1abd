"""A data plane on HAProxy in a process of its own, to be killed:
`python -m tests.kit.plane_process DIRECTORY MACHINE [CERTIFICATES]`.

It serves the app `web`, which has the machine at this port of 127.0.0.1, and says on its output at which port. With
certificates it does so over TLS.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.kit.routers import FakeDelegator, FakeMachine, FakeRoute, FakeRouter

import hawker.host
from hawker.proxy.base import ServicePort
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstreams import UpstreamPools
from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.settings import HaproxySettings


async def main(directory: str, machine: str, of_tls: str = "") -> None:
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where the log goes
    service = ServicePort(handlers=("tls", "http") if of_tls else ("http",))
    router = FakeRouter(FakeRoute("web", [FakeMachine("m1", ("127.0.0.1", int(machine)))], service))
    haproxy = HaproxySettings(look_s=0.02, backends=4)
    settings = Settings(region="ams", token="secret")
    host = hawker.host.live()
    certificates = Certificates((Path(of_tls),), host) if of_tls else None
    if certificates is not None:
        await certificates.look()
    upstreams = UpstreamPools(settings, host.sockets)
    parts = PlaneParts(router=router, settings=settings, host=host, upstreams=upstreams, certificates=certificates)
    engine = HaproxyPlane(parts, FakeDelegator(router), haproxy, Path(directory))
    _, port = await engine.listen("127.0.0.1", 0, public=443 if of_tls else 80)
    print(port, file=said, flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(*sorted(app for app, _ in engine.carried), line.decode().strip(), file=said, flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
