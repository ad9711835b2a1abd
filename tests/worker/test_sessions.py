"""Sessions: what a command writes goes to the one who reads, what it reads is bounded, and nobody is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from tests.kit.virtual_time import virtual_host, virtual_time

from hawker.errors import NotFound, TooManyRequests
from hawker.model.inside_api import (
    AWAY_S,
    FIRST_S,
    KIND_END,
    KIND_QUIET,
    KIND_STDERR,
    KIND_STDOUT,
    QUIET_S,
    end_frame,
    frame,
    frames,
)
from hawker.worker.drivers.base import StartFailed
from hawker.worker.machine.inside.sessions import INPUT_BYTES_MAX, INPUT_S, SESSIONS_MAX, Sessions


class Command:
    """A command as a driver gives it: it writes what a test says, and takes input while it is `hungry`."""

    def __init__(self) -> None:
        self.writes: asyncio.Queue[tuple[Literal["stdout", "stderr"], bytes] | None] = asyncio.Queue()
        self.heard: list[bytes] = []
        self.hungry = asyncio.Event()
        self.hungry.set()
        self.input_ended = False
        self.window = (0, 0)
        self.started = False
        self.closed = False
        self.status: tuple[int, int | None] = (0, None)

    async def start(self) -> Command:
        self.started = True
        return self

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        return await self.writes.get()

    async def write(self, data: bytes) -> None:
        await self.hungry.wait()
        self.heard.append(data)

    async def end_input(self) -> None:
        self.input_ended = True

    async def resize(self, columns: int, rows: int) -> None:
        self.window = columns, rows

    async def wait(self) -> tuple[int, int | None]:
        return self.status

    async def close(self) -> None:
        self.closed = True


async def taken(output: AsyncIterator[bytes], count: int) -> list[tuple[int, bytes]]:
    """The next frames but those that say that there is nothing."""
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        found += [each for each in frames(bytearray(await anext(output))) if each[0] != KIND_QUIET]
    return found


def test_frames_are_read_wherever_they_are_cut() -> None:
    sent = frame(KIND_STDOUT, b"out") + frame(KIND_QUIET) + frame(KIND_STDERR, b"") + end_frame(3, None)
    whole = frames(bytearray(sent))
    assert [kind for kind, _ in whole] == [KIND_STDOUT, KIND_QUIET, KIND_STDERR, KIND_END]
    for cut in range(len(sent)):
        held = bytearray(sent[:cut])
        found = frames(held)
        held += sent[cut:]
        assert found + frames(held) == whole


@virtual_time
async def test_what_a_command_writes_comes_in_its_order_and_its_end_last() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    name = await sessions.open("m", command.start)
    for chunk in (("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c")):
        command.writes.put_nowait(chunk)
    command.writes.put_nowait(None)
    command.status = 0, 9
    output = sessions.get("m", name).output()
    got = await taken(output, 4)
    assert got[:3] == [(KIND_STDOUT, b"a"), (KIND_STDERR, b"b"), (KIND_STDOUT, b"c")]
    assert got[3] == (KIND_END, b'{"exit_code":0,"exit_signal":9}')
    assert [each async for each in output] == []
    await asyncio.sleep(0.1)
    assert command.closed
    with pytest.raises(NotFound):
        sessions.get("m", name)


@virtual_time
async def test_a_quiet_command_is_said_to_be_quiet() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    output = sessions.get("m", await sessions.open("m", command.start)).output()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert frames(bytearray(await anext(output))) == [(KIND_QUIET, b"")]
    assert loop.time() - began == pytest.approx(QUIET_S)
    await sessions.close()


@virtual_time
async def test_a_command_waits_for_its_reader() -> None:
    """Nothing is read ahead: what nobody takes stays with the command, and so do later pieces."""
    sessions, command = Sessions(virtual_host()), Command()
    output = sessions.get("m", await sessions.open("m", command.start)).output()
    for n in range(10):
        command.writes.put_nowait(("stdout", b"%d" % n))
    await taken(output, 1)
    await asyncio.sleep(1)
    assert command.writes.qsize() >= 8
    await sessions.close()


@virtual_time
async def test_another_reader_takes_over_where_the_first_one_was() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    session = sessions.get("m", await sessions.open("m", command.start))
    first = session.output()
    command.writes.put_nowait(("stdout", b"1"))
    assert await taken(first, 1) == [(KIND_STDOUT, b"1")]
    waiting = asyncio.ensure_future(anext(first, b"over"))
    await asyncio.sleep(1)
    second = session.output()
    taking = asyncio.ensure_future(taken(second, 1))
    await asyncio.sleep(1)
    command.writes.put_nowait(("stdout", b"2"))
    assert await taking == [(KIND_STDOUT, b"2")]
    assert await waiting == b"over"
    await asyncio.sleep(2 * AWAY_S)
    assert not command.closed, "somebody reads"
    await sessions.close()


@virtual_time
async def test_a_command_that_nobody_begins_to_read_is_killed() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    await sessions.open("m", command.start)
    await asyncio.sleep(FIRST_S - 1)
    assert not command.closed
    await asyncio.sleep(2)
    assert command.closed


@virtual_time
async def test_a_command_whose_reader_has_gone_away_is_killed_unless_it_comes_back() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    session = sessions.get("m", await sessions.open("m", command.start))
    for stays in (True, False):
        output = session.output()
        command.writes.put_nowait(("stdout", b"x"))
        await taken(output, 1)
        await output.aclose()  # type: ignore[attr-defined]  # a generator
        await asyncio.sleep(AWAY_S - 1 if stays else AWAY_S + 1)
        assert command.closed is not stays


@virtual_time
async def test_input_is_given_in_its_order_and_ends() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    session = sessions.get("m", await sessions.open("m", command.start))
    await session.write(b"a", end=False)
    await session.write(b"b", end=True)
    await session.resize(100, 30)
    await asyncio.sleep(0.1)
    assert (command.heard, command.input_ended, command.window) == ([b"a", b"b"], True, (100, 30))
    await sessions.close()


@virtual_time
async def test_a_command_that_does_not_read_is_given_no_more_than_so_much() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    session = sessions.get("m", await sessions.open("m", command.start))
    command.hungry.clear()
    await session.write(bytes(INPUT_BYTES_MAX), end=False)
    loop = asyncio.get_running_loop()
    began = loop.time()
    reading = asyncio.ensure_future(anext(session.output()))  # so that it is not killed for want of a reader
    with pytest.raises(TooManyRequests, match="does not read its input"):
        await session.write(b"more", end=False)
    assert loop.time() - began == pytest.approx(INPUT_S)
    command.hungry.set()
    await session.write(b"more", end=False)
    await asyncio.sleep(0.1)
    assert b"".join(command.heard) == bytes(INPUT_BYTES_MAX) + b"more"
    reading.cancel()
    await sessions.close()


@virtual_time
async def test_a_session_belongs_to_its_machine_and_ends_when_it_is_closed() -> None:
    sessions, command = Sessions(virtual_host()), Command()
    name = await sessions.open("m", command.start)
    with pytest.raises(NotFound):
        sessions.get("another", name)
    with pytest.raises(NotFound):
        await sessions.remove("another", name)
    await sessions.remove("m", name)
    assert command.closed
    with pytest.raises(NotFound):
        await sessions.remove("m", name)


@virtual_time
async def test_sessions_are_counted_and_end_with_their_worker() -> None:
    sessions = Sessions(virtual_host())
    commands = [Command() for _ in range(SESSIONS_MAX)]
    for command in commands:
        await sessions.open("m", command.start)
    late = Command()
    with pytest.raises(TooManyRequests):
        await sessions.open("m", late.start)
    assert not late.started
    await sessions.close()
    assert all(command.closed for command in commands)


@virtual_time
async def test_commands_that_are_being_started_count_and_one_that_cannot_be_counts_no_more() -> None:
    sessions, go = Sessions(virtual_host()), asyncio.Event()

    async def fail() -> Command:
        await go.wait()
        raise StartFailed("no such program")

    starting = [asyncio.ensure_future(sessions.open("m", fail)) for _ in range(SESSIONS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await sessions.open("m", Command().start)
    go.set()
    assert {type(found) for found in await asyncio.gather(*starting, return_exceptions=True)} == {StartFailed}
    assert await sessions.open("m", Command().start)
    await sessions.close()
