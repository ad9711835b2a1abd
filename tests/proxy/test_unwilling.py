"""Users and machines who do not take what they are sent: nothing of them stays, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.kit.planes import Embedded
from tests.kit.raw_http import Upstream, User, Visit, echo, head
from tests.kit.routers import FakeMachine
from tests.kit.waiting import at_rest, until
from tests.proxy.conftest import Stage
from tests.proxy.test_replays import handing

from hawker.proxy.base import ServicePort
from hawker.proxy.embedded.client import ClientConnection

# HAProxy has time-outs of its own for this.
pytestmark = pytest.mark.parametrize("stage", ["embedded"], indirect=True)

LARGE = 16 << 20
"""More than the system takes of a message that nobody reads."""
CLOSED = 7
"""The state of a connection that was reset, as Linux has it."""


def state(writer: asyncio.StreamWriter) -> int:
    return writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]  # type: ignore[no-any-return]


def all_came(stage: Stage) -> bool:
    """Whether the plane has all of the only request."""
    assert isinstance(stage.plane, Embedded)
    (connection,) = stage.plane.context.connections
    assert isinstance(connection, ClientConnection)
    assert connection._exchange is not None
    return not connection._exchange.sending


async def uploads(stage: Stage) -> tuple[User, Upstream]:
    """A user with a large body, all of which was sent on before its machine answered, which never reads it."""

    async def uninterested(visit: Visit) -> None:
        await visit.answer(b"no", "401 Unauthorized")
        await asyncio.Event().wait()

    stage.settings |= {"replay_bytes": 2 * LARGE}
    upstream = await stage.machine(uninterested, awake=False)
    (machine,) = stage.web.machines
    user = await stage.user()
    await user.send(head(f"POST / | Content-Length: {LARGE}") + b"x" * LARGE)
    await until(lambda: machine.waiting == 1 and all_came(stage))
    machine.awake.set()
    return user, upstream


async def test_a_machine_that_answers_without_reading_leaves_the_connection_for_the_next_request(stage: Stage) -> None:
    user, _ = await uploads(stage)
    assert (await user.answer("POST")).body == b"no"
    assert (await user.ask("GET /")).body == b"no"


async def test_what_a_machine_never_reads_does_not_stay(stage: Stage) -> None:
    stage.settings["idle_timeout_s"] = 0.2
    stage.serves(idle_timeout_s=0.2)
    user, upstream = await uploads(stage)
    await user.answer("POST")
    await until(lambda: state(upstream.visits[0].writer) == CLOSED)


@pytest.mark.parametrize("keep", ["keep-alive", "close"])
async def test_what_a_user_never_reads_does_not_stay(stage: Stage, keep: str) -> None:
    stage.settings |= {"idle_timeout_s": 0.2, "window_bytes": 2 * LARGE}
    stage.serves(idle_timeout_s=0.2)

    async def large(visit: Visit) -> None:
        await visit.answer(b"x" * LARGE)

    await stage.machine(large)
    user = await stage.user()
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport can
    await user.send(head(f"GET / | Connection: {keep}"))
    await until(lambda: state(user.writer) == CLOSED)


SETTINGS = bytes.fromhex("000000 04 00 00000000")
NO_STREAMS = bytes.fromhex("000006 04 00 00000000 0003 00000000")
GOAWAY = bytes.fromhex("000008 07 00 00000000 00000000 00000000")


@pytest.mark.parametrize("said", [NO_STREAMS, SETTINGS + GOAWAY])
async def test_a_machine_of_http2_that_takes_no_requests_is_not_asked_for_ever(stage: Stage, said: bytes) -> None:
    connections = 0
    open_now = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        open_now.add(connections)
        number = connections
        writer.write(said)
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            open_now.discard(number)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    stage.servers.append(server)
    stage.serves(h2_backend=True)
    stage.web.machines.append(FakeMachine("m1", server.sockets[0].getsockname()))
    assert (await stage.ask("GET /")).status == 502
    assert connections == 1
    await until(lambda: not open_now)


async def test_a_user_who_stays_when_a_plain_service_has_ended_takes_no_place(stage: Stage) -> None:
    stage.settings["idle_timeout_s"] = 0.2

    async def bye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.close()

    server = await asyncio.start_server(bye, "127.0.0.1", 0)
    stage.servers.append(server)
    route = stage.router.by_port[5432] = stage.app("db")
    route.port = ServicePort()
    machine = FakeMachine("d1", server.sockets[0].getsockname())
    route.machines.append(machine)
    user = await stage.user("own")
    user.writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport can
    await until(lambda: machine.taken == 1)
    await until(lambda: machine.in_flight == 0)


async def test_an_app_whose_bodies_wait_leaves_room_to_keep_those_of_another(stage: Stage) -> None:
    """All that there is was taken by whoever came first, and what others' machines hand on was refused as too large."""
    most = 8 << 20
    stage.settings |= {"replay_bytes": LARGE, "replay_bytes_of_all": most}
    await stage.machine(echo, awake=False)
    (machine,) = stage.web.machines
    sending = []
    for _ in range(2):
        user = await stage.user()
        sending.append(asyncio.ensure_future(user.ask(f"POST / | Content-Length: {LARGE // 2}", b"x" * (LARGE // 2))))
    await until(lambda: machine.waiting == 2)
    assert isinstance(stage.plane, Embedded)
    engine = stage.plane.context
    await until(lambda: engine.body_budget.bytes > most // 2)
    await at_rest(lambda: engine.body_budget.bytes)
    other = stage.app("other")
    await stage.machine(handing("instance=o2"), "o1", route=other)
    await stage.machine(echo, "o2", route=other)
    body = b"y" * (32 << 10)
    answer = await stage.ask(f"POST / | Host: other.example | Content-Length: {len(body)}", body)
    assert (answer.status, answer.body) == (200, body)
    machine.awake.set()
    assert {answer.status for answer in await asyncio.gather(*sending)} == {200}
    assert engine.body_budget.bytes == 0


async def test_what_is_kept_of_bodies_is_bounded_for_all_requests_together(stage: Stage) -> None:
    users, most, size = 6, 1 << 20, LARGE // 2
    stage.settings |= {"replay_bytes": LARGE, "replay_bytes_of_all": most}
    await stage.machine(echo, awake=False)
    (machine,) = stage.web.machines
    sending = []
    for _ in range(users):
        user = await stage.user()
        sending.append(asyncio.ensure_future(user.ask(f"POST / | Content-Length: {size}", b"x" * size)))
    assert isinstance(stage.plane, Embedded)
    engine = stage.plane.context
    await until(lambda: machine.waiting == users)
    assert most // 2 < await at_rest(lambda: engine.body_budget.bytes) < most // 2 + users * (512 << 10)
    machine.awake.set()
    assert {len(answer.body) for answer in await asyncio.gather(*sending)} == {size}
    assert engine.body_budget.bytes == 0
