"""`hawker sim`: the whole system in one process, from a seed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hawker.cli import output
from hawker.cli.groups import Ordered
from hawker.errors import HawkerError, Invalid

if TYPE_CHECKING:
    from hawker.sim.campaign import Campaign
    from hawker.sim.running import Report

SHOWN = 40  # events and violations of a failed run on the terminal; the record has more


@click.group(cls=Ordered)
def sim() -> None:
    """Simulate the whole system from a seed, with faults, and check every promise.

    The real agents run in one process on virtual time: seven workers and two brokers in three regions, clients, a
    simulated network, and disks that lose what was not synced. The same seed gives the same run, event by event.
    """


_SEED = "Where all randomness comes from."
_seconds = click.option(
    "--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="Virtual time with faults."
)
_users = click.option("--users", is_flag=True, help="Also users of apps, and proxies that bring their requests.")


@sim.command()
@click.option("--seed", type=click.IntRange(0), required=True, help=_SEED)
@_seconds
@_users
@click.option("--trace", is_flag=True, help="Print every event.")
@click.option("--record", type=click.Path(path_type=Path), help="Where a failed run is written; hawker-sim-SEED.json.")
@click.option("--mutant", metavar="NAME", default="", help="Break our own code on purpose; an unknown name lists them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def run(
    ctx: click.Context,
    seed: int,
    seconds: float,
    users: bool,
    trace: bool,
    record: Path | None,
    mutant: str,
    as_json: bool,
) -> None:
    """Run one simulation. Ends with status 1 when a promise was broken."""
    from hawker.sim.mutants.market import MUTANTS
    from hawker.sim.mutants.proxy import PROXY_MUTANTS
    from hawker.sim.plan import plan_of
    from hawker.sim.running import simulate

    _form(ctx, as_json)
    known = PROXY_MUTANTS if users else MUTANTS
    if mutant and mutant not in known:
        raise Invalid("mutant", mutant, f"name one of: {'; '.join(known)}")
    tell = (lambda number, line: output.say(f"{number} {line}")) if trace else None
    with output.working(f"simulating seed {seed}"):
        report = simulate(plan_of(seed, seconds, users=users, mutant=mutant), tell=tell)
    if as_json:
        output.data(report)
    else:
        _show(report)
    if report.violations:
        _save(report, record)
        ctx.exit(1)


@sim.command()
@click.argument("record", type=click.Path(path_type=Path), required=False)
@click.option("--seed", type=click.IntRange(0), help=_SEED)
@_seconds
@_users
@click.option("--shrink", is_flag=True, help="Leave faults out, by halves, while it still fails.")
@click.pass_context
def replay(
    ctx: click.Context, record: Path | None, seed: int | None, seconds: float, users: bool, shrink: bool
) -> None:
    """Run a failed simulation again and show what led to it. RECORD is the file that it left.

    Says whether digest and violations are the same as recorded. Ends with status 1 when they are not.
    """
    from hawker import __version__
    from hawker.sim import replay as again
    from hawker.sim.plan import plan_of
    from hawker.sim.running import simulate

    if (record is None) == (seed is None):
        raise click.UsageError("Give either the record of a run or --seed.")
    if record is not None:
        before = again.load(record)
        if before.version != __version__:
            output.note(f"the record is of version {before.version}, this is {__version__}: the run may differ")
    else:
        assert seed is not None
        before = simulate(plan_of(seed, seconds, users=users))
    plan = before.plan
    if shrink:
        if not before.violations:
            raise HawkerError(f"seed {plan.seed} breaks no promise: there is nothing to shrink")
        plan = again.shrink(plan, again.kinds_of(before.violations), output.note)
        before = simulate(plan)
    report, about = again.rerun(plan, before.violations)
    for line in about[-again.ABOUT_MAX :]:
        output.say(line)
    _show(report)
    if (report.digest, report.violations) != (before.digest, before.violations):
        raise HawkerError(
            f"the run differs from the record: its digest was {before.digest}",
            hint="the record is of another version of the code" if record else "report it: a run must repeat itself",
        )
    output.say(f"the same digest and violations as {'recorded' if record else 'the first time'}")
    if shrink:
        _save(report, None)


@sim.command()
@click.option("--seeds", required=True, metavar="A..B", help="The first and the last seed.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes at a time.")
@_seconds
@_users
@click.pass_context
def campaign(ctx: click.Context, seeds: str, jobs: int, seconds: float, users: bool) -> None:
    """Run many seeds. Prints which faults fired and which rare paths were taken.

    Ends with status 1 when a promise was broken, or a path that must be seen was never taken.
    """
    from hawker.sim.campaign import Campaign, run_seeds

    first, last = _range(seeds)
    found = Campaign()
    for report in run_seeds(range(first, last + 1), jobs, seconds=seconds, users=users):
        found.add(report)
        if report.violations:
            output.note(
                f"seed {report.plan.seed}: {len(report.violations)} violations; the first: {report.violations[0]}"
            )
            _save(report, None)
    show_campaign(found)
    ctx.exit(0 if found.ok else 1)


def show_campaign(found: Campaign) -> None:
    """The two tables, and what is missing."""
    output.table(("fault", "fired"), sorted(found.fired.items()))
    output.say("")
    output.table(("rare path", "taken"), sorted(found.paths.items()))
    output.say("")
    output.say(f"{found.runs} runs, {found.events} events, {len(found.failed)} runs broke a promise")
    for never in found.never():
        output.say(f"never seen: {never}")


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise Invalid("seeds", text, "write the first and the last seed, such as 1..300")
    return int(match[1]), int(match[2])


def _form(ctx: click.Context, as_json: bool) -> None:
    if isinstance(ctx.obj, output.Form):
        ctx.obj.json = as_json


def _show(report: Report) -> None:
    for text in report.violations[:SHOWN]:
        output.say(f"broken: {text}")
    if len(report.violations) > SHOWN:
        output.say(f"and {len(report.violations) - SHOWN} more")
    broken = f"{len(report.violations)} promises broken" if report.violations else "every promise held"
    faults = f"{sum(report.fired.values())} faults"
    output.say(
        f"seed {report.plan.seed}: {report.events} events in {report.virtual_s:.0f} virtual seconds, {faults}, {broken}"
    )
    output.say(f"digest {report.digest}")


def _save(report: Report, path: Path | None) -> None:
    from hawker.sim.replay import save

    path = path or Path(f"hawker-sim-{report.plan.seed}.json")
    save(report, path)
    output.note(f"written to {path}; run it again with hawker sim replay {path}")
