"""`hawker worker`: a worker's files on this host, read without the worker."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from hawker.cli import output
from hawker.cli.groups import Ordered
from hawker.errors import NotFound

DATABASE = "worker.db"


@click.group(cls=Ordered)
def worker() -> None:
    """Look after a worker's files on this host."""


@worker.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--rebuild", is_flag=True, help="Write the tables anew from the log. The worker must not be running.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def verify(ctx: click.Context, path: Path, rebuild: bool, as_json: bool) -> None:
    """Replay a worker's log and compare its tables with it. PATH is the worker's directory or its database.

    Ends with status 1 when something does not hold.
    """
    from hawker.store.verify import verify as replay
    from hawker.worker.lock import sole_holder

    if isinstance(ctx.obj, output.Form):
        ctx.obj.json = as_json
    database = path / DATABASE if path.is_dir() else path
    if not database.is_file():
        raise NotFound(f"there is no worker's database at {database}", hint="give the worker's directory")
    with ExitStack() as held, output.working(f"replaying the log of {database}"):
        if rebuild:
            held.enter_context(sole_holder(database.parent))
        report = replay(database, rebuild=rebuild)
    if as_json:
        output.data(report)
    else:
        for fault in report.faults:
            output.say(fault)
        found = f"{len(report.faults)} faults" if report.faults else "no faults"
        then = "; the tables were rebuilt from the log" if report.rebuilt else ""
        output.say(f"{database}: {report.records} records, {report.rows} rows, {found}{then}")
    ctx.exit(0 if report.ok or report.rebuilt else 1)


@worker.command()
@click.argument("path", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--discard", is_flag=True, help="End the programs that the database does not know, and forget the rest.")
def recover(path: Path, discard: bool) -> None:
    """Let a worker start whose database has lost something. PATH is the worker's directory.

    Its next start takes over the programs that run, and says in its log what it could not recover.
    """
    from hawker.worker.lock import sole_holder
    from hawker.worker.lost_database import ask

    with sole_holder(path):
        ask(path, "discard" if discard else "adopt")
    does = "ends the programs that its database does not know" if discard else "takes over the programs that run"
    output.say(f"the worker of {path} {does} when its agent is started the next time")
