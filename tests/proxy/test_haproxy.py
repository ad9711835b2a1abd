"""What HAProxy does by itself, and what it brings to the activator."""

from __future__ import annotations

import asyncio
import base64
import csv
import os
import random
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from tests.kit.planes import Haproxy
from tests.kit.raw_http import Answer, Broken, Upstream, Visit, chunked, echo, head, hello, saying
from tests.kit.routers import FakeDelegator
from tests.kit.waiting import at_rest, eventually, until
from tests.proxy.conftest import Stage
from tests.proxy.test_replays import handing, handing_json

import hawker.host
from hawker.core.metrics import Registry
from hawker.errors import Unreachable
from hawker.proxy.base import Address
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.upstreams import UpstreamPools
from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.process import LOG_MOST, end_left
from hawker.proxy.haproxy.runtime import ask
from hawker.proxy.haproxy.settings import HaproxySettings

WEB = ("web", 80)


class Hot(Stage):
    """A stage on HAProxy."""

    def __init__(self, backends: int, look_s: float, most: int = 8192) -> None:
        super().__init__(self._made)
        self._settings = HaproxySettings(look_s=look_s, backends=backends, backends_most=most)

    def _made(self) -> Haproxy:
        return Haproxy(self._settings)

    @property
    def engine(self) -> HaproxyPlane:
        assert isinstance(self.plane, Haproxy)
        assert isinstance(self.plane, Haproxy)
        return self.plane.haproxy

    @property
    def delegator(self) -> FakeDelegator:
        assert isinstance(self.plane, Haproxy)
        return self.plane.delegator

    @property
    def decided(self) -> int:
        """Requests that the activator has answered."""
        return sum(self.engine.counters.statuses.values())

    async def warm(self, app: str = "web", *, writing: bool = False) -> Answer:
        """Have HAProxy carry the app, also `writing` methods. Returns the answer to the first request."""
        answer = await self.ask(f"GET / | Host: {app}.example")
        await until(lambda: (app, 80) in self.engine.carried)
        if writing:
            await self.ask(f"POST / | Host: {app}.example | Content-Length: 0")
            await until(lambda: (app, 80) in self.engine.writing)
        return answer


@asynccontextmanager
async def hot(backends: int = 4, look_s: float = 0.02, most: int = 8192) -> AsyncIterator[Hot]:
    stage = Hot(backends, look_s, most)
    try:
        yield stage
    finally:
        await stage.close()


async def test_an_app_that_was_served_once_needs_no_decision_any_more() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm()
        user = await stage.user()
        for _ in range(5):
            assert (await user.ask("GET /")).body == b"hello"
        assert (len(machine.visits), stage.decided) == (6, 1)


async def test_no_file_that_haproxy_may_read_has_the_clusters_token() -> None:
    async with hot() as stage:
        await stage.machine()
        await stage.warm()
        assert isinstance(stage.plane, Haproxy)
        directory = stage.plane.directory / "h"
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert {"state.json", "haproxy.cfg"} <= {path.name for path in files}
        assert stage.settings["token"] == "secret"
        assert [path.name for path in files if b"secret" in path.read_bytes()] == []
        assert stat.S_IMODE((directory / "state.json").stat().st_mode) == 0o600


def names(answer: Answer) -> set[str]:
    return {name.decode() for name, _ in answer.fields} - {"fly-request-id"}


async def test_both_ways_look_the_same_to_machine_and_user() -> None:
    async with hot() as stage:
        stage.serves(set_headers=((b"x-frame-options", b"DENY"),), removed_headers=frozenset({b"x-powered-by"}))
        fields = b"X-Powered-By: PHP\r\nServer: it\r\nVia: 1.1 other\r\nHawker-Load: 1\r\nKeep-Alive: timeout=5\r\n"
        machine = await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + fields + b"\r\nhi"))
        answers = [await stage.warm(), await stage.ask("GET /")]
        assert stage.decided == 1
        ids = [answer["fly-request-id"] for answer in answers]
        assert ids == [visit["fly-request-id"] for visit in machine.visits]
        assert ids[0] != ids[1]
        assert all(each.endswith("-ams") for each in ids)
        before, after = ({name: ", ".join(answer.all(name)) for name in names(answer)} for answer in answers)
        assert before == after
        assert after["via"] == "1.1 other, 1.1 hawker"
        one, two = (
            sorted(field for field in visit.fields if field[0] != b"fly-request-id") for visit in machine.visits
        )
        assert one == two
        assert machine.visits[1]["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize(("pristine", "left"), [(False, {"server", "via", "fly-request-id"}), (True, set[str]())])
async def test_a_pristine_answer_has_nothing_of_ours(pristine: bool, left: set[str]) -> None:
    async with hot() as stage:
        stage.serves(pristine=pristine)
        await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nServer: it\r\n\r\n"))
        await stage.warm()
        answer = await stage.ask("GET /")
        assert {name.decode() for name, _ in answer.fields} == {"content-length", *left}
        assert stage.decided == 1


@pytest.mark.parametrize(
    "text",
    [
        "GET / | Fly-Force-Instance-Id: m1",
        "GET / | Fly-Prefer-Region: ams",
        "GET / | Fly-Replay-Src: x",
        "GET / | Fly-Request-Id: mine",
        "GET / | Hawker-Timing: 1",
        "GET / | Hawker-Client: 192.0.2.1",
        "GET / | X-Forwarded-For: 192.0.2.1",
        "GET / | X_Own: 1",
        "GET / | Via: 1.1 x",
        "GET / | Accept: text/event-stream",
        "GET / | Connection: x-own | X-Own: 1",
        "GET / | Connection: upgrade | Upgrade: x",
        "GET / | Proxy-Authorization: x",
        "GET / | Content-Length: 0",
        "POST / | Transfer-Encoding: chunked",
        f"POST / | Content-Length: {8193}",
        f"POST / | X-Own: {'x' * 5000}",
        "GET http://web.example/ | Host: web.example",
        "GET /.well-known/acme-challenge/x",
    ],
)
async def test_what_is_not_plain_is_decided_by_the_activator(text: str) -> None:
    body = chunked(b"x") if "chunked" in text else bytes(8193) if "8193" in text else b""
    async with hot() as stage:
        machine = await stage.machine(echo)
        await stage.warm(writing=True)
        assert (await stage.ask(text, body)).status == 200
        assert stage.decided == 3
        assert machine.visits[2]["fly-client-ip"] == "127.0.0.1"
        assert machine.visits[2].all("hawker-client") == []


async def test_after_an_apps_first_request_that_changes_something_such_need_no_decision() -> None:
    async with hot() as stage:
        machine = await stage.machine(echo)
        await stage.warm()
        user = await stage.user()
        for number, method in enumerate(("POST", "PATCH", "PUT", "DELETE", "MKCOL")):
            for size in (0, 1, 8192):
                body = random.Random(size).randbytes(size)
                assert (await user.ask(f"{method} / | Content-Length: {size}", body)).body == body
                if not number:
                    await until(lambda: WEB in stage.engine.writing)
        assert stage.decided == 2
        one, two = (
            sorted(field for field in visit.fields if field[0] not in (b"fly-request-id", b"content-length"))
            for visit in machine.visits[1:3]
        )
        assert one == two


async def test_a_body_that_haproxy_keeps_may_come_in_pieces() -> None:
    async with hot() as stage:
        machine = await stage.machine(echo)
        await stage.warm(writing=True)
        user = await stage.user()
        for piece in (head("POST / | Content-Length: 6"), b"abc", b"def"):
            assert len(machine.visits) == 2, "no machine waits for it"
            await user.send(piece)
            await asyncio.sleep(0)
        assert (await user.answer()).body == b"abcdef"
        assert stage.decided == 2


async def test_a_machine_that_breaks_off_is_not_sent_the_same_twice_if_that_could_change_something_twice() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm(writing=True)
        machine.behaviour = saying(b"", then="close")
        user = await stage.user()
        with suppress(Broken):  # of a connection that was used before, HAProxy leaves it to the user
            assert (await user.ask("POST / | Content-Length: 1", b"x")).status == 502
        assert [visit.method for visit in machine.visits].count("POST") == 2


@pytest.mark.parametrize("kind", ["field", "json"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_the_first_request_that_is_handed_on_is_answered_as_it_should(kind: str, method: str) -> None:
    async with hot() as stage:
        first = await stage.machine()
        second = await stage.machine(saying(b"HTTP/1.1 201 Made\r\nX-Own: 2\r\nContent-Length: 5\r\n\r\nthere"))
        await stage.warm(writing=True)
        first.behaviour = handing("instance=m2;state=x") if kind == "field" else handing_json(instance="m2", state="x")
        user = await stage.user()
        body = b"a body" if method == "POST" else b""
        for number in range(3):
            answer = await user.ask(f"{method} /a?b | X-Mine: 1 | Content-Length: {len(body)}", body)
            assert (answer.status, answer.body, answer["x-own"]) == (201, b"there", "2")
            assert answer.all("fly-replay") == []
            visit = second.visits[number]
            assert (visit.method, visit.target, visit["x-mine"], visit.body) == (method, "/a?b", "1", body)
            assert visit["fly-replay-src"].startswith("instance=m1;region=ams;")
            assert visit["fly-replay-src"].endswith(";state=x")
            assert visit["fly-request-id"] == answer["fly-request-id"]
            await until(lambda: WEB not in stage.engine.carried)
        assert len(first.visits) == 2 + 3, "it is asked once for each request, by HAProxy and then by the activator"


async def test_users_cannot_say_that_a_machine_has_handed_their_request_on() -> None:
    said = base64.b64encode(b"fly-replay: instance=m2\n").decode()
    async with hot() as stage:
        await stage.machine()
        second = await stage.machine()
        for text in (f"GET / | Hawker-Handed: m1 fields {said}", f"GET / | hawker-handed: m1 fields {said} | Via: x"):
            assert (await stage.ask(text)).status == 200
        assert second.visits == []


async def test_an_answer_too_large_for_that_is_asked_for_again_by_the_user() -> None:
    async with hot() as stage:
        first = await stage.machine()
        await stage.machine(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000))
        await stage.warm()
        first.behaviour = handing("instance=m2")
        user = await stage.user()
        answer = await user.ask("GET /a?b")
        assert (answer.status, answer["location"]) == (307, "/a?b")
        assert len((await user.ask("GET /a?b")).body) == 100_000


async def test_an_app_that_begins_to_give_interim_answers_is_not_carried_any_more() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm()
        hint = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n"
        machine.behaviour = saying(hint + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert (await stage.ask("GET /")).status == 200
        await until(lambda: WEB not in stage.engine.carried)
        decided = stage.decided
        assert (await stage.ask("GET /")).interim == []
        assert stage.decided == decided + 1


@pytest.mark.parametrize("kind", ["chunked", "length"])
async def test_an_answer_after_an_interim_one_is_whole_and_its_app_is_not_carried(kind: str) -> None:
    """HAProxy 2.6 takes the second of two that it reads at once for one without a body, and ends it there."""
    head_, first, rest = {
        "chunked": (b"Transfer-Encoding: chunked", b"4\r\nhalf\r\n", b"4\r\nmore\r\n0\r\n\r\n"),
        "length": (b"Content-Length: 8", b"half", b"more"),
    }[kind]

    async def hinting(visit: Visit) -> None:
        await visit.read()
        hint = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n"
        await visit.send(hint + b"HTTP/1.1 200 OK\r\n" + head_ + b"\r\n\r\n" + first)
        await at_rest(lambda: len(visit.upstream.visits))
        await visit.send(rest)

    async with hot() as stage:
        await stage.machine(hinting)
        for number in range(1, 4):
            answer = await stage.ask("GET /")
            assert (answer.status, answer.body, answer.interim) == (200, b"halfmore", [])
            assert stage.decided == number


async def test_a_machine_that_refuses_connections_is_given_up_and_the_activator_finds_another() -> None:
    async with hot() as stage:
        first = await stage.machine()
        await stage.machine(echo)
        await stage.warm()
        await first.close()
        assert (await stage.ask("GET /")).status == 200
        assert "refused" in stage.web.machines[0].failures
        assert stage.decided == 2


def slow_until(go: asyncio.Event) -> Callable[[Visit], Awaitable[None]]:
    """A machine's program that answers `/slow` only then, and anything else at once."""

    async def waiting(visit: Visit) -> None:
        if visit.target == "/slow":
            await go.wait()
        await hello(visit)

    return waiting


async def test_what_is_over_the_soft_limit_is_decided_one_by_one() -> None:
    go = asyncio.Event()

    async with hot() as stage:
        machine = await stage.machine(slow_until(go))
        await stage.open()
        stage.delegator.slots = 2
        await stage.warm()
        users = [await stage.user() for _ in range(2)]
        for user in users:
            await user.send(head("GET /slow"))
        await until(lambda: len(machine.visits) == 3)
        assert (await stage.ask("GET /")).status == 200
        assert stage.decided == 2
        await until(lambda: stage.web.machines[0].carried == 2)
        go.set()
        for user in users:
            assert (await user.answer()).body == b"hello"
        assert (await stage.ask("GET /")).status == 200
        assert stage.decided == 2
        await until(lambda: stage.web.machines[0].carried == 0)


async def test_a_machine_is_given_back_only_when_nothing_is_in_flight_there() -> None:
    go = asyncio.Event()

    async with hot() as stage:
        machine = await stage.machine(slow_until(go))
        await stage.warm()
        withdraw = stage.delegator.withdraw
        user = await stage.user()
        await user.send(head("GET /slow"))
        await until(lambda: len(machine.visits) == 2)
        giving_back = asyncio.ensure_future(withdraw("m1"))
        await until(lambda: stage.web.machines[0].carried == 1)
        stage.delegator.slots = 0
        assert not await giving_back
        assert (await stage.ask("GET /")).status == 200
        assert stage.decided == 2, "it gets no more"
        go.set()
        assert (await user.answer()).body == b"hello"
        assert await withdraw("m1")


async def test_a_machine_that_is_given_back_has_no_connection_left_and_gets_new_ones_when_it_is_lent_again() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm()
        users = [await stage.user() for _ in range(3)]
        for user in users:
            await user.send(head("GET /"))
        for user in users:
            assert (await user.answer()).body == b"hello"
        assert machine.held > 1
        withdraw = stage.delegator.withdraw
        stage.delegator.slots = 0
        assert await withdraw("m1")
        stage.plane.context.upstreams.let_go(
            machine.address, asleep=False
        )  # as its door does, for those of the activator
        await until(lambda: machine.held == 0)
        stage.delegator.slots = 20
        stage.delegator.changed("web")

        async def carried() -> bool:
            decided = stage.decided
            assert (await users[0].ask("GET /")).body == b"hello"
            return stage.decided == decided

        await eventually(carried, "HAProxy asks the machine itself")


async def test_no_connection_is_kept_to_where_a_machine_was_also_if_a_request_was_under_way_there() -> None:
    go = asyncio.Event()
    async with hot() as stage:
        before = await stage.machine(slow_until(go))
        await stage.warm()
        late, other = await stage.user(), await stage.user()
        await late.send(head("GET /slow"))
        await until(lambda: len(before.visits) == 2)
        after = Upstream(hello)
        await after.open()
        stage.web.machines[0].address = after.address
        stage.delegator.changed("web")

        async def moved() -> bool:
            await other.ask("GET /")
            return len(after.visits) > 0

        await eventually(moved, "requests go to where the machine is now")
        seen = len(before.visits)
        go.set()
        assert (await late.answer()).status == 200

        async def carried() -> bool:
            decided = stage.decided
            await late.ask("GET /")
            return stage.decided == decided

        await eventually(carried, "HAProxy asks the machine itself")
        for _ in range(5):
            await other.ask("GET /")
        assert len(before.visits) == seen
        await after.close()


async def test_no_connection_is_kept_to_where_a_machine_was_if_a_request_came_there_after_the_last_look() -> None:
    """Looks are seldom here, and at another app, where something is in flight."""
    go = asyncio.Event()
    async with hot(look_s=10.0) as stage:
        other = await stage.machine(slow_until(go), route=stage.app("other"))
        await stage.warm("other")
        busy, late, user = [await stage.user() for _ in range(3)]
        await busy.send(head("GET /slow | Host: other.example"))
        await until(lambda: len(other.visits) == 2)
        stage.delegator.changed("other")
        await until(lambda: stage.router.routes["other.example"].machines[0].carried == 1)

        before = await stage.machine(slow_until(go))
        await stage.warm()
        await late.send(head("GET /slow"))
        await until(lambda: len(before.visits) == 2)
        after = await stage.upstream()
        stage.web.machines[0].address = after.address
        stage.delegator.changed("web")

        async def moved() -> bool:
            await user.ask("GET /")
            return len(after.visits) > 0

        await eventually(moved, "requests go to where the machine is now")
        seen = len(before.visits)
        go.set()
        for each in (busy, late):
            assert (await each.answer()).status == 200

        async def carried() -> bool:
            stage.delegator.changed("web")
            decided = stage.decided
            await user.ask("GET /")
            return stage.decided == decided

        await eventually(carried, "HAProxy asks the machine itself")
        for _ in range(5):
            await user.ask("GET /")
        assert len(before.visits) == seen


async def test_a_machine_that_is_given_back_has_lost_also_the_connection_whose_request_had_to_end_first() -> None:
    go = asyncio.Event()
    async with hot() as stage:
        machine = await stage.machine(slow_until(go))
        await stage.warm()
        user = await stage.user()
        await user.send(head("GET /slow"))
        await until(lambda: len(machine.visits) == 2)
        withdraw = stage.delegator.withdraw
        stage.delegator.slots = 0
        assert not await withdraw("m1"), "a request is in flight there"
        go.set()
        assert (await user.answer()).body == b"hello"
        await eventually(lambda: withdraw("m1"), "nothing is in flight there")
        assert isinstance(stage.plane, Haproxy)
        said = await ask(f"{stage.plane.directory}/h/stats.sock", ["show stat -1 4 -1"])
        rows = list(csv.DictReader(said.splitlines()))
        assert sum(int(row["idle_conn_cur"]) for row in rows if row["svname"] == "m1") == 0


@pytest.mark.parametrize("which", ["master", "worker"])
async def test_haproxy_is_started_again_when_it_ends(which: str) -> None:
    async with hot() as stage:
        await stage.machine()
        await stage.warm()
        workers = await stage.engine.workers()
        os.kill(workers.master if which == "master" else workers.serving, signal.SIGKILL)

        async def another() -> bool:
            try:
                return (await stage.engine.workers()).master != workers.master
            except Unreachable:
                return False

        await eventually(another, "another HAProxy")
        assert WEB in stage.engine.carried
        assert (await stage.ask("GET /")).body == b"hello"
        assert stage.decided == 1


async def test_a_reload_makes_room_for_more_apps_and_no_request_fails() -> None:
    go = asyncio.Event()

    async with hot(backends=1) as stage:
        machine = await stage.machine(slow_until(go))
        await stage.machine(route=stage.app("other"))
        await stage.machine(route=stage.app("third"))
        await stage.warm()
        slow = await stage.user()
        await slow.send(head("GET /slow"))
        await until(lambda: len(machine.visits) == 2)
        over = False
        statuses: set[int] = set()

        async def load() -> None:
            while not over:
                user = await stage.user()
                for _ in range(20):
                    answer = await user.ask("GET /")
                    statuses.add(answer.status)
                    if answer.all("connection"):
                        break
                await user.close()

        loading = [asyncio.create_task(load()) for _ in range(4)]
        before = await stage.engine.workers()
        await stage.warm("other")
        await stage.warm("third")
        now = await stage.engine.workers()
        over = True
        await asyncio.gather(*loading)
        assert statuses == {200}
        assert now.serving != before.serving
        assert before.serving in now.old, "it finishes what it has"
        assert stage.engine.carried == {WEB, ("other", 80), ("third", 80)}
        await until(lambda: stage.web.machines[0].carried == 1)
        withdraw = stage.delegator.withdraw
        assert not await withdraw("m1"), "a request is in flight there, from before the reload"
        go.set()
        assert (await slow.answer()).body == b"hello"
        await until(lambda: stage.web.machines[0].carried == 0)


async def test_a_service_that_changes_is_served_as_it_says_now() -> None:
    async with hot() as stage:
        await stage.machine()
        await stage.warm()
        stage.serves(set_headers=((b"x-own", b"new"),))
        stage.delegator.changed("web")
        await until(lambda: WEB not in stage.engine.carried)
        assert (await stage.warm())["x-own"] == "new"
        assert (await stage.ask("GET /"))["x-own"] == "new"
        stage.serves(force_https=True)
        stage.delegator.changed("web")
        await until(lambda: WEB not in stage.engine.carried)
        assert (await stage.ask("GET /")).status == 301


async def test_an_app_of_which_nothing_can_be_told_keeps_haproxy_from_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with hot() as stage:
        await stage.machine()
        await stage.machine(route=stage.app("other"))
        await stage.machine(route=stage.app("later"))
        await stage.warm()
        await stage.warm("other")
        stage.delegator.breaks.add("web")
        for _ in range(3):
            stage.delegator.changed("web")
            before = stage.router.routes["other.example"].machines[0].address
            after = await stage.upstream()
            stage.router.routes["other.example"].machines[0].address = after.address
            stage.delegator.changed("other")

            async def moved(upstream: Upstream = after) -> bool:
                decided = stage.decided
                await stage.ask("GET / | Host: other.example")
                return stage.decided == decided and len(upstream.visits) > 0

            await eventually(moved, f"HAProxy asks the machine where it is now, not at {before}")
        await stage.warm("later")
        assert capsys.readouterr().err.count("haproxy.fault") == 1


@pytest.mark.slow
async def test_what_haproxy_says_does_not_fill_the_disk() -> None:
    async with hot() as stage:
        await stage.machine()
        await stage.warm()
        assert isinstance(stage.plane, Haproxy)
        log = stage.plane.directory / "h" / "log"
        with log.open("ab") as said:
            said.write(bytes(LOG_MOST + 1))
        await until(lambda: log.stat().st_size < LOG_MOST)
        stage.delegator.slots = 0  # what it says next stands at the beginning
        stage.delegator.changed("web")
        await until(lambda: WEB not in stage.engine.carried)
        await until(lambda: 0 < log.stat().st_size < LOG_MOST)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_machine_that_haproxy_has_not_as_it_should_is_given_to_it_anew(gone: bool) -> None:
    """As when its answer to a command was lost: it may have done it, or not."""
    async with hot() as stage:
        await stage.machine()
        await stage.warm()
        user = await stage.user()
        assert (await user.ask("GET /")).body == b"hello"
        assert isinstance(stage.plane, Haproxy)
        path = f"{stage.plane.directory}/h/stats.sock"
        rows = csv.DictReader((await ask(path, ["show stat -1 4 -1"])).splitlines())
        (at,) = (f"{row['# pxname']}/m1" for row in rows if row["svname"] == "m1")
        await ask(path, [f"set server {at} state maint"])

        async def deleted() -> bool:
            return "Server deleted." in await ask(path, [f"set server {at} state maint;del server {at}"])

        if gone:
            await eventually(deleted, "no connection is left there")

        async def carried() -> bool:
            decided = stage.decided
            assert (await user.ask("GET /")).body == b"hello"
            return stage.decided == decided

        await eventually(carried, "HAProxy asks the machine itself")


async def test_an_app_whose_service_changes_again_and_again_is_carried_each_time() -> None:
    """Each service is of a kind of its own, of which HAProxy has only so many."""
    async with hot(most=12) as stage:
        await stage.machine()
        await stage.warm()
        for number in range(4):
            stage.serves(set_headers=((b"x-own", b"%d" % number),))
            stage.delegator.changed("web")
            await until(lambda: WEB not in stage.engine.carried)
            await stage.warm()
            decided = stage.decided
            assert (await stage.ask("GET /"))["x-own"] == f"{number}"
            assert stage.decided == decided


async def test_closing_finishes_what_haproxy_has_under_way() -> None:
    go = asyncio.Event()

    async with hot() as stage:
        machine = await stage.machine(slow_until(go))
        await stage.warm()
        user = await stage.user()
        await user.send(head("GET /slow"))
        await until(lambda: len(machine.visits) == 2)
        closing = asyncio.create_task(stage.plane.close())

        async def refused() -> bool:
            try:
                (await stage.user()).reset()
            except ConnectionRefusedError:
                return True
            return False

        await eventually(refused, "no connection is taken any more")
        go.set()
        answer = await user.answer()
        assert (answer.body, answer["connection"]) == (b"hello", "close")
        await closing


@pytest.mark.parametrize("end", ["close", "stay"])
async def test_a_machine_that_refuses_a_large_body_at_once_is_heard(end: str) -> None:
    async def refusing(visit: Visit) -> None:
        await visit.answer(b"too large", "413 Content Too Large", *(["Connection: close"] if end == "close" else []))
        if end == "close":
            visit.close()
        else:
            await visit.reader.read(1 << 20)

    async with hot() as stage:
        await stage.machine(refusing)
        user = await stage.user()
        sending = asyncio.create_task(user.send(head(f"POST / | Content-Length: {8 << 20}") + bytes(8 << 20)))
        answer = await user.answer()
        assert (answer.status, answer.body) == (413, b"too large")
        user.reset()
        await asyncio.gather(sending, return_exceptions=True)


async def test_the_metrics_have_also_what_haproxy_carries() -> None:
    async with hot() as stage:
        machine = await stage.machine()
        await stage.warm()
        user = await stage.user()
        for status in (200, 200, 404):
            machine.behaviour = saying(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
            assert (await user.ask("GET /")).status == status
        registry = Registry()
        for collector in stage.engine.collectors():
            registry.register(collector)
        await until(lambda: count(registry, "2xx") + count(registry, "4xx") == 3)
        assert (count(registry, "2xx"), count(registry, "4xx")) == (2, 1)
        assert registry.value("hawker_proxy_requests_total", status="200") == 1


def count(registry: Registry, status: str) -> float:
    return registry.value("hawker_proxy_carried_requests_total", status=status) or 0


async def test_the_access_log_has_also_what_haproxy_carries(tmp_path: Path) -> None:
    go = asyncio.Event()
    path = tmp_path / "access.log"
    async with hot() as stage:
        stage.settings["access_log"] = str(path)
        await stage.machine(slow_until(go))
        await stage.warm()
        text = 'GET /a"b | Referer: http://x/\\ | User-Agent: "cur\xfcl"'
        answer = await stage.ask(text)
        leaving = await stage.user()
        await leaving.send(head("GET /slow"))
        await until(lambda: stage.web.machines[0].carried == 1)
        await leaving.close()
        assert stage.decided == 1

        def lines() -> list[str]:
            return path.read_text().splitlines() if path.exists() else []

        await until(lambda: len(lines()) == 3)
        go.set()
        carried = next(line for line in lines() if "/a" in line)
        said = re.escape(answer["fly-request-id"])
        assert re.fullmatch(
            r"127\.0\.0\.1 - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d \+0000\] "
            r'"GET /a\\x22b HTTP/1\.1" 200 \d+ "http://x/\\x5c" "\\x22cur\\xfcl\\x22" ' + said + r" web m1 \d+ \d+",
            carried,
        ), carried
        left = next(line for line in lines() if "/slow" in line)
        assert " 499 " in left
        assert left.split()[-2] == "-"


async def test_what_was_left_to_go_on_and_is_not_wished_for_any_more_ends() -> None:
    """The configuration has changed: its addresses are free, and nobody waits at them for an answer."""
    settings = HaproxySettings(look_s=0.02, backends=1, plain=(80, 81))
    stage = Stage(lambda: Haproxy(settings))
    plane = await stage.open()
    assert isinstance(plane, Haproxy)
    try:
        other = await plane.haproxy.listen("127.0.0.1", 0, public=81)
        master = (await plane.haproxy.workers()).master
        plane.context.retiring = True  # as it is when the agent is begun anew
        await plane.haproxy.close()

        one = msgspec.structs.replace(settings, plain=(80,))
        embedded, host = Settings(**stage.settings), hawker.host.live()
        upstreams, router = UpstreamPools(embedded, host.sockets), plane.context.router
        parts = PlaneParts(router=router, settings=embedded, host=host, upstreams=upstreams)
        again = HaproxyPlane(parts, plane.delegator, one, plane.directory / "h")
        await again.listen(*plane.http, public=80)
        await until(lambda: not listens(other))
        assert listens(plane.http)
        again.activator.context.retiring = True
        await again.close()

        await end_left(settings, plane.directory / "h", 1.0)
        os.waitpid(master, 0)  # noqa: ASYNC222  # it has ended
        assert not listens(plane.http)
    finally:
        await end_left(settings, plane.directory / "h", 1.0)
        await stage.close()


def listens(address: Address) -> bool:
    try:
        socket.create_connection(address, 5).close()
    except ConnectionRefusedError:
        return False
    return True
