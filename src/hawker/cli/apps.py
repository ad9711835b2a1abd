"""`hawker apps`: the names under which machines are kept together."""

from __future__ import annotations

import click

from hawker.cli import output
from hawker.cli.groups import Ordered
from hawker.cli.params import app_argument
from hawker.cli.session import Session, confirmed, market_command
from hawker.errors import HawkerError, NotFound

NOT_FOUND, CONFLICT = 404, 409


@click.group(cls=Ordered)
def apps() -> None:
    """Create, list and destroy apps."""


@apps.command()
@click.argument("name")
@click.option("--org", default="personal", show_default=True, help="The organisation it belongs to.")
@market_command
def create(session: Session, name: str, org: str) -> None:
    """Create an app: a name to order machines for."""
    app = session.client.create_app(name, org)
    if session.json:
        output.data(app)
    else:
        output.say(f"app {app['name']} is created")


@apps.command("list")
@click.option("--org", help="Only this organisation's.")
@market_command
def list_(session: Session, org: str | None) -> None:
    """List apps."""
    found = session.client.apps(org)
    if session.json:
        output.data(found)
    elif not found:
        output.note("no apps yet; hawker apps create NAME makes one")
    else:
        rows = [(a["name"], a["organization"]["slug"], a["status"], a["machine_count"]) for a in found]
        output.table(("name", "organisation", "status", "machines"), rows)
    if silent := session.silent():
        output.note(f"these workers did not answer, their machines are not counted: {', '.join(silent)}")


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
    with output.working(f"destroying app {app}"):
        try:
            session.client.delete_app(app, force=force)
        except HawkerError as error:  # the API's hints are for callers of the API, and for orders
            status = getattr(error, "status_code", 0)
            if status == CONFLICT and not force:
                error.hint = f"hawker apps destroy {app} --force destroys them too"
            elif status == NOT_FOUND:
                error.hint = "hawker apps list"
            raise
    if session.json:
        output.data({"ok": True})
    else:
        output.say(f"app {app} is destroyed")
