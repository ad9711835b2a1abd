"""`hawker regions`, `hawker workers`: the market as a whole, and what its workers are at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.groups import Ordered
from hawker.cli.params import region_option, worker_argument, worker_option
from hawker.cli.session import Object, Session, confirmed, market_command
from hawker.errors import NotFound

if TYPE_CHECKING:
    from hawker.model.api import Run

RUN_STATUSES = ("active", "parked", "done", "failed", "cancelled")
_COUNTED = (("cpus_shared", "cpus"), ("cpus_dedicated", "dedicated"), ("machines", "machines"))
_MEASURED = (("memory_mib", "memory"), ("disk_mib", "disk"))


@click.command()
@market_command
def regions(session: Session) -> None:
    """List regions and the room they have."""
    found = session.send(calls.ListRegions())
    if session.json:
        output.data(found)
    else:
        rows = [(r.code, r.name, r.geo_region or None, r.capacity) for r in found.Regions]
        output.table(("region", "place", "continent", "room for shared-cpu-1x"), rows)
    output.silent(session.silent(), "their room is not counted")


@click.group(cls=Ordered, invoke_without_command=True)
@region_option("Only workers of this region.")
@click.pass_context
@market_command
def workers(session: Session, ctx: click.Context, region: str | None) -> None:
    """List workers and what is free, cordon one, look after parked runs."""
    if ctx.invoked_subcommand is None:
        _list(session, region)
    elif region and ctx.invoked_subcommand != "list":
        raise click.UsageError(f"--region has no meaning for {ctx.invoked_subcommand}", ctx)


@workers.command("list")
@region_option("Only workers of this region.")
@market_command
def list_(session: Session, region: str | None) -> None:
    """List workers and what is free of what they have."""
    outer = click.get_current_context().parent
    _list(session, region or (outer.params["region"] if outer else None))


def _list(session: Session, region: str | None) -> None:
    found = [w for w in session.send(calls.ListWorkers()) if region in (None, w["region"])]
    if session.json:
        output.data(found)
        return
    if not found:
        output.note("no such workers")
        return
    columns = ("worker", "region", "state", *(column for _, column in (*_COUNTED, *_MEASURED)))
    output.table(columns, [_row(worker) for worker in found])
    output.note("cpus, machines, memory, disk: free/in all")


def _row(worker: Object) -> tuple[object, ...]:
    if not worker["reachable"]:
        return (worker["name"], worker["region"], "no answer", *(None for _ in (*_COUNTED, *_MEASURED)))
    capacity, held = worker["capacity"], worker["held"]
    counts = (f"{capacity[name] - held[name]}/{capacity[name]}" for name, _ in _COUNTED)
    sizes = (f"{(capacity[name] - held[name]) / 1024:.4g}/{capacity[name] / 1024:.4g} GiB" for name, _ in _MEASURED)
    return (worker["name"], worker["region"], _state(worker), *counts, *sizes)


def _state(worker: Object) -> str:
    states = ("cordoned", "disk_full", "disk_failed")
    told = [state.replace("_", " ") for state in states if worker.get(state)]
    if worker["parked_runs"]:
        told.append(f"{worker['parked_runs']} parked")
    if not worker["driver"]["healthy"]:
        told.append(f"{worker['driver']['driver']} driver: {worker['driver']['problem']}")
    return ", ".join(told) or "ok"


@workers.command()
@worker_argument
@market_command
def cordon(session: Session, name: str) -> None:
    """Take a worker out of the market: it makes no offers. What runs there goes on."""
    session.send(calls.CordonWorker(name))
    _show(session, name, "makes no more offers; what runs there goes on")


@workers.command()
@worker_argument
@market_command
def uncordon(session: Session, name: str) -> None:
    """Put a worker back into the market."""
    session.send(calls.UncordonWorker(name))
    _show(session, name, "makes offers again")


@workers.command()
@worker_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@market_command
def forget(session: Session, name: str, yes: bool) -> None:
    """Give up a worker that is gone for good: it is not listed or asked any more, nor are its machines.

    One that answers is refused. One that comes back is listed again by itself.
    """
    confirmed(f"Give up worker {name} with all its machines, which may still run there?", yes=yes)
    with output.working(f"seeing that {name} does not answer"):
        answer = session.send(calls.ForgetWorker(name))
    session.tell(answer, f"worker {name} is forgotten; should it come back, it is listed again")


def _show(session: Session, name: str, sentence: str) -> None:
    if session.json:
        output.data(next(w for w in session.send(calls.ListWorkers()) if w["name"] == name))
    else:
        output.say(f"worker {name} {sentence}")


@workers.command()
@worker_option("Only this worker's.")
@click.option("--machine", metavar="MACHINE", help="Only runs of this machine, by its id.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(RUN_STATUSES), help="Repeatable.")
@market_command
def runs(session: Session, worker: str | None, machine: str | None, statuses: tuple[str, ...]) -> None:
    """List what is under way on machines, and what is parked and waits for a person.

    With --status also runs that have ended.
    """
    listed = session.send(calls.ListRuns(status=statuses, machine=machine))
    found = [run for run in listed if worker in (None, run.worker)]
    silent = session.silent()
    if worker and not found and all(w["name"] != worker for w in session.send(calls.ListWorkers())):
        raise NotFound(f"no worker is called {worker}", hint="hawker workers lists them")
    if session.json:
        output.data(found)
    elif found:
        columns = ("run", "worker", "flow", "machine", "status", "step", "error")
        output.table(columns, [[r.id, *(getattr(r, name) or None for name in columns[1:])] for r in found])
    else:
        output.note("no such runs" if statuses or machine or worker else "nothing is under way, and nothing is parked")
    output.silent(silent, "their runs are not listed")


@workers.command()
@click.argument("run")
@market_command
def retry(session: Session, run: str) -> None:
    """Try the step again at which a run is parked. See: hawker workers runs."""
    with output.working(f"run {run}: trying its step again"):
        after = session.send(calls.RetryRun(run))
    _show_run(session, after)


@workers.command()
@click.argument("run")
@market_command
def cancel(session: Session, run: str) -> None:
    """Give a run up. Its final step puts right what is half done."""
    with output.working(f"run {run}: ending it"):
        after = session.send(calls.CancelRun(run))
    _show_run(session, after)


def _show_run(session: Session, run: Run) -> None:
    at = f" at step {run.step}" if run.step else ""
    why = f": {run.error}" if run.error else ""
    session.tell(run, f"run {run.id} ({run.flow} of machine {run.machine}) is {run.status}{at}{why}")
