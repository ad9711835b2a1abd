"""`hawker doctor`: what this host can do for an agent, and what to install for the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from hawker.cli import output

DIRECTORY = Path("/var/lib/hawker")


@click.command("doctor", help="Check whether this host can run machines, and say what to install.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="An agent's TOML file: its directory and addresses are tried too. The agent must not be running.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def doctor_command(ctx: click.Context, config: Path | None, as_json: bool) -> None:
    """Ends with status 1 when an agent could not work here at all."""
    from hawker.agent.settings import read_settings
    from hawker.doctor.drivers import drivers, network
    from hawker.doctor.facts import gather
    from hawker.doctor.findings import can_work, findings
    from hawker.telemetry import without_logs

    if isinstance(ctx.obj, output.Form):
        ctx.obj.json = as_json
    settings = read_settings(config) if config else None
    with output.working("looking at this host"), without_logs():  # what drivers would log is what is found here
        facts = gather(settings.directory if settings else DIRECTORY, settings.listens if settings else [])
        found = [*findings(facts), network(), *asyncio.run(drivers(settings))]
    if as_json:
        output.data([*found])
    else:
        output.table(("what", "state", "found"), [(f.what, f.state, f.found) for f in found])
        for finding in found:
            if finding.remedy:
                output.say(f"{finding.what}: {finding.remedy}")
    ctx.exit(0 if can_work(found) else 1)
