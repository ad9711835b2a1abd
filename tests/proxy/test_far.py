"""What an edge knows of a worker's proxy that has failed it: a real socket stands for that proxy."""

from __future__ import annotations

import asyncio
from contextlib import closing
from random import Random

from tests.kit.doors import free_port
from tests.kit.waiting import until

from hawker.core.routing import Candidate, Pool
from hawker.proxy.far import Far
from hawker.proxy.places import Place
from hawker.proxy.rooms import Room
from hawker.proxy.settings import RouterSettings
from hawker.proxy.waking import Looking


class Worker:
    """A machine of its, in a pool, and the address of its proxy. `silent`: it takes connections and says nothing."""

    def __init__(self) -> None:
        self.address = "127.0.0.1", free_port()
        self.silent = False
        self.pool = Pool("web", "ord", random=Random(1).random)
        self.far = Far("ord-1", RouterSettings(trouble_s=0.05, hung_s=0.25), Looking())
        seat = self.pool.put(Candidate(machine="m1", region="ord", state="started"))
        self.place = Place(self.pool, seat, Room(), self.far, (self.address,))

    async def listen(self) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                await reader.read(1)
                if not self.silent:
                    writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
                await reader.read(-1)

        return await asyncio.start_server(serve, *self.address)

    def chosen(self) -> bool:
        seat = self.pool.take(asyncio.get_running_loop().time())
        if seat is not None:
            self.pool.leave(seat)
        return seat is not None


async def test_one_that_refuses_is_chosen_again_as_soon_as_it_listens() -> None:
    it = Worker()
    it.far.failed(it.place, "refused")
    await until(lambda: it.far.away)
    assert not it.chosen()
    async with await it.listen():
        await until(it.chosen)
    await it.far.close()


async def test_one_that_answers_itself_is_left_alone_only_as_its_machine_is() -> None:
    it = Worker()
    async with await it.listen():
        it.far.failed(it.place, "timeout")
        assert not it.chosen()
        await until(it.chosen)
    await it.far.close()


async def test_one_that_takes_connections_and_says_nothing_is_not_chosen_before_it_does() -> None:
    it = Worker()
    it.silent = True
    async with await it.listen():
        it.far.failed(it.place, "timeout")
        await until(lambda: it.far.away)
        assert not it.chosen()
        it.silent = False
        await until(it.chosen)
    await it.far.close()
