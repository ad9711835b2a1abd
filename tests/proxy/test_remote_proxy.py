"""What an edge knows of a worker's proxy that has failed it: a real socket stands for that proxy."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from random import Random

import pytest
from tests.kit.doors import free_port
from tests.kit.waiting import until

from hawker.core.routing import Candidate, Pool
from hawker.proxy.apps.endpoints import Endpoint
from hawker.proxy.apps.wait_queue import WaitQueue
from hawker.proxy.base import Address, NoUpstreams
from hawker.proxy.machines.listen_probe import ListenProbe
from hawker.proxy.machines.remote_proxy import RemoteProxy
from hawker.proxy.settings import RouterSettings
from hawker.sockets import Sockets


class Worker(NoUpstreams):
    """A machine of its, in a pool, and the address of its proxy. `silent`: it takes connections and says nothing."""

    def __init__(self) -> None:
        self.address = "127.0.0.1", free_port()
        self.silent = False
        self.pool = Pool("web", "ord", random=Random(1).random)
        self.given_up: list[str] = []
        settings = RouterSettings(trouble_s=0.05, hung_s=0.25)
        self.remote_proxy = RemoteProxy("ord-1", settings, ListenProbe(Sockets()), upstreams=self)
        entry = self.pool.put(Candidate(machine="m1", region="ord", state="started"))
        self.endpoint = Endpoint(self.pool, entry, WaitQueue(), self.remote_proxy, (self.address,))

    def give_up(self, address: Address, problem: str, *, waited_s: float = 0.0, every: bool = False) -> None:
        self.given_up.append(problem)

    async def listen(self) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                await reader.read(1)
                if not self.silent:
                    writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
                await reader.read(-1)

        return await asyncio.start_server(serve, *self.address)

    def chosen(self) -> bool:
        entry = self.pool.take(asyncio.get_running_loop().time())
        if entry is not None:
            self.pool.leave(entry)
        return entry is not None


async def test_one_that_refuses_is_chosen_again_as_soon_as_it_listens() -> None:
    it = Worker()
    it.remote_proxy.failed(it.endpoint, "refused")
    await until(lambda: it.remote_proxy.away)
    assert not it.chosen()
    async with await it.listen():
        await until(it.chosen)
    await it.remote_proxy.close()


async def test_one_that_answers_itself_is_left_alone_only_as_its_machine_is() -> None:
    it = Worker()
    async with await it.listen():
        it.remote_proxy.failed(it.endpoint, "timeout")
        assert not it.chosen()
        await until(it.chosen)
    await it.remote_proxy.close()


async def test_one_that_takes_connections_and_says_nothing_is_not_chosen_before_it_does() -> None:
    it = Worker()
    it.silent = True
    async with await it.listen():
        it.remote_proxy.failed(it.endpoint, "timeout")
        await until(lambda: it.remote_proxy.away)
        assert not it.chosen()
        it.silent = False
        await until(it.chosen)
    await it.remote_proxy.close()


@pytest.mark.parametrize("turns", range(2, 8))
async def test_one_that_answers_is_not_taken_for_hung_by_a_proxy_that_stood_still_itself(turns: int) -> None:
    it, stood_still = Worker(), False
    loop = asyncio.get_running_loop()

    def stand_still(turns: int) -> None:
        nonlocal stood_still
        if turns:
            loop.call_soon(stand_still, turns - 1)
        else:
            time.sleep(0.4)  # longer than `hung_s`
            stood_still = True

    async with await it.listen():
        loop.call_soon(stand_still, turns)
        it.remote_proxy.look(it.address)
        while (listen_probe := it.remote_proxy._look) is not None and not listen_probe.done():
            assert not it.remote_proxy.away
            await asyncio.sleep(0)
        assert stood_still
        assert it.given_up == []
    await it.remote_proxy.close()
