"""What every command that talks to a market shares: its options, its client, and how a machine is found.

`@market_command` adds the options `--endpoint`, `--token` and `--json` and gives the command a `Session`. The client is
made when it is first needed, so a wrong option is told before a missing market.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import click

from hawker.cli import calls, output
from hawker.cli.option_names import as_typed
from hawker.errors import HawkerError, NotFound, Refused, Unreachable

if TYPE_CHECKING:
    from hawker.client.client import Client
    from hawker.model.api import Event, Machine
    from hawker.model.op import Request

P = ParamSpec("P")
R = TypeVar("R")
Object = dict[str, Any]

SILENT = "hawker-unreachable-workers"  # the header in which a list names who did not answer
COMING_UP_S = 60.0  # as long as `hawker dev` gives its agents
COMING_UP_LOOK_S = 0.1
WAIT_S = 2  # one call that waits for a state; between two is told what keeps it
LONGEST_STOP_S = 330.0  # the longest grace time there is, and what it takes around it


class Session:
    """One command's dealings with a market."""

    def __init__(self, endpoint: str, token: str, *, json: bool = False) -> None:
        self.json = json
        self._endpoint = endpoint
        self._token = token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if "client" in self.__dict__:
            self.client.close()

    @functools.cached_property
    def client(self) -> Client:
        return self.another_client()

    def send(self, request: Request[R]) -> R:
        return self.client.send(request)

    def another_client(self) -> Client:
        """A client for another thread. The caller closes it."""
        from hawker.client.client import Client
        from hawker.client.settings import coming_up, find_settings

        if not self._endpoint and coming_up(os.environ):
            with output.working("waiting for the market of hawker dev, which is coming up"):
                deadline = monotonic() + COMING_UP_S
                while coming_up(os.environ) and monotonic() < deadline:
                    sleep(COMING_UP_LOOK_S)
        settings = find_settings(os.environ, self._endpoint, self._token)
        return Client(settings.endpoint, settings.token)

    def machine(self, given: str, app: str | None = None) -> Machine:
        """The machine of an id, or of a name that only one has. `app` narrows the search for a name.

        Raises `NotFound`; `Refused` when nothing was given or several have the name; `Unreachable` when it may be on a
        silent worker.
        """
        from hawker.model.values import is_machine_id

        if not given.strip():
            raise Refused("no machine was given: the id or name is empty", hint="hawker machine list")
        if is_machine_id(given):
            return self.send(calls.FindMachine(given))
        with output.working(f"looking for {given}"):
            machines, silent = self.machines(app)
        found = [m for m in machines if m.name == given]
        if not found:
            where = f" in app {app}" if app else ""
            if silent:
                raise Unreachable(
                    f"no machine is called {given}{where} on the workers that answered; {', '.join(silent)} did not",
                    hint="give its id, or try again when they are back",
                )
            lower = is_machine_id(given.lower())
            hint = f"ids are in lower case: {given.lower()}" if lower else "hawker machine list"
            raise NotFound(f"no machine has the id or name {given}{where}", hint=hint)
        if len(found) > 1:
            ids = ", ".join(f"{m.id} ({app_of(m)})" for m in found)
            raise Refused(f"{len(found)} machines are called {given}", hint=f"give an id: {ids}")
        return found[0]

    def shown(self, machine: Machine) -> Machine:
        """The machine as it is now."""
        return self.send(calls.ShowMachine(app_of(machine), machine.id))

    def machines(self, app: str | None = None, **filters: Any) -> tuple[list[Machine], list[str]]:
        """Machines of an app or of all, and the workers that did not answer, whose machines are not among them."""
        found: list[Machine] = []
        silent: set[str] = set()
        for name in [app] if app else [a.name for a in self.send(calls.ListApps()).apps]:
            found += self.send(calls.ListMachines(name, **filters))
            silent.update(self.silent())
        return found, sorted(silent)

    def silent(self) -> list[str]:
        """The workers that did not answer the last call: what it gave lacks what they know."""
        return [name for name in self.client.answer_headers.get(SILENT, "").split(", ") if name]

    def wait(
        self,
        machine: Machine,
        states: Sequence[str],
        timeout_s: float,
        doing: str,
        also: Callable[[], str] = lambda: "",
    ) -> Machine:
        """The machine once it is in one of `states`. What its worker tries again meanwhile is said, once for each
        reason, and first what `also` has to say. Raises `ApiError` with `status_code` 408 when the time is up."""
        from hawker.client.client import ApiError

        app, machine_id = app_of(machine), machine.id
        deadline, said = monotonic() + timeout_s, ""
        with output.working(f"{label(machine)}: {doing}") as interject:
            while True:
                left_s = deadline - monotonic()
                try:
                    wait_s = max(1, min(WAIT_S, round(left_s)))
                    self.send(calls.WaitForMachine(app, machine_id, state=list(states), timeout=wait_s))
                    return self.shown(machine)
                except ApiError as error:
                    if error.status_code != 408 or left_s <= WAIT_S:
                        raise
                    why = error.details.get("why", "") if isinstance(error.details, dict) else ""
                    if why not in ("", said):
                        if not said and (more := also()):
                            interject(more)
                        interject(f"{label(machine)}: {why}; its worker tries again")
                        said = why

    def show(self, machine: Machine, sentence: str) -> None:
        """The result of a command that changed a machine."""
        self.tell(machine, f"{label(machine)} {sentence}")

    def tell(self, value: Any, sentence: str) -> None:
        """The result of a command: the value as JSON, or a sentence for people."""
        if self.json:
            output.data(value)
        else:
            output.say(sentence)


def market_command(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """A command's function with the common options, called with a session in place of them. Those given to a group
    hold for its commands."""

    @click.option("--endpoint", metavar="URL", default="", help="The market's address, such as http://127.0.0.1:4280.")
    @click.option("--token", default="", help="The token for it. Others can see it here: better set HAWKER_TOKEN.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @click.pass_context
    @functools.wraps(function)
    def run(ctx: click.Context, /, *args: Any, endpoint: str, token: str, as_json: bool, **options: Any) -> None:
        outer = ctx.parent.params if ctx.parent else {}
        as_json = as_json or outer.get("as_json", False)
        if isinstance(ctx.obj, output.Form):
            ctx.obj.json = as_json
        endpoint, token = endpoint or outer.get("endpoint", ""), token or outer.get("token", "")
        with Session(endpoint, token, json=as_json) as session:
            try:
                function(session, *args, **options)
            except HawkerError as error:
                as_typed(error, ctx)
                raise

    return run


def machine_command(function: Callable[Concatenate[Session, Machine, P], None]) -> Callable[..., None]:
    """A `market_command` with a `machine_argument`, called with the machine in place of that."""

    @market_command
    @functools.wraps(function)
    def run(session: Session, /, machine: str, app: str | None, *args: P.args, **options: P.kwargs) -> None:
        function(session, session.machine(machine, app), *args, **options)

    return run


@contextmanager
def about_app() -> Iterator[None]:
    """Point to the list of apps when the app of a command is not there. The API's own hint is for orders."""
    try:
        yield
    except HawkerError as error:
        if getattr(error, "status_code", 0) == 404:
            error.hint = "hawker apps list"
        raise


def as_object(value: Any) -> Object:
    """A reply as the JSON object that it came as."""
    import msgspec

    found: Object = msgspec.to_builtins(value)
    return found


def app_of(machine: Machine) -> str:
    return machine.hawker.app


def label(machine: Machine) -> str:
    """How a machine is called in a sentence."""
    return f"machine {machine.id} ({machine.name})"


def failure_of(machine: Machine) -> str:
    """Why a machine failed, from its newest event that says so; "" when none does."""
    return next((told for event in machine.events if (told := ending(event))), "")


def ending(event: Event) -> str:
    """How the program ended, or why it did not start; "" for an event that is about neither."""
    ended = (event.request or {}).get("exit_event")
    if not ended:
        return ""
    how = f"signal {ended['signal']}" if ended["signal"] > 0 else f"exit status {ended['exit_code']}"
    told = ended["error"] or how
    return told + (", out of memory" if ended["oom_killed"] else "") + (", starts again" if ended["restarting"] else "")


def confirmed(question: str, *, yes: bool) -> None:
    """Ask before something is lost, where there is somebody to ask. Raises `Refused` after a no."""
    if not yes and sys.stdin.isatty() and not click.confirm(question, err=True):
        raise Refused("nothing was done: the answer was no")
