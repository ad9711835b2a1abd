"""`hawker machine`: machines that exist. Ordering and changing them is in `cli/orders.py`.

A machine is given by its id or by a name that only one has. Commands that change its state wait for the new one and
print it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.groups import Ordered
from hawker.cli.orders import clone, create, port_text, run, update
from hawker.cli.params import app_option, machine_argument, quiet_option, region_option, timeout_option
from hawker.cli.services import service_text
from hawker.cli.session import (
    LONGEST_STOP_S,
    Object,
    Session,
    app_of,
    confirmed,
    ending,
    failure_of,
    label,
    machine_command,
    market_command,
)
from hawker.errors import DeadlineExceeded, HawkerError

if TYPE_CHECKING:
    from hawker.model.api import Machine

WAITED_FOR = ("started", "stopped", "suspended", "destroyed", "failed", "settled")
STATES = (  # those of `model/machine.py`, not imported for help
    *("created", "starting", "started", "stopping", "stopped", "suspending", "suspended"),
    *("restarting", "updating", "failed", "destroying", "destroyed"),
)
EVENTS_SHOWN = 10
SUSPEND_S = 60.0
PRECONDITION_FAILED = 412
NOT_FOUND = 127


@click.group(cls=Ordered)
def machine() -> None:
    """Order machines and look after them. MACHINE is an id, or a name that only one machine has."""


machine.add_command(run)
machine.add_command(create)


@machine.command("list")
@app_option("Only this app's; all apps' without.")
@region_option("Only this region's.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    metavar="STATE",
    help="Only machines in this state; repeatable.",
)
@click.option("--all", "deleted", is_flag=True, help="List destroyed machines, too.")
@quiet_option
@market_command
def list_(
    session: Session, app: str | None, region: str | None, states: tuple[str, ...], deleted: bool, quiet: bool
) -> None:
    """List machines."""
    with output.working("listing machines"):
        found, silent = session.machines(app, region=region, state=states, include_deleted=deleted)
    output.silent(silent, "their machines are not listed")
    if session.json:
        output.data(found)
    elif quiet:
        output.ids(m.id for m in found)
    elif not found:
        output.note("no such machines" if region or states else "no machines; hawker machine run orders one")
    else:
        columns = ("id", "name", "app", "state", "region", "worker", "size", "checks")
        rows = [(m.id, m.name, app_of(m), m.state, m.region, m.hawker.worker, _size(m), _checks(m)) for m in found]
        shown = len(columns) if any(m.checks for m in found) else len(columns) - 1
        output.table(columns[:shown], [row[:shown] for row in rows])


def _size(m: Machine) -> str:
    guest = m.config["guest"]
    kind = "dedicated" if guest["cpu_kind"] == "performance" else "shared"
    return f"{guest['cpus']} {kind}, {guest['memory_mb']} MiB"


def _checks(m: Machine) -> str:
    checks = m.checks
    passing = sum(check.status == "passing" for check in checks)
    return f"{passing}/{len(checks)} passing" if checks else ""


@machine.command()
@machine_argument
@machine_command
def status(session: Session, found: Machine) -> None:
    """Show a machine, what it runs and what happened to it."""
    if session.json:
        output.data(found)
        return
    config, placed = found.config, found.hawker
    output.fields(
        [
            ("machine", found.id),
            ("name", found.name),
            ("app", placed.app),
            ("state", found.state + (" (cordoned)" if found.cordoned else "")),
            ("region", found.region),
            ("worker", placed.worker),
            ("size", _size(found)),
            ("image", config["image"]),
            *([("digest", digest)] if (digest := found.image_ref.get("digest")) else []),
            ("runtime", placed.driver),
            *[("service", service_text(service)) for service in config.get("services") or []],
            *[("port", port_text(port)) for port in placed.ports],
            *([("checks", _checks(found))] if found.checks else []),
            ("command", _command(config)),
            ("restart", config["restart"]["policy"]),
            *[("metadata", f"{key}={value}") for key, value in (config.get("metadata") or {}).items()],
            ("version", found.version),
            ("created", found.created_at),
            ("updated", found.updated_at),
            ("because of", placed.cause),
        ]
    )
    if found.checks:
        output.say("")
        checks = [(check.name, check.status, check.updated_at, check.output) for check in found.checks]
        output.table(("check", "status", "since", ""), checks)
    output.say("")
    sources = {"flyd": "worker"}  # the API says it in the word that its clients know
    rows = [(_clock(e.timestamp), e.type, e.status, sources.get(e.source, e.source), ending(e)) for e in found.events]
    output.table(("time", "event", "state", "source", ""), rows[:EVENTS_SHOWN])


def _command(config: Object) -> str:
    import shlex

    init = config["init"]
    process = (config.get("processes") or [{}])[0]
    for part in (init, process):
        if argv := part.get("exec") or [*(part.get("entrypoint") or []), *(part.get("cmd") or [])]:
            return shlex.join(argv)
    return "the image's own"


def _clock(at_ms: int) -> str:
    from hawker.model.values import rfc3339

    return rfc3339(at_ms)


# --- states ----------------------------------------------------------------------------------------------------------


@machine.command()
@machine_argument
@machine_command
def start(session: Session, found: Machine) -> None:
    """Start a machine at rest, or wake a suspended one."""
    with output.working(f"{label(found)}: starting"):
        session.send(calls.StartMachine(app_of(found), found.id, wait=True))
    session.show(session.shown(found), "is started")


@machine.command()
@machine_argument
@click.option("--signal", help="Send this signal instead of the configured one, such as SIGTERM.")
@timeout_option(help="Kill it after this time, instead of the configured one.")
@machine_command
def stop(session: Session, found: Machine, signal: str | None, grace_s: float | None) -> None:
    """Stop a machine: a signal, a grace time, then kill."""
    session.send(calls.StopMachine(app_of(found), found.id, signal=signal, timeout=grace(grace_s) or None))
    after = session.wait(found, ["stopped", "destroyed", "failed"], LONGEST_STOP_S, "stopping")
    session.show(after, f"is {after.state}")


@machine.command()
@machine_argument
@timeout_option(help="Kill it after this time.")
@click.option("--force", is_flag=True, help="Kill it at once.")
@machine_command
def restart(session: Session, found: Machine, grace_s: float | None, force: bool) -> None:
    """Stop and start a machine. It keeps its room meanwhile. One that is stopped is started."""
    if found.state in ("stopped", "failed", "created"):
        session.send(calls.StartMachine(app_of(found), found.id))
        session.show(_started(session, found, "starting"), "is started")
        return
    again = calls.RestartMachine(app_of(found), found.id, timeout=grace(grace_s), force_stop=force)
    session.send(again)
    session.show(_started(session, found, "restarting"), "is started again")


def grace(seconds: float | None) -> str:
    """A grace time as the API takes it; "" for its own."""
    from hawker.model.values import format_duration

    return "" if seconds is None else format_duration(seconds)


def _started(session: Session, machine: Machine, doing: str) -> Machine:
    after = session.wait(machine, ["started", "stopped", "failed", "destroyed"], LONGEST_STOP_S, doing)
    if after.state == "failed":
        why = failure_of(after)
        raise HawkerError(f"{label(after)} did not start{why and ': ' + why}", hint=f"hawker machine logs {after.id}")
    return after


@machine.command()
@machine_argument
@machine_command
def suspend(session: Session, found: Machine) -> None:
    """Freeze a running machine with its memory. `start` wakes it."""
    session.send(calls.SuspendMachine(app_of(found), found.id))
    after = session.wait(found, ["suspended", "stopped", "failed"], SUSPEND_S, "suspending")
    session.show(after, f"is {after.state}")


machine.add_command(update)
machine.add_command(clone)


@machine.command()
@machine_argument
@click.option("--state", "states", multiple=True, type=click.Choice(WAITED_FOR), help="Repeatable. Default: started.")
@timeout_option("timeout_s", least=1, default=60)
@machine_command
def wait(session: Session, found: Machine, states: tuple[str, ...], timeout_s: float) -> None:
    """Wait until a machine is in a state."""
    wanted = states or ("started",)
    after = session.wait(found, wanted, timeout_s, f"waiting for {' or '.join(wanted)}")
    lasted = after.state in wanted or "settled" in wanted
    session.show(after, f"is {after.state}" if lasted else f"was {' or '.join(wanted)} and is {after.state} now")


@machine.command()
@machine_argument
@machine_command
def cordon(session: Session, found: Machine) -> None:
    """Take a machine out of traffic. It keeps running."""
    session.send(calls.CordonMachine(app_of(found), found.id))
    session.show(session.shown(found), "is cordoned")


@machine.command()
@machine_argument
@machine_command
def uncordon(session: Session, found: Machine) -> None:
    """Put a machine back into traffic."""
    session.send(calls.UncordonMachine(app_of(found), found.id))
    session.show(session.shown(found), "is in traffic")


@machine.command()
@machine_argument
@click.option("--force", is_flag=True, help="Kill it if it runs. Otherwise a running machine is refused.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@machine_command
def destroy(session: Session, found: Machine, force: bool, yes: bool) -> None:
    """Destroy a machine and everything of it."""
    confirmed(f"Destroy {label(found)} of app {app_of(found)}, {found.state}?", yes=yes or force)
    with output.working(f"{label(found)}: destroying"):
        try:
            session.send(calls.DestroyMachine(app_of(found), found.id, force=force))
        except HawkerError as error:
            if getattr(error, "status_code", 0) == PRECONDITION_FAILED:  # the API's hint is for callers of the API
                error.hint = f"hawker machine stop {found.id} first, or give --force"
            raise
    session.show(session.shown(found), "is destroyed")


# --- inside ----------------------------------------------------------------------------------------------------------


@machine.command("exec")
@machine_argument
@click.argument("command", nargs=-1, required=True)
@click.option("--timeout", "timeout_s", type=click.IntRange(1, 3600), metavar="SECONDS", help="Kill it then.")
@click.option("-i", "--stdin", "feed", is_flag=True, help="Give it this program's standard input.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal; with -i, this one.")
@machine_command
def exec_(
    session: Session, found: Machine, command: tuple[str, ...], timeout_s: int | None, feed: bool, tty: bool
) -> None:
    """Run a command beside a machine's program: hawker machine exec MACHINE -- COMMAND ...

    Prints what it prints, and ends with its exit status, or 128 and its signal, or 124 at its time-out. Ctrl-C ends it;
    with -it it goes to the command.
    """
    _exec(session, found, command, feed=feed, tty=tty, timeout_s=timeout_s)


@machine.command()
@machine_argument
@machine_command
def console(session: Session, found: Machine) -> None:
    """Open a shell inside a machine: bash where it has one, else sh."""
    _exec(session, found, SHELL, feed=True, tty=True)


SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi")


def _exec(
    session: Session, found: Machine, command: tuple[str, ...], *, feed: bool, tty: bool, timeout_s: int | None = None
) -> None:
    from hawker.cli.talking import talk
    from hawker.client.client import ApiError
    from hawker.model.exec_output import as_text

    try:
        ended = talk(
            session, app_of(found), found.id, command, tty=tty, feed=feed, keep=session.json, timeout_s=timeout_s
        )
    except ApiError as error:
        if error.word == "start_failed":
            output.failure(error)
            click.get_current_context().exit(NOT_FOUND)
        raise
    if session.json:
        texts = as_text("stdout", bytes(ended.stdout)) | as_text("stderr", bytes(ended.stderr))
        code = ended.status if ended.timed_out else ended.exit_code
        how = {"exit_code": code, "exit_signal": ended.exit_signal, "timed_out": ended.timed_out}
        output.data({**how, **texts})
    elif ended.timed_out:
        output.failure(DeadlineExceeded(f"deadline_exceeded: the command was killed after {timeout_s} s"))
    click.get_current_context().exit(ended.status)


@machine.command()
@machine_argument
@click.option("--memory", "memory_mb", type=click.IntRange(min=1), metavar="MIB", help="By default what it has.")
@click.option("--cpus", type=click.IntRange(min=1), help="By default what it has.")
@machine_command
def resize(session: Session, found: Machine, memory_mb: int | None, cpus: int | None) -> None:
    """Give a machine another size while it runs. Refused where there is no room, or it uses more."""
    if memory_mb is None and cpus is None:
        raise click.UsageError("give --memory, --cpus or both")
    wanted = memory_mb or found.config["guest"]["memory_mb"]
    session.send(calls.SetMemory(app_of(found), found.id, limit_mb=wanted, cpus=cpus))
    after = session.shown(found)
    session.show(after, f"has {_size(after)}")


@machine.command()
@machine_argument
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until Ctrl-C, or until it is destroyed.")
@click.option("--tail", type=click.IntRange(0, 10_000), default=100, show_default=True, metavar="LINES")
@click.option("-t", "--timestamps", is_flag=True, help="Begin each line with its time and stream.")
@machine_command
def logs(session: Session, found: Machine, follow: bool, tail: int, timestamps: bool) -> None:
    """Print what a machine's program wrote. With --json an object a line."""
    with session.client.stream(calls.FollowLogs(app_of(found), found.id, tail=tail, follow=follow)) as lines:
        for line in lines:
            if session.json:
                output.line(line)
                continue
            lead = f"{line.timestamp} {line.stream} " if timestamps else ""
            output.logged(lead, line.message)
