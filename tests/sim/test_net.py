"""The simulated network: streams as TCP has them, datagrams as UDP has them, and links that break."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from hawker.sim.platform.loop import SimLoop, run
from hawker.sim.platform.net import Net
from hawker.sim.platform.processes import Process, Station
from hawker.sim.platform.record import Record

PORT = 80


class Place:
    """Two hosts, "a" in ord and "b" in syd, with a process each."""

    def __init__(self, loop: SimLoop, seed: str = "1") -> None:
        self.loop = loop
        self.net = Net(loop, Record(loop.time), seed, ["ord", "fra", "syd"])
        self.a, self.b = self.net.station("a", "ord"), self.net.station("b", "syd")
        self.processes = {"a": Process("a", self.a), "b": Process("b", self.b)}

    def on(self, name: str, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.run_in(self.processes[name], coro)

    async def serve(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.AbstractServer:
        async def listen() -> asyncio.AbstractServer:
            server: asyncio.AbstractServer = await self.loop.create_server(factory, "0.0.0.0", PORT)
            return server

        server: asyncio.AbstractServer = await self.on("b", listen())
        return server

    async def connect(self) -> Reader:
        async def connect() -> Reader:
            reader: Reader = (await self.loop.create_connection(Reader, self.b.address, PORT))[1]
            return reader

        reader: Reader = await self.on("a", connect())
        return reader

    def die(self, name: str, station: Station, *, silently: bool) -> None:
        self.loop.kill(self.processes[name])
        self.net.close_all(self.processes[name], silently=silently)

    def cut(self) -> None:
        for link in (self.net.link(self.a, self.b), self.net.link(self.b, self.a)):
            link.cuts += 1

    def heal(self) -> None:
        for link in (self.net.link(self.a, self.b), self.net.link(self.b, self.a)):
            link.heal()


class Reader(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.data = b""
        self.eof = False
        self.lost: list[Exception | None] = []
        self.paused = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool:
        self.eof = True
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.paused -= 1


class Echo(Reader):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.write(data)


def in_a_place(test: Callable[[Place], Awaitable[None]]) -> None:
    async def main(loop: SimLoop) -> None:
        await test(Place(loop))
        assert loop.unhandled == []

    run(main)


def test_bytes_come_back_after_two_one_way_delays() -> None:
    async def test(place: Place) -> None:
        await place.serve(Echo)
        reader = await place.connect()
        began = place.loop.time()
        reader.transport.write(b"hello ")
        reader.transport.write(b"world")
        while reader.data != b"hello world":  # noqa: ASYNC110  # a look at every step of virtual time
            await asyncio.sleep(0.001)
        assert 0.08 <= place.loop.time() - began <= 0.2
        assert reader.transport.get_extra_info("peername") == (place.b.address, PORT)
        assert reader.transport.get_extra_info("sockname")[0] == place.a.address

    in_a_place(test)


def test_a_lossy_link_delays_a_stream_and_keeps_its_order() -> None:
    async def test(place: Place) -> None:
        for link in place.net.links():
            link.loss = 0.4
        await place.serve(Echo)
        reader = await place.connect()
        sent = b""
        for number in range(50):
            reader.transport.write(b"%d," % number)
            sent += b"%d," % number
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)
        assert reader.data == sent

    in_a_place(test)


def test_what_is_written_while_a_link_is_cut_arrives_when_it_heals() -> None:
    async def test(place: Place) -> None:
        await place.serve(Echo)
        reader = await place.connect()
        place.cut()
        reader.transport.write(b"late")
        await asyncio.sleep(10)
        assert reader.data == b""
        place.heal()
        await asyncio.sleep(15)
        assert reader.data == b"late"
        assert reader.lost == []

    in_a_place(test)


def test_a_sender_gives_up_after_a_minute_without_a_way() -> None:
    async def test(place: Place) -> None:
        await place.serve(Echo)
        reader = await place.connect()
        place.cut()
        reader.transport.write(b"never")
        await asyncio.sleep(90)
        assert isinstance(reader.lost[0], TimeoutError)

    in_a_place(test)


def test_a_link_cut_one_way_carries_the_other_way() -> None:
    async def test(place: Place) -> None:
        servers: list[Reader] = []
        await place.serve(lambda: servers.append(Echo()) or servers[-1])  # type: ignore[func-returns-value]
        reader = await place.connect()
        reader.transport.write(b"x")
        await asyncio.sleep(1)
        place.net.link(place.b, place.a).cuts += 1
        reader.transport.write(b"y")
        await asyncio.sleep(1)
        assert servers[0].data == b"xy"
        assert reader.data == b"x"

    in_a_place(test)


def test_a_closed_port_refuses_and_a_host_without_power_answers_nothing() -> None:
    async def test(place: Place) -> None:
        with pytest.raises(ConnectionRefusedError):
            await place.connect()
        await place.serve(Echo)
        place.b.up = False
        began = place.loop.time()
        with pytest.raises(TimeoutError):
            await place.connect()
        assert place.loop.time() - began >= 10

    in_a_place(test)


def test_a_killed_program_closes_its_connections_and_a_lost_host_does_not() -> None:
    async def test(place: Place) -> None:
        await place.serve(Echo)
        reader = await place.connect()
        reader.transport.write(b"x")
        await asyncio.sleep(1)
        place.die("b", place.b, silently=False)
        await asyncio.sleep(1)
        assert reader.eof
        reader.transport.write(b"anybody?")
        await asyncio.sleep(1)
        assert isinstance(reader.lost[0], ConnectionResetError)
        place.processes["b"] = Process("b", place.b)
        await place.serve(Echo)
        reader = await place.connect()
        place.die("b", place.b, silently=True)
        place.b.up = False
        reader.transport.write(b"anybody?")
        await asyncio.sleep(20)
        assert (reader.eof, reader.lost) == (False, [])
        place.b.up = True
        await asyncio.sleep(20)
        assert isinstance(reader.lost[0], ConnectionResetError)

    in_a_place(test)


def test_a_half_closed_connection_still_carries_the_answer() -> None:
    class AnswersAtTheEnd(Reader):
        def eof_received(self) -> bool:
            self.transport.write(b"you said " + self.data)
            self.transport.close()
            return True

    async def test(place: Place) -> None:
        await place.serve(AnswersAtTheEnd)
        reader = await place.connect()
        reader.transport.write(b"something")
        reader.transport.write_eof()
        await asyncio.sleep(1)
        assert reader.data == b"you said something"
        assert reader.eof

    in_a_place(test)


def test_a_writer_is_told_to_wait_while_nobody_reads() -> None:
    async def test(place: Place) -> None:
        servers: list[Reader] = []
        await place.serve(lambda: servers.append(Reader()) or servers[-1])  # type: ignore[func-returns-value]
        reader = await place.connect()
        await asyncio.sleep(1)
        servers[0].transport.pause_reading()
        for _ in range(10):
            reader.transport.write(bytes(20_000))
        await asyncio.sleep(5)
        assert reader.paused == 1
        assert servers[0].data == b""
        servers[0].transport.resume_reading()
        await asyncio.sleep(5)
        assert reader.paused == 0
        assert len(servers[0].data) == 200_000

    in_a_place(test)


def test_a_paused_program_gets_its_connections_and_data_when_it_goes_on() -> None:
    async def test(place: Place) -> None:
        await place.serve(Echo)
        place.loop.pause(place.processes["b"])
        reader = await place.connect()  # its system takes the connection
        reader.transport.write(b"x")
        await asyncio.sleep(5)
        assert reader.data == b""
        place.loop.resume(place.processes["b"])
        await asyncio.sleep(1)
        assert reader.data == b"x"

    in_a_place(test)


class Mailbox(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.got: list[bytes] = []

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.got.append(data)


@pytest.mark.parametrize(
    ("fault", "share"), [("loss", 0.3), ("duplicates", 0.3), ("reordered", 0.5), ("", 0.0)], ids=lambda v: str(v)
)
def test_datagrams_are_lost_doubled_and_reordered_as_the_link_says(fault: str, share: float) -> None:
    async def test(place: Place) -> None:
        async def bind() -> Mailbox:
            found = await place.loop.create_datagram_endpoint(Mailbox, local_addr=("0.0.0.0", PORT))
            mailbox: Mailbox = found[1]
            return mailbox

        async def send() -> None:
            transport, _ = await place.loop.create_datagram_endpoint(Mailbox, local_addr=("0.0.0.0", PORT))
            for number in range(1000):
                transport.sendto(b"%d" % number, (place.b.address, PORT))
                await asyncio.sleep(0.03)

        if fault:
            setattr(place.net.link(place.a, place.b), fault, share)
        mailbox: Mailbox = await place.on("b", bind())
        await place.on("a", send())
        await asyncio.sleep(1)
        numbers = [int(data) for data in mailbox.got]
        assert len(set(numbers)) == (1000 if fault != "loss" else len(numbers))
        lost, doubled = 1000 - len(set(numbers)), len(numbers) - len(set(numbers))
        overtaken = sum(later < sooner for sooner, later in pairwise(numbers))
        expected = {"loss": (lost, 300), "duplicates": (doubled, 300), "reordered": (overtaken, 150)}
        for name, (count, about) in expected.items():
            if name == fault:
                assert 0.6 * about < count < 1.6 * about
            elif not (name == "reordered" and fault == "duplicates"):
                assert count == 0

    in_a_place(test)
