"""`hawker agent`: one process on a host with the roles its configuration enables (`hawker.agent.settings`)."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hawker.errors import HawkerError

if TYPE_CHECKING:
    from hawker.agent.settings import AgentSettings


@click.command("agent", help="Run an agent: worker, broker, proxy, or several of them, as its configuration says.")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="The agent's TOML file.")
@click.option(
    "--join",
    multiple=True,
    metavar="HOST:PORT",
    help="An agent that is a member already; repeatable, added to the configuration's.",
)
def agent_command(config: Path, join: tuple[str, ...]) -> None:
    from hawker.agent.settings import host_port, read_settings

    for address in join:
        host_port("join", address)
    settings = read_settings(config)
    settings.catalog.join += join
    asyncio.run(run_agent(settings))


async def run_agent(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps a role from starting."""
    from hawker.agent.agent import Agent
    from hawker.host import live
    from hawker.telemetry import set_up_logs

    set_up_logs(level=settings.log_level)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a proxy has two descriptors for each request; 1,024 is usual
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    agent = Agent(settings, live())
    await agent.open()
    try:
        waits = [loop.create_task(event.wait()) for event in (stopping, agent.failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    finally:
        await agent.close()
    if agent.failed.is_set():
        raise HawkerError("the database cannot be written", hint="look at the disk, then start the agent again")
