"""HAProxy before a real worker: starts, stops and limits are decided as without it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.doors import House, house
from tests.kit.tiers import full
from tests.kit.waiting import until

from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.settings import RouterSettings

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")
STOP: dict[str, Any] = {"autostop": "stop"}
THREADED = """
import http.server, os, time
class It(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    most = now = 0
    def do_GET(self):
        It.now += 1
        It.most = max(It.most, It.now)
        time.sleep(float(os.environ.get("ANSWER_S", "0")))
        body = b"%d" % It.most
        It.now -= 1
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024
Server(("127.0.0.1", int(os.environ["PORT"])), It).serve_forever()
"""
"""A program that answers many at a time, with how many there were at most. It needs the standard library."""


@pytest.fixture
def haproxy() -> Iterator[HaproxySettings]:
    """A path that sockets fit in."""
    directory = tempfile.mkdtemp(prefix="haproxy-")
    yield HaproxySettings(look_s=0.02, backends=4, directory=f"{directory}/h")
    shutil.rmtree(directory)


def engine(it: House) -> HaproxyPlane:
    assert isinstance(it.proxy.plane, HaproxyPlane)
    return it.proxy.plane


def decided(it: House) -> int:
    return sum(engine(it).counters.statuses.values())


async def warm(it: House, app: str = "web") -> None:
    assert (await it.get(app))[0] == 200
    await until(lambda: (app, 80) in engine(it).carried)


@pytest.mark.parametrize("requests", [200, *full(1000)])
async def test_many_requests_at_once_start_a_sleeping_machine_once(
    tmp_path: Path, haproxy: HaproxySettings, requests: int
) -> None:
    async with house(tmp_path, haproxy=haproxy) as it:
        limits = {"concurrency": {"type": "requests", "soft_limit": 2000}}
        machine = await it.machine("web", program=THREADED, service=limits)
        answers = await asyncio.gather(*(it.asked("web", seconds=60) for _ in range(requests)))
        assert {status for status, _, _ in answers} == {200}
        assert it.story(machine).count("start starting") == 1


async def test_a_machine_that_haproxy_keeps_busy_is_not_stopped_and_an_idle_one_is(
    tmp_path: Path, haproxy: HaproxySettings
) -> None:
    async with house(tmp_path, RouterSettings(idle_s=0.2, idle_look_s=0.02), haproxy=haproxy) as it:
        machine = await it.machine("web", service=STOP, env={"ANSWER_S": "0.5"})
        await warm(it)
        for _ in range(2):
            assert (await it.get("web"))[0] == 200
        assert decided(it) == 1
        assert "stop stopping" not in it.story(machine)
        await it.in_state(machine, "stopped")
        assert (await it.get("web"))[0] == 200
        assert it.story(machine).count("start starting") == 2


async def test_no_request_meets_a_machine_that_is_put_to_rest(tmp_path: Path, haproxy: HaproxySettings) -> None:
    async with house(tmp_path, RouterSettings(idle_s=0.02, idle_look_s=0.01), haproxy=haproxy) as it:
        machine = await it.machine("web", service=STOP)
        await warm(it)
        statuses = set()
        for number in range(40):
            statuses.add((await it.get("web"))[0])
            await asyncio.sleep(0.005 * (number % 9))  # so that it falls into any phase of a machine's rest
        assert statuses == {200}
        assert it.story(machine).count("stop stopping") > 1, "it was put to rest between requests"


async def test_the_hard_limit_holds_over_both_ways(tmp_path: Path, haproxy: HaproxySettings) -> None:
    async with house(tmp_path, haproxy=haproxy) as it:
        limits = {"concurrency": {"type": "requests", "soft_limit": 4, "hard_limit": 6}}
        await it.machine("web", program=THREADED, service=limits, env={"ANSWER_S": "0.03"})
        await warm(it)
        odd = "x-forwarded-for: 192.0.2.1\r\n"
        asked = [it.asked("web", headers=odd if number % 3 == 0 else "", seconds=30) for number in range(150)]
        answers = await asyncio.gather(*asked)
        assert {status for status, _, _ in answers} == {200}
        most = max(int(body) for _, _, body in answers)
        assert 4 <= most <= 6
        assert decided(it) < 151, "HAProxy has filled its places"


async def test_another_machine_is_started_when_all_are_at_their_soft_limits(
    tmp_path: Path, haproxy: HaproxySettings
) -> None:
    async with house(tmp_path, haproxy=haproxy) as it:
        limits = {"concurrency": {"type": "requests", "soft_limit": 2}}
        env = {"ANSWER_S": "0.3"}
        one = await it.machine("web", program=THREADED, service=limits, env=env, started=True)
        two = await it.machine("web", program=THREADED, service=limits, env=env)
        await warm(it)
        answers = await asyncio.gather(*(it.asked("web", seconds=30) for _ in range(12)))
        assert {status for status, _, _ in answers} == {200}
        await it.in_state(two, "started")
        assert it.story(one).count("start starting") == 1
