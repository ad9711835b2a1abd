"""HAProxy goes on while the process that leads it is away."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.authority import Authority
from tests.kit.processes import alive
from tests.kit.raw_http import Broken, Upstream, User, head, hello
from tests.kit.waiting import eventually

from hawker.proxy.haproxy.runtime import workers

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="the program haproxy is not installed")


class Leader:
    """The process that leads HAProxy. `kill -9` is its usual end here."""

    def __init__(self, directory: Path, machine: int, *certificates: str) -> None:
        self._argv = [sys.executable, "-m", "tests.kit.plane_process", str(directory), str(machine), *certificates]
        self.process: asyncio.subprocess.Process
        self.port = 0

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        self.port = int(await asyncio.wait_for(self.process.stdout.readline(), 40))

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def carried(self) -> list[bytes]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b".\n")
        return (await asyncio.wait_for(self.process.stdout.readline(), 40)).split()[:-1]

    async def end(self) -> None:
        """In order: HAProxy ends with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), 40) == 0


@asynccontextmanager
async def led(*certificates: str) -> AsyncIterator[tuple[Leader, Upstream, Path]]:
    directory = Path(tempfile.mkdtemp(prefix="haproxy-"))
    machine = Upstream(hello)
    await machine.open()
    leader = Leader(directory / "h", machine.address[1], *certificates)
    await leader.start()
    try:
        yield leader, machine, directory / "h"
    finally:
        await leader.end()
        await machine.close()
        shutil.rmtree(directory)


async def test_no_request_fails_while_its_leader_is_killed_and_comes_back() -> None:
    async with led() as (leader, machine, directory):
        user = await User.at(("127.0.0.1", leader.port))
        assert (await user.ask("GET /")).body == b"hello"

        async def carried() -> bool:
            return await leader.carried() == [b"web"]

        await eventually(carried, "HAProxy carries the app")
        before = await workers(f"{directory}/master.sock")
        over = False
        statuses: dict[int, int] = {}

        async def load(text: str) -> None:
            each = await User.at(("127.0.0.1", leader.port))
            while not over:
                answer = await each.ask(text)
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
            await each.close()

        # Of these the second kind needs a decision, and is held while there is nobody to make it.
        loading = [asyncio.create_task(load(text)) for text in ("GET /", "GET /", "GET / | X-Forwarded-For: 192.0.2.1")]
        for _ in range(2):
            await leader.kill()
            seen = len(machine.visits)

            async def served(seen: int = seen) -> bool:
                return len(machine.visits) > seen + 100

            await eventually(served, "requests pass while the leader is away")
            await leader.start()
            await eventually(carried, "it knows what HAProxy carries")
        over = True
        await asyncio.gather(*loading)
        assert set(statuses) == {200}
        assert await workers(f"{directory}/master.sock") == before, "nothing was started anew"
        assert (await user.ask("GET /")).body == b"hello", "a connection from before"
        await user.close()


async def test_users_of_tls_are_served_while_its_leader_is_killed_and_comes_back(tmp_path: Path) -> None:
    """By HAProxy, with new connections, too; those that the leader had itself end with it."""
    authority = Authority()
    authority.write(tmp_path, "web.example")
    async with led(str(tmp_path)) as (leader, _, directory):

        async def connected() -> User:
            return await User.at(("127.0.0.1", leader.port), "", authority.client("http/1.1"), "web.example")

        async def carried() -> bool:
            user = await connected()
            await user.ask("GET /")
            await user.close()
            return await leader.carried() == [b"web"]

        await eventually(carried, "HAProxy carries the app")
        before = await workers(f"{directory}/master.sock")
        user = await connected()
        assert (await user.ask("GET /")).body == b"hello"
        await leader.kill()
        assert (await user.ask("GET /")).body == b"hello"
        other = await connected()
        assert (await other.ask("GET /")).body == b"hello"
        needs_a_decision = asyncio.create_task(other.ask("GET / | X-Forwarded-For: 192.0.2.1"))
        await leader.start()
        assert (await needs_a_decision).status == 200
        await eventually(carried, "it knows what HAProxy carries")
        await other.close()
        assert await workers(f"{directory}/master.sock") == before, "nothing was started anew"
        await user.close()


async def test_it_is_led_by_what_is_found_and_not_by_what_was() -> None:
    """A machine that is gone when the leader comes back gets no more requests."""
    async with led() as (leader, machine, directory):
        user = await User.at(("127.0.0.1", leader.port))
        await user.ask("GET /")

        async def carried() -> bool:
            return await leader.carried() == [b"web"]

        await eventually(carried, "HAProxy carries the app")
        await leader.kill()
        other = Upstream(hello)
        await other.open()
        again = Leader(directory, other.address[1])
        await again.start()
        leader.process = again.process

        async def moved() -> bool:
            await user.ask("GET /")
            return len(other.visits) > 0

        await eventually(moved, "requests go to where the machine is now")
        seen = len(machine.visits)
        assert (await user.ask("GET /")).status == 200
        assert len(machine.visits) == seen
        await user.close()
        await other.close()


async def test_a_request_that_is_under_way_in_the_leader_when_it_dies_is_made_again_if_it_may_be() -> None:
    async with led() as (leader, machine, _):
        go = asyncio.Event()

        async def waiting(visit: object) -> None:
            await go.wait()
            await hello(visit)  # type: ignore[arg-type]  # a visit

        machine.behaviour = waiting
        users = [await User.at(("127.0.0.1", leader.port)) for _ in range(2)]
        await users[0].send(head("GET / | X-Forwarded-For: 192.0.2.1"))
        await users[1].send(head("POST / | Content-Length: 0"))

        async def there() -> bool:
            return len(machine.visits) == 2

        await eventually(there, "both are at the machine")
        await leader.kill()
        go.set()
        await leader.start()
        assert (await users[0].answer()).body == b"hello"
        try:
            assert (await users[1].answer()).status == 502
        except Broken:
            pytest.fail("a request is answered, whatever happens")
        for user in users:
            await user.close()


async def test_one_that_was_begun_by_another_hawker_is_replaced() -> None:
    async with led() as (leader, _, directory):
        before = await workers(f"{directory}/master.sock")
        await leader.kill()
        (directory / "state.json").write_text('{"of": "another version"}')
        await leader.start()
        assert (await workers(f"{directory}/master.sock")).master != before.master
        for _ in range(20):
            user = await User.at(("127.0.0.1", leader.port))
            assert (await user.ask("GET /")).body == b"hello"
            await user.close()

        async def gone() -> bool:
            return not alive(before.master)

        await eventually(gone, "the one from before has ended")
