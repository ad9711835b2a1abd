"""`hawker machine run --rm`: shows what the program writes, and ends with its exit status, like `docker run --rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.session import LONGEST_STOP_S, Session, app_of
from hawker.errors import HawkerError

if TYPE_CHECKING:
    from hawker.model.api import Machine

LINES_MOST = 10_000
"""Written before the log is first read."""


def attend(session: Session, machine: Machine) -> None:
    """Follow the machine to its end. Ctrl-C destroys it."""
    app = app_of(machine)
    try:
        with session.client.stream(calls.FollowLogs(app, machine.id, tail=LINES_MOST, follow=True)) as lines:
            for line in lines:
                output.passed_on(f"{line.message}\n", err=line.stream == "stderr")
        after = session.wait(machine, ["destroyed"], LONGEST_STOP_S, "ending")
    except KeyboardInterrupt:
        session.send(calls.DestroyMachine(app, machine.id, force=True))
        raise
    click.get_current_context().exit(_status(after))


def _status(machine: Machine) -> int:
    """The program's exit status, or 128 and its signal."""
    for event in machine.events:
        if ended := (event.request or {}).get("exit_event"):
            return int(128 + ended["signal"] if ended["signal"] > 0 else ended["exit_code"])
    raise HawkerError(f"machine {machine.id} is destroyed, and how its program ended is not known")
