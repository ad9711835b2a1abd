"""The `hawker` command."""

from __future__ import annotations

import click

from hawker.cli.agents import agent_command
from hawker.cli.dev import dev_command


@click.group()
def main() -> None:
    """Hawker."""


main.add_command(agent_command)
main.add_command(dev_command)
