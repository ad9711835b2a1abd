"""Bodies that come slowly: they take no places from others, and come at all."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.http2 import User2
from tests.kit.planes import Embedded
from tests.kit.raw_http import Answer, User, Visit, chunked, echo, head
from tests.kit.waiting import until
from tests.proxy.conftest import Stage

from hawker.proxy.base import Refused, ServicePort
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.embedded.uploads import LEAN_MOST, Upload, Uploads

# What comes slowly passes HAProxy by, or is waited for by it.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)


async def paced(user: User, answer: asyncio.Task[Answer], piece: bytes) -> Answer:
    """Such a piece fifty times a second, until there is an answer."""
    while not (await asyncio.wait([answer], timeout=0.02))[0]:
        await user.send(piece)
    return await answer


def uploads(stage: Stage) -> list[Upload]:
    """Those that are watched, in their order."""
    assert isinstance(stage.plane, Embedded)
    return list(stage.plane.context.uploads._under_way)


async def test_a_body_that_can_be_kept_is_there_before_a_place_is_taken(stage: Stage) -> None:
    await stage.machine(echo)
    (machine,) = stage.web.machines
    users = [await stage.user() for _ in range(30)]
    for user in users:
        await user.send(head("POST / | Content-Length: 4") + b"ab")
    assert (await stage.ask("GET /")).status == 200
    assert machine.taken == 1
    for user in users:
        await user.send(b"cd")
        assert (await user.answer("POST")).body == b"abcd"
    assert machine.taken == 31


async def test_so_it_is_over_http2_and_for_an_app_that_is_loaded_first(stage: Stage) -> None:
    await stage.machine(echo)
    (machine,) = stage.web.machines
    stage.router.later.add("web.example")
    user = await stage.user()
    await user.send(head("POST / | Content-Length: 4") + b"ab")
    await until(lambda: stage.router.loads == 1)
    two = await User2.at((await stage.open()).http)
    stream = await two.begin("POST / | content-length: 4", ended=False)
    await two.body(stream, b"ab", ended=False)
    await two.ask("GET /")
    assert machine.taken == 1
    await user.send(b"cd")
    assert (await user.answer("POST")).body == b"abcd"
    await two.body(stream, b"cd")
    assert (await two.answer(stream)).body == b"abcd"
    await two.close()


async def test_where_it_belongs_is_told_before_all_of_it_came(stage: Stage) -> None:
    user = await stage.user()
    await user.send(head("POST / | Host: nobody.example | Content-Length: 4") + b"ab")
    assert (await user.answer("POST")).status == 404


async def test_an_app_that_is_gone_when_the_body_is_there_is_told_as_such(stage: Stage) -> None:
    await stage.machine(echo)
    user = await stage.user()
    await user.send(head("POST / | Content-Length: 4") + b"ab")
    await stage.ask("GET /")
    del stage.router.routes["web.example"]
    await user.send(b"cd" + head("GET / | Host: nobody.example"))
    assert [(await user.answer("POST")).status, (await user.answer()).status] == [404, 404]
    stage.router.routes["web.example"] = stage.web


async def test_a_machine_that_is_to_say_whether_it_wants_a_body_is_asked_at_once(stage: Stage) -> None:
    async def wanting(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await echo(visit)

    await stage.machine(wanting)
    user = await stage.user()
    await user.send(head("POST / | Content-Length: 4 | Expect: 100-continue"))
    await user.send(b"abcd" if await user.reader.readuntil(b"\r\n\r\n") else b"")
    assert (await user.answer("POST")).body == b"abcd"


async def test_where_too_much_is_kept_bodies_pass_as_they_come(stage: Stage) -> None:
    stage.settings |= {"replay_bytes_of_all": 1000}
    machine = await stage.machine(echo)
    user = await stage.user()
    await user.send(head("POST / | Content-Length: 3000") + b"x" * 2000)
    await until(lambda: len(machine.visits) == 1)
    await user.send(b"x" * 1000)
    assert len((await user.answer("POST")).body) == 3000


# --- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 2 << 20])
async def test_a_body_that_says_how_long_it_is_and_hardly_comes_is_given_up(stage: Stage, length: int) -> None:
    stage.settings |= {"upload_look_s": 0.05}
    await stage.machine(echo)
    user = await stage.user()
    await user.send(head(f"POST / | Content-Length: {length}"))
    answer = await paced(user, asyncio.create_task(user.answer("POST")), b"x")
    assert (answer.status, answer["connection"], answer.body[:4]) == (408, "close", b"PH03")


@pytest.mark.parametrize("answered", [False, True])
async def test_a_stream_may_have_nothing_to_say(stage: Stage, answered: bool) -> None:
    stage.settings |= {"upload_look_s": 0.02}
    size = 2 << 20

    async def talking(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
        await visit.read()
        await visit.send(b"0\r\n\r\n")

    machine = await stage.machine(talking if answered else echo)
    user = await stage.user()
    await user.send(head("POST / | " + (f"Content-Length: {size}" if answered else "Transfer-Encoding: chunked")))
    await until(lambda: len(machine.visits) == 1)
    (upload,) = uploads(stage)
    await until(lambda: upload.lean > 2 * LEAN_MOST)
    await user.send(b"x" * size if answered else chunked(b"x"))
    assert (await user.answer("POST")).status == 200


class Gone:
    """A request of a service that speaks HTTP/2 or not, and what became of it."""

    app = "web"
    answered = False
    others = 0

    def __init__(self, *, h2_backend: bool) -> None:
        self.port = ServicePort(handlers=("http",), h2_backend=h2_backend)
        self.refused = asyncio.Event()

    def refuse(self, refusal: Refused) -> None:
        self.refused.set()


async def test_so_may_any_of_a_service_that_speaks_http2(stage: Stage) -> None:
    uploads = Uploads(Settings(upload_look_s=0.02), asyncio.get_running_loop())
    grpc, other = Gone(h2_backend=True), Gone(h2_backend=False)
    watched = [uploads.watch(each, sized=True, awaited=False) for each in (grpc, other)]
    await asyncio.wait_for(other.refused.wait(), 5)
    await until(lambda: watched[0].lean > 2 * LEAN_MOST)
    assert not grpc.refused.is_set()
    uploads.drop(watched[0])


async def test_those_who_wait_have_the_places_of_bodies_that_come_slowly_the_slowest_first(stage: Stage) -> None:
    stage.settings |= {"upload_look_s": 0.1}
    machine = await stage.machine(echo)
    (endpoint,) = stage.web.machines
    users = [await stage.user() for _ in range(3)]
    for count, user in enumerate(users, 1):
        await user.send(head("POST / | Transfer-Encoding: chunked"))
        await until(lambda count=count: len(machine.visits) == count)  # type: ignore[misc]
    still, slow, quick = (asyncio.create_task(user.answer("POST")) for user in users)
    slowly = asyncio.create_task(paced(users[1], slow, b"1\r\nx\r\n"))
    quickly = asyncio.create_task(paced(users[2], quick, b"800\r\n" + b"x" * 0x800 + b"\r\n"))
    looked = uploads(stage)
    await until(lambda: all(0 < upload.rate < 8192 for upload in looked[1:2]) and looked[0].rate == 0)
    assert endpoint.in_flight == 3, "as long as nobody waits a slow body is in nobody's way"
    endpoint.wanted = 1
    answer = await still
    endpoint.wanted = 0
    assert (answer.status, b"others wait" in answer.body) == (408, True)
    assert endpoint.in_flight == 2
    endpoint.wanted = 5
    assert (await slowly).status == 408
    since = looked[2].since
    await until(lambda: looked[2].since > since)
    assert endpoint.in_flight == 1, "who is quick enough is left alone"
    endpoint.wanted = 0
    for task in (quickly, quick):
        task.cancel()
    await asyncio.gather(quickly, quick, return_exceptions=True)


async def test_when_the_machine_takes_nothing_it_is_not_the_senders_fault(stage: Stage) -> None:
    stage.settings |= {"upload_look_s": 0.02, "window_bytes": 1 << 10}
    go = asyncio.Event()

    async def later(visit: Visit) -> None:
        await go.wait()
        await echo(visit)

    await stage.machine(later)
    size = 16 << 20
    user = await stage.user()
    sending = asyncio.create_task(user.ask(f"POST / | Content-Length: {size}", b"x" * size))
    await until(lambda: any(upload.held for upload in uploads(stage)))
    (upload,) = uploads(stage)
    since = upload.since
    await until(lambda: upload.since > since + 0.2)
    go.set()
    assert len((await sending).body) == size
