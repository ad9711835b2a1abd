"""The conversation with a guest that is not to be trusted: a server in its place says what a hostile one may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from hawker.worker.drivers.base import StartFailed
from hawker.worker.drivers.microvm import frames
from hawker.worker.drivers.microvm.agent import CREDIT, Agent, AgentLost, Command


class Hostile:
    """Greets, lets every command start, and says what it is told to say in the command's name."""

    def __init__(self) -> None:
        self.heard: list[frames.Frame] = []
        self.refuses = b""
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        decoder = frames.Decoder()
        while data := await reader.read(1 << 16):
            for kind, number, payload in decoder.feed(data):
                self.heard.append((kind, number, payload))
                if kind == "x" and self.refuses:
                    writer.write(frames.encode("f", number, self.refuses))
                elif kind in "hxq":
                    writer.write(frames.encode("r", number, b"running"))
        writer.close()

    async def say(self, agent: Agent, *said: frames.Frame) -> None:
        """Returns once they were heard."""
        assert self._writer
        for frame in said:
            self._writer.write(frames.encode(*frame))
        await agent.ask("q")


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[tuple[Hostile, Agent]]:
    hostile = Hostile()
    server = await asyncio.start_unix_server(hostile.serve, tmp_path / "agent")
    agent = await Agent.connect(tmp_path / "agent")
    yield hostile, agent
    await agent.close()
    server.close()
    await server.wait_closed()


async def command_of(agent: Agent) -> Command:
    return await agent.run(["cat"], env={})


async def test_output_that_was_not_asked_for_is_not_kept(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    command = await command_of(agent)
    flood = [("o", command.number, bytes(CREDIT // 4))] * 8
    await hostile.say(agent, *flood)
    kept = 0
    while found := await command.read():
        kept += len(found[1])
    assert kept <= CREDIT
    with pytest.raises(AgentLost):
        await command.wait()
    await agent.ask("q")
    assert ("k", command.number, b"") in hostile.heard


async def test_output_is_read_as_long_as_it_was_asked_for(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    command = await command_of(agent)
    for _ in range(8):
        await hostile.say(agent, ("o", command.number, bytes(CREDIT)))
        assert await command.read() == ("stdout", bytes(CREDIT))
    await hostile.say(agent, ("w", command.number, frames.fields(["code", 3])))
    assert await command.read() is None
    assert await command.wait() == (3, None)


async def test_input_said_to_be_taken_that_was_never_given_lets_no_more_be_given(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    command = await command_of(agent)
    await hostile.say(
        agent, ("a", command.number, frames.fields([1 << 60])), ("a", command.number, frames.fields([-5]))
    )
    await command.write(bytes(CREDIT))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await command.write(b"x")


@pytest.mark.parametrize("values", [[], ["code"], ["code", "x"], ["code", "1" * 5000]])
async def test_an_end_that_is_none_ends_the_command_as_lost(
    guest: tuple[Hostile, Agent], values: Sequence[str]
) -> None:
    hostile, agent = guest
    command = await command_of(agent)
    await hostile.say(agent, ("w", command.number, frames.fields(values)))
    with pytest.raises(AgentLost):
        await command.wait()


async def test_an_exit_code_is_one_that_programs_have(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    command = await command_of(agent)
    await hostile.say(agent, ("w", command.number, frames.fields(["code", 1 << 70])))
    assert await command.wait() == (0, None)


async def test_a_refusal_is_told_in_few_words(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    hostile.refuses = b"no" * 100_000
    with pytest.raises(StartFailed) as refused:
        await command_of(agent)
    assert len(str(refused.value)) == 1000


async def test_a_command_whose_time_is_over_ends_though_its_guest_does_not_end_it(guest: tuple[Hostile, Agent]) -> None:
    hostile, agent = guest
    async with asyncio.timeout(50):
        result = await agent.execute(["sleep", "1"], stdin=b"", env={}, timeout_s=0.05, killed_s=0.05)
    assert (result.timed_out, result.code, result.signal) == (True, 137, 9)
    await agent.ask("q")
    assert "k" in [kind for kind, _, _ in hostile.heard]
