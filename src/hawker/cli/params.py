"""Arguments and options that several commands take, and what the shell completes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hawker.cli import calls
from hawker.errors import HawkerError, Invalid

if TYPE_CHECKING:
    from hawker.client.client import Client

F = TypeVar("F", bound=Callable[..., Any])

_COMPLETION_S = 1.0  # nobody waits longer for a completion


def _complete(find: Callable[[Client, click.Context], list[tuple[str, str]]]) -> Callable[..., list[CompletionItem]]:
    """Completes what a market knows that begins as typed. Without a market that answers at once, nothing: the middle of
    a line is no place for an error."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import os

        from hawker.client.client import Client
        from hawker.client.settings import find_settings

        try:
            settings = find_settings(os.environ, ctx.params.get("endpoint") or "", ctx.params.get("token") or "")
            with Client(settings.endpoint, settings.token, timeout_s=_COMPLETION_S) as client:
                found = find(client, ctx)
        except HawkerError:
            return []
        return [CompletionItem(value, help=help) for value, help in found if value.startswith(incomplete)]

    return complete


def _find_machines(client: Client, ctx: click.Context) -> list[tuple[str, str]]:
    app = ctx.params.get("app")
    apps = [app] if app else [a.name for a in client.send(calls.ListApps()).apps if a.machine_count]
    machines = [(name, m) for name in apps for m in client.send(calls.ListMachines(name))]
    told = [(m.id, f"{m.name} of {name}, {m.state}") for name, m in machines]
    return told + [(m.name, f"{m.id} of {name}, {m.state}") for name, m in machines]


_machines = _complete(_find_machines)
_apps = _complete(lambda client, ctx: [(a.name, "") for a in client.send(calls.ListApps()).apps])
_regions = _complete(lambda client, ctx: [(r.code, r.name) for r in client.send(calls.ListRegions()).Regions])
_workers = _complete(lambda client, ctx: [(w["name"], "") for w in client.send(calls.ListWorkers())])


def together(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Arguments and options that several commands take, as one decorator. Help shows them in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def machine_argument(function: F) -> F:
    """MACHINE, and --app to tell apart machines of one name."""
    app = app_option("Look for the name in this app only.")
    return click.argument("machine", shell_complete=_machines)(app(function))


def app_option(help: str, *, required: bool = False) -> Callable[[F], F]:
    return click.option(
        "-a", "--app", metavar="APP", envvar="HAWKER_APP", required=required, shell_complete=_apps, help=help
    )


app_argument = click.argument("app", shell_complete=_apps)
worker_argument = click.argument("name", shell_complete=_workers)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print names or ids alone, one a line.")


def region_option(help: str) -> Callable[[F], F]:
    return click.option("--region", metavar="REGION", shell_complete=_regions, callback=_not_empty, help=help)


def worker_option(help: str) -> Callable[[F], F]:
    return click.option("--worker", metavar="WORKER", shell_complete=_workers, callback=_not_empty, help=help)


def _not_empty(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    """A script's empty variable must not stand for any region or all workers."""
    if given is not None and not given.strip(", "):
        raise click.BadParameter("it is empty; leave the option out for any.", ctx, param)
    return given


class _Seconds(click.FloatRange):
    """A finite count of seconds: `float` also reads "nan", which is in every range, and "inf"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not isfinite(seconds):
            self.fail(f"{value!r} is not a count of seconds.", param, ctx)
        return seconds


def timeout_option(
    name: str = "grace_s", *, least: float = 0, default: float | None = None, help: str = ""
) -> Callable[[F], F]:
    """--timeout, in seconds."""
    kind = _Seconds(min=least)
    shown = default is not None
    return click.option(
        "--timeout", name, type=kind, default=default, show_default=shown, metavar="SECONDS", help=help or None
    )


def pairs(field: str, given: Sequence[str]) -> dict[str, str]:
    """A map from KEY=VALUE arguments. Raises `Invalid`."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise Invalid(field, text, "write KEY=VALUE")
        found[key] = value
    return found
