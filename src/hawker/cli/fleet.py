"""`hawker regions`, `hawker workers`, `hawker sql`: the market as a whole."""

from __future__ import annotations

import click

from hawker.cli import output
from hawker.cli.groups import Ordered
from hawker.cli.params import region_option, worker_argument, worker_option
from hawker.cli.session import Object, Session, market_command

_COUNTED = (("cpus_shared", "cpus"), ("cpus_dedicated", "dedicated"), ("machines", "machines"))
_MEASURED = (("memory_mib", "memory"), ("disk_mib", "disk"))


@click.command()
@market_command
def regions(session: Session) -> None:
    """List regions and the room they have."""
    found = session.client.regions()
    if session.json:
        output.data(found)
    else:
        rows = [(r["code"], r["name"], r["geo_region"] or None, r["capacity"]) for r in found["Regions"]]
        output.table(("region", "place", "continent", "room for shared-cpu-1x"), rows)
    if silent := session.silent():
        output.note(f"these workers did not answer, their room is not counted: {', '.join(silent)}")


@click.group(cls=Ordered, invoke_without_command=True)
@region_option("Only this region's.")
@click.pass_context
@market_command
def workers(session: Session, ctx: click.Context, region: str | None) -> None:
    """List workers and what is free, or take one out of the market."""
    if ctx.invoked_subcommand is None:
        _list(session, region)


@workers.command("list")
@region_option("Only this region's.")
@market_command
def list_(session: Session, region: str | None) -> None:
    """List workers and what is free of what they have."""
    _list(session, region)


def _list(session: Session, region: str | None) -> None:
    found = [w for w in session.client.workers() if region in (None, w["region"])]
    if session.json:
        output.data(found)
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
    told = [name for name, true in (("cordoned", worker["cordoned"]), ("disk full", worker["disk_full"])) if true]
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
    session.client.cordon_worker(name)
    _show(session, name, "makes no more offers; what runs there goes on")


@workers.command()
@worker_argument
@market_command
def uncordon(session: Session, name: str) -> None:
    """Put a worker back into the market."""
    session.client.uncordon_worker(name)
    _show(session, name, "makes offers again")


def _show(session: Session, name: str, sentence: str) -> None:
    if session.json:
        output.data(next(w for w in session.client.workers() if w["name"] == name))
    else:
        output.say(f"worker {name} {sentence}")


@click.command()
@click.argument("query")
@worker_option("Only on this worker.")
@market_command
def sql(session: Session, query: str, worker: str | None) -> None:
    """Run a read-only query on every worker's database, or on one's.

    The tables hold JSON: select id, body ->> 'state' from machine
    """
    with output.working("asking the workers"):
        answer = session.client.sql(query, worker=worker)
    if session.json:
        output.data(answer)
    else:
        output.table(answer["columns"], answer["rows"])
    if answer["unreachable"]:
        output.note(f"these workers did not answer: {', '.join(answer['unreachable'])}")
