"""The `hawker` command: what it offers, and how every error of it ends.

Each command's module is imported when the command is used, and the modules import what they need inside the commands,
so that help and completion appear at once. Commands raise; what is raised is told here, in one sentence and a hint on
standard error.

Exit status: 0; 1 for an error that has no other; 2 for a wrong command line or value; 3 for what is not there; 4 for
what was refused, as for want of room; 5 for what did not come in time; 130 after Ctrl-C. `machine exec` and
`machine run --rm` end with their program's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import hawker
from hawker.cli import output
from hawker.cli.groups import Lazy
from hawker.errors import HawkerError, Invalid

INTERRUPTED = 130
NOT_FOUND, REFUSED, TIMED_OUT = 3, 4, 5
_STATUSES = {404: NOT_FOUND, 408: TIMED_OUT, 504: TIMED_OUT}

COMMANDS = {
    "dev": ("hawker.cli.dev:dev_command", "Run a market on this machine: three regions, two workers each, one broker."),
    "apps": ("hawker.cli.apps:apps", "Create, list, show and destroy apps."),
    "machine": ("hawker.cli.machines:machine", "Order machines and look after them."),
    "image": ("hawker.cli.images:image", "Bring images to workers, list and remove them."),
    "open": (
        "hawker.cli.visiting:open_",
        "Print where an app is served, and open it in the browser if there is one.",
    ),
    "ping": ("hawker.cli.visiting:ping", "Send requests to an app, and show where their time goes."),
    "logs": ("hawker.cli.app_logs:logs", "Print what all machines of an app write, in one stream."),
    "proxy": ("hawker.cli.forwarding:proxy", "Forward a port of this host to a port of a machine, until Ctrl-C."),
    "console": ("hawker.cli.machines:console", "Open a shell inside a machine: bash where it has one, else sh."),
    "regions": ("hawker.cli.fleet:regions", "List regions and the room they have."),
    "workers": ("hawker.cli.fleet:workers", "List workers and what is free, cordon one, look after parked runs."),
    "explain": ("hawker.cli.explain:explain", "Explain why a machine was placed where it is."),
    "sql": ("hawker.cli.catalog:sql", "Run a read-only query on the catalog, or on workers' own databases."),
    "watch": (
        "hawker.cli.catalog:watch",
        "Print what a query of the catalog gives, then every change of it, until Ctrl-C.",
    ),
    "members": (
        "hawker.cli.catalog:members",
        "List the members of the catalog as one node sees them, and how fresh their rows are there.",
    ),
    "agent": (
        "hawker.cli.agents:agent_command",
        "Run an agent: worker, broker, proxy, or several of them, as its configuration says.",
    ),
    "doctor": (
        "hawker.cli.doctor:doctor_command",
        "Check whether this host can run machines, and say what to install.",
    ),
    "worker": ("hawker.cli.worker:worker", "Look after a worker's files on this host."),
    "sim": ("hawker.sim.cli:sim", "Simulate the whole system from a seed, with faults, and check every promise."),
    "version": ("hawker.cli.main:version", "Print the version."),
    "completion": ("hawker.cli.completion:completion", "Print the script that completes commands in your shell."),
}


@click.group(
    cls=Lazy, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(hawker.__version__, prog_name="hawker", message="%(prog)s %(version)s")
def root() -> None:
    """Run programs on a fleet of your own servers, placed the way a market does.

    Commands find the market that `hawker dev` runs on this machine; for another one give --endpoint and --token, or set
    HAWKER_ENDPOINT and HAWKER_TOKEN.
    """


@click.command()
def version() -> None:
    """Print the version."""
    output.say(f"hawker {hawker.__version__}")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; raises what went wrong only with HAWKER_DEBUG."""
    output.prepare()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has had enough: `hawker ... | head`
        _discard_output()
        return 1
    return status


def _run(arguments: Sequence[str] | None) -> int:
    form = output.Form()
    try:
        status = root.main(arguments, prog_name="hawker", standalone_mode=False, obj=form)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        sentence = re.sub(r"\s*[\n\t]\s*", " ", error.format_message())  # click lists choices in lines
        output.failure(HawkerError(sentence, hint=_usage_hint(error)))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error.__cause__ or error.__context__, EOFError):  # no more input where a question was asked
            output.failure(HawkerError("nothing was answered, so nothing was done", hint="give --yes"))
            return 1
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except HawkerError as error:
        if os.environ.get("HAWKER_DEBUG"):
            raise
        output.failure(error, form)
        return exit_status(error)
    except OSError as error:  # a file that cannot be read, a full disk behind our output
        if os.environ.get("HAWKER_DEBUG"):
            raise
        where = f": {error.filename}" if error.filename else ""
        output.failure(HawkerError(f"{error.strerror or error}{where}"), form)
        return 1
    except Exception as error:
        if os.environ.get("HAWKER_DEBUG"):
            raise
        if isinstance(error, UnicodeEncodeError) and (odd := _no_text(arguments)):
            remedy = "it is not written in UTF-8; set the terminal, or what it is pasted from, to that"
            output.failure(Invalid("argument", odd, remedy), form)
            return 2
        text = f"a fault of hawker's own: {type(error).__name__}: {error}"
        output.failure(HawkerError(text, hint="run it again with HAWKER_DEBUG=1 to see where, and report it"), form)
        return 1
    return status if isinstance(status, int) else 0


def exit_status(error: HawkerError) -> int:
    """What the command ends with, so that a script can tell what to do next."""
    status = getattr(error, "status_code", 0)  # of the API's answer
    if isinstance(error, Invalid) or status == 400:
        return 2
    status = status or error.status
    return _STATUSES.get(status, REFUSED if 400 < status < 500 else 1)


def _no_text(arguments: Sequence[str] | None) -> str:
    """The first argument that is no text, to show; "" when all are. A file's name may be none."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        shown = argument.encode(errors="backslashreplace").decode()
        if shown != argument:
            return shown
    return ""


def _usage_hint(error: click.ClickException) -> str:
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return ""
    takes_command = any(p.name == "command" and p.nargs == -1 for p in error.ctx.command.params)
    if takes_command and isinstance(error, click.NoSuchOption):
        return "put -- before the command to run, so that its options stay its own"
    return f"{error.ctx.command_path} --help"


def _discard_output() -> None:
    """Send what is still to be written nowhere, so that the interpreter's own flush at exit finds no broken pipe."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
