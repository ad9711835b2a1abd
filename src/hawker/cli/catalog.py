"""`hawker sql`, `hawker watch`, `hawker members`: what one node knows of the fleet, and how fresh it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from hawker.cli import calls, output
from hawker.cli.params import worker_option
from hawker.cli.session import Object, Session, market_command
from hawker.errors import Unreachable

if TYPE_CHECKING:
    from hawker.model.api import Member, RowsFound, SubscriptionEvent

_SIGNS = {"insert": "+", "update": "~", "delete": "-"}
_RESUME = ("too_slow", "unreachable")  # what a stream ends with that goes on elsewhere, or here a little later
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)


@click.command()
@click.argument("query")
@worker_option("On this worker's own database.")
@click.option("--workers", "on_workers", is_flag=True, help="Query every worker's own database.")
@market_command
def sql(session: Session, query: str, worker: str | None, on_workers: bool) -> None:
    """Run a read-only query on the catalog, or on workers' own databases.

    The catalog: select worker, id, state from machines where app = 'web'

    A worker's tables hold JSON: select id, body ->> 'state' from machine
    """
    if worker and on_workers:
        raise click.UsageError("give --worker or --workers, not both", click.get_current_context())
    if worker or on_workers:
        _ask_workers(session, query, worker)
        return
    answer = session.send(calls.RunSql(query=query))
    _show(session, answer)


def _ask_workers(session: Session, query: str, worker: str | None) -> None:
    with output.working("asking the workers"):
        answer = session.send(calls.RunSql(query=query, worker=worker, on="workers"))
        silent = answer.unreachable or []
        asked = [worker] if worker or not silent else [w["name"] for w in session.send(calls.ListWorkers())]
    if silent and len(silent) == len(asked):
        raise Unreachable(
            "no worker answered" if worker is None else f"worker {worker} did not answer", hint="hawker workers"
        )
    _show(session, answer)
    output.silent(silent)


def _show(session: Session, answer: RowsFound) -> None:
    if session.json:
        output.data(answer)
    else:
        output.table(answer.columns, answer.rows)


@click.command()
@market_command
def members(session: Session) -> None:
    """List the members of the catalog as one node sees them, and how fresh their rows are there.

    heard: how long ago this node last had everything that the member published. behind: for how long it has known that
    something is missing.
    """
    found = session.send(calls.ListMembers())
    if session.json:
        output.data(found)
        return
    columns = ("member", "region", "roles", "status", "heard", "behind")
    output.table(columns, [_member(member) for member in found])


def _member(member: Member) -> tuple[object, ...]:
    confirmed = [log.confirmed_s for log in member.logs]
    known = [seconds for seconds in confirmed if seconds is not None]
    heard_s = max(known) if known and len(known) == len(confirmed) else None
    behind_s = max((log.behind_s for log in member.logs), default=0.0)
    status = f"{member.status}, here" if member.here else member.status
    roles = ", ".join(member.roles)
    heard = None if member.here or heard_s is None else _ago(heard_s)
    return (member.name, member.region, roles, status, heard, _ago(behind_s) if behind_s else None)


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


@click.command()
@click.argument("query")
@click.option("--seconds", type=click.IntRange(0, 86_400), metavar="SECONDS", help="End after this time.")
@market_command
def watch(session: Session, query: str, seconds: int | None) -> None:
    """Print what a query of the catalog gives, then every change of it, until Ctrl-C.

    + marks a new row, ~ a changed one, - one that is gone. Begin the query with its key: otherwise a change is shown as
    a row that is gone and a new one. With --json each line is an event.
    """
    import msgspec

    shown = _Watch(session)
    until = None if seconds is None else time.monotonic() + seconds
    failures = 0
    while True:
        left = None if until is None else max(0, round(until - time.monotonic()))
        try:
            with session.client.stream(calls.Subscribe(query=query, since=shown.since, seconds=left)) as events:
                for event in events:
                    if event.event == "error":
                        shown.end(msgspec.json.decode(event.data))
                    failures = 0
                    shown.take(event)
            return  # the time is up
        except Unreachable as error:
            if not shown.began:
                raise
            output.note(f"{error.message}; resuming")
            time.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
            failures += 1


class _Watch:
    """What is shown of the events so far, and where to go on from."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.began = False
        self.since = ""
        self._columns: list[str] = []
        self._rows: list[list[Any]] = []

    def take(self, event: SubscriptionEvent) -> None:
        import msgspec

        data = msgspec.json.decode(event.data)
        self.began = True
        if event.id is not msgspec.UNSET:
            self.since = event.id
        if self._session.json:
            output.line({"event": event.event, "data": data, "id": event.id or None})
            return
        match event.event:
            case "columns":
                self._columns, self._rows = data, []
            case "reset":
                output.note("what changed meanwhile is not kept; everything again:")
            case "row":
                self._rows.append(data["values"])
            case "end":
                output.table(self._columns, self._rows)
                self._rows = []
            case "change":
                output.say(f"{_SIGNS[data['kind']]} {'  '.join(map(output.cell, data['values']))}")

    def end(self, error: Object) -> None:
        """An error that ended the stream. Raises `Unreachable` when it goes on, else `ApiError`."""
        from hawker.client.client import ApiError

        details = error.get("details")
        hint = str(details.get("hint", "")) if isinstance(details, dict) else ""
        if error["status"] in _RESUME:
            raise Unreachable(error["error"], hint=hint)
        raise ApiError(error["error"], status_code=400, word=error["status"], hint=hint)
