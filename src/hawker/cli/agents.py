"""`hawker agent`: one process on a host with the roles its configuration enables (`hawker.agent.settings`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click


@click.command("agent", help="Run an agent: worker, broker, proxy, or several of them, as its configuration says.")
@click.option("--config", type=click.Path(path_type=Path), required=True, help="The agent's TOML file.")
@click.option(
    "--join",
    multiple=True,
    metavar="HOST:PORT",
    help="An agent that is a member already; repeatable, added to the configuration's.",
)
@click.option("--check", is_flag=True, help="Only read the configuration, and say what is wrong with it.")
def agent_command(config: Path, join: tuple[str, ...], check: bool) -> None:
    from hawker.agent import restart, running
    from hawker.agent.settings import read_settings
    from hawker.model.values import host_port

    for address in join:
        host_port("join", address)
    settings = read_settings(config)
    settings.catalog.join += join
    if check:
        held = restart.held(os.environ)
        running.check(settings, held)
        if held is None:
            click.echo(f"{config} is fine; hawker doctor --config {config} tries its directory and its addresses, too")
    else:
        asyncio.run(running.run_agent(settings))
