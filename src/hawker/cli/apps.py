"""`hawker apps`: the names under which machines are kept together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.groups import Ordered
from hawker.cli.params import app_argument, quiet_option
from hawker.cli.services import url_of
from hawker.cli.session import Session, about_app, as_object, confirmed, market_command
from hawker.errors import Conflict, NotFound

if TYPE_CHECKING:
    from hawker.model.api import App


@click.group(cls=Ordered)
def apps() -> None:
    """Create, list, show and destroy apps."""


@apps.command()
@click.argument("name")
@click.option("--org", default="personal", show_default=True, help="The organisation it belongs to.")
@market_command
def create(session: Session, name: str, org: str) -> None:
    """Create an app: a name to order machines for."""
    app = session.send(calls.CreateApp(app_name=name, org_slug=org))
    session.tell(app, f"app {app.name} is created")


@apps.command("list")
@click.option("--org", help="Only apps of this organisation.")
@quiet_option
@market_command
def list_(session: Session, org: str | None, quiet: bool) -> None:
    """List apps."""
    found = session.send(calls.ListApps(org_slug=org)).apps
    if session.json:
        output.data(found)
    elif quiet:
        output.ids(app.name for app in found)
    elif not found:
        output.note("no apps yet; hawker apps create NAME makes one")
    else:
        rows = [(a.name, a.organization.slug, a.status, a.machine_count, _likely_url(a)) for a in found]
        columns = ("name", "organisation", "status", "machines", "url")
        shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
        output.table(columns[:shown], [row[:shown] for row in rows])
    output.silent(session.silent(), "their machines are not counted")


def _likely_url(app: App) -> str:
    """Where an app is served if it has a service of the web: which it has, only its machines know."""
    urls = app.urls
    return next((urls[port] for port in ("443", "80", *urls) if port in urls), "") if app.machine_count else ""


@apps.command()
@app_argument
@market_command
def show(session: Session, app: str) -> None:
    """Show an app: where it is served, where its machines are, and how they are."""
    from collections import Counter

    from hawker.model.values import is_machine_id, rfc3339

    if is_machine_id(app):  # the API would show the machine
        raise NotFound(f"no app is called {app}: that is a machine's id", hint=f"hawker machine status {app}")
    with about_app():
        found = session.send(calls.ShowApp(app))
        machines, silent = session.machines(app)
    url = url_of(found, machines)
    if session.json:
        output.data({**as_object(found), "url": url if isinstance(url, str) else ""})
        return
    states = Counter((m.region, m.state) for m in machines)
    at = ", ".join(f"{count} {state} in {region}" for (region, state), count in sorted(states.items()))
    output.fields(
        [
            ("app", found.name),
            ("organisation", found.organization.slug),
            ("network", found.network),
            ("status", found.status),
            ("created", rfc3339(found.created_at)),
            ("machines", at or "none"),
            ("url", url if isinstance(url, str) else f"none: {url.message}"),
        ]
    )
    output.silent(silent, "their machines are not shown")


@apps.command()
@app_argument
@click.option("--force", is_flag=True, help="Destroy its machines too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@market_command
def destroy(session: Session, app: str, force: bool, yes: bool) -> None:
    """Destroy an app, which must have no machines, or with --force its machines too."""
    from hawker.model.values import is_machine_id

    if is_machine_id(app):  # the API would take it for the machine and destroy that
        raise NotFound(f"no app is called {app}: that is a machine's id", hint=f"hawker machine destroy {app}")
    confirmed(f"Destroy app {app}" + (" and all its machines?" if force else "?"), yes=yes or force)
    with output.working(f"destroying app {app}"), about_app():
        if not force and (count := session.send(calls.ShowApp(app)).machine_count):  # which the API would destroy, too
            hint = f"hawker apps destroy {app} --force destroys them too"
            raise Conflict(f"app {app} still has machines: {count}", hint=hint)
        session.send(calls.DeleteApp(app, force=force))
    session.tell({"ok": True}, f"app {app} is destroyed")
