"""`hawker machine run`, `create`, `update`, `clone`: orders, and the configurations they carry.

Options become the configuration that the API takes; everything else of a configuration is given as JSON with --config.
What is right and wrong in it is the market's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from hawker.cli import calls, output
from hawker.cli.attached import attend
from hawker.cli.params import app_option, machine_argument, pairs, region_option, together
from hawker.cli.services import add_services, http_ports, only_given, service_options, url_of
from hawker.cli.session import (
    LONGEST_STOP_S,
    Object,
    Session,
    app_of,
    as_object,
    failure_of,
    label,
    machine_command,
    market_command,
)
from hawker.errors import DeadlineExceeded, HawkerError, Invalid

if TYPE_CHECKING:
    from hawker.model.api import Machine
    from hawker.model.services import Port

HOST_IMAGE = "host"
IMAGE_S = 86400.0
"""Longer than any worker waits for an image: what has become of it then is for the worker to say."""


config_options = together(
    service_options,
    click.option("--guest", metavar="SIZE", help="A named size, such as shared-cpu-1x or performance-2x."),
    click.option("--cpus", type=int, metavar="COUNT", help="The number of cpus."),
    click.option("--memory", type=int, metavar="MIB", help="MiB of memory; by default the least for its cpus."),
    click.option(
        "--cpu-kind", type=click.Choice(["shared", "performance"]), help="Whether its cpus are shared or its own."
    ),
    click.option("-e", "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable; repeatable."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="A note on the machine; repeatable."),
    click.option("--restart", type=click.Choice(["no", "on-failure", "always"]), help="When to start it again."),
    click.option("--max-retries", type=int, metavar="COUNT", help="How often it is restarted after failures."),
    click.option(
        "--runtime",
        metavar="NAME",
        help="What runs it: process, container or microvm. By default a container, or a process for host.",
    ),
    click.option(
        "--file-local",
        "files",
        multiple=True,
        metavar="LOCAL:PATH",
        help="Put a file of this host at a path inside the machine. Repeatable.",
    ),
    click.option("--user", metavar="USER[:GROUP]", help="Run as this user of the image, by name or number."),
    click.option("--rootfs-persist", is_flag=True, help="Keep what it writes to its root over stops."),
    click.option("--tty", is_flag=True, help="Give the program a terminal."),
    click.option(
        "--config",
        type=click.File("rb"),
        metavar="FILE",
        help="A configuration as JSON, - for standard input; the other options change it.",
    ),
)
"""The options that make a configuration; `configure` reads them."""


waiting_options = together(
    click.option(
        "--timeout",
        "image_timeout",
        type=click.IntRange(1, 86400),
        metavar="SECONDS",
        help="How long it may wait for its image; by default what its worker is configured for, or 300.",
    ),
    click.option("--detach", is_flag=True, help="Do not wait for it."),
)
"""How long an image may take, and whether somebody waits."""


def configure(base: Object, command: tuple[str, ...], given: dict[str, Any]) -> Object:
    """`base` with what the options say. Raises `Invalid` and `Refused`."""
    from hawker.model.guest import preset

    config = {**base, **_read(given["config"])} if given["config"] else dict(base)
    size = only_given(cpus=given["cpus"], memory_mb=given["memory"], cpu_kind=given["cpu_kind"])
    if given["guest"]:
        named = preset(given["guest"])
        config["guest"] = {"cpu_kind": named.cpu_kind, "cpus": named.cpus, "memory_mb": named.memory_mb, **size}
    elif size:
        kept = config.get("guest") or {}
        if "memory_mb" not in size and size.keys() & {"cpus", "cpu_kind"}:
            kept = {name: value for name, value in kept.items() if name != "memory_mb"}  # it goes by the cpus again
        config["guest"] = {**kept, **size}
    for field in ("env", "metadata"):
        if given[field]:
            config[field] = {**(config.get(field) or {}), **pairs(f"--{field}", given[field])}
    if restart := only_given(policy=given["restart"], max_retries=given["max_retries"]):
        config["restart"] = {**(config.get("restart") or {}), **restart}
    if given["runtime"]:
        config["runtime"] = given["runtime"]
    add_services(config, given)
    if given["files"]:
        new = [_file(text) for text in given["files"]]
        paths = {file["guest_path"] for file in new}
        config["files"] = [*(f for f in config.get("files") or [] if f.get("guest_path") not in paths), *new]
    if given["user"]:
        process, *more = config.get("processes") or [{}]
        config["processes"] = [{**process, "user": given["user"]}, *more]
    if given["rootfs_persist"]:
        config["rootfs"] = {**(config.get("rootfs") or {}), "persist": "always"}
    if given["tty"]:
        config["init"] = {**(config.get("init") or {}), "tty": True}
    if command:
        init = {k: v for k, v in (config.get("init") or {}).items() if k not in ("exec", "entrypoint", "cmd")}
        config["init"] = {**init, "exec": list(command)}
    return config


def _file(text: str) -> Object:
    import base64
    from pathlib import Path

    local, _, path = text.rpartition(":")
    if not local or not path.startswith("/"):
        raise Invalid("--file-local", text, "write LOCAL:PATH with an absolute path, such as app.conf:/etc/app.conf")
    file = Path(local)
    content = file.read_bytes()  # an OSError names the file
    return {"guest_path": path, "raw_value": base64.b64encode(content).decode(), "mode": file.stat().st_mode & 0o777}


def _read(file: Any) -> Object:
    import msgspec

    try:
        return msgspec.json.decode(file.read(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid("--config", file.name, f"give a JSON object: {error}") from None
    except RecursionError:
        raise Invalid("--config", file.name, "give a JSON object that nests less deep") from None


_ORDER_TEXT = """

    IMAGE is an OCI image such as nginx:1.27, or host: the host's own programs. Put -- before the command, so that its
    options stay its own; without one the image's own runs. Without a size the machine has 1 shared cpu and 256 MiB.
"""


order_options = together(
    click.argument("image"),
    click.argument("command", nargs=-1),
    app_option("The app it belongs to.", required=True),
    region_option("Where: a code, several with commas, or any, the default."),
    click.option("--name", help="Its name; by default the market makes one up."),
    config_options,
    click.option(
        "--rm", "auto_destroy", is_flag=True, help="Show its output, and destroy it when its program has ended."
    ),
    click.option("--key", metavar="KEY", help="The same key again gives the same machine."),
    click.option("--replaces", metavar="ID", help="A machine whose worker does not answer: the new one takes its id."),
)
"""What `run` and `create` share."""


@click.command(help="Order a machine and wait until its program runs." + _ORDER_TEXT)
@order_options
@click.option("--skip-launch", is_flag=True, help="Do not start it.")
@waiting_options
@market_command
def run(session: Session, /, skip_launch: bool, detach: bool, **given: Any) -> None:
    _order(session, given, skip_launch=skip_launch, detach=detach)


@click.command(help="Order a machine without starting it." + _ORDER_TEXT)
@order_options
@market_command
def create(session: Session, /, **given: Any) -> None:
    _order(session, given, skip_launch=True)


def _order(session: Session, given: dict[str, Any], *, skip_launch: bool, detach: bool = False) -> None:
    config = configure({}, given["command"], given)
    config["image"] = given["image"]
    if given["auto_destroy"]:
        config["auto_destroy"] = True
        config.setdefault("restart", {"policy": "no"})  # it goes when it has ended, however it did
    order = calls.CreateMachine(
        given["app"],
        config=config,
        name=given["name"],
        region=given["region"],
        skip_launch=skip_launch,
        replaces=given["replaces"],
        image_timeout=given.get("image_timeout"),
        key=given["key"] or "",
    )
    attached = given["auto_destroy"] and not (skip_launch or detach or session.json)
    _place(session, order, detach=detach, attached=attached)


def _place(session: Session, order: calls.CreateMachine, *, detach: bool = False, attached: bool = False) -> None:
    """Order, and show what came of it; `attached`: show its program's output instead, and end as the program does."""
    from msgspec.structs import replace

    where = order.region or "any region"
    launch = not order.skip_launch
    with output.working(f"ordering a machine in {where}"), _own_words():
        # An image may take longer to come than a call does to be answered.
        fetches = order.config.get("image") != HOST_IMAGE
        machine = session.send(replace(order, wait=launch and not fetches and not detach))
    header = session.client.answer_headers.get("server-timing", "")
    image = machine.config.get("image", HOST_IMAGE)
    if launch and fetches and not detach:
        ends = ["started", "stopped", "failed", "destroyed"]
        machine = session.wait(machine, ends, IMAGE_S, "getting its image", lambda: _meant(session, image))
    timings = _timings(header)
    if launch and machine.state == "failed" and timings and (why := failure_of(machine)).startswith("image "):
        # Its program never began, so nobody misses it.
        session.send(calls.DestroyMachine(app_of(machine), machine.id, force=True))
        raise _without_image(session, image, f"nothing was ordered: {why}")
    if session.json:
        output.data({**as_object(machine), "timings_ms": timings})
    elif attached and machine.state != "failed" and timings:
        attend(session, machine)
    else:
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in timings.items())
        output.fields(
            [
                ("machine", machine.id),
                ("name", machine.name),
                ("region", machine.region),
                ("worker", machine.hawker.worker),
                ("state", machine.state),
                *[("port", port_text(port)) for port in machine.hawker.ports],
                *([("url", url)] if (url := _url(session, order.app_name, machine)) else []),
                ("times", times or "none: an order with this key was filled before, and this is its machine"),
            ]
        )
    if machine.state == "destroyed" and not timings:
        raise HawkerError(
            f"{label(machine)} was ordered with this key and is destroyed",
            hint="give another --key to order a new one",
        )
    if launch and machine.state == "failed":
        why = failure_of(machine)
        hints = [f"hawker machine update {machine.id} -- COMMAND", f"hawker machine destroy {machine.id}"]
        if image != HOST_IMAGE:
            hints.insert(0, f"hawker image pull {image} tells at once whether workers get it")
        raise HawkerError(f"{label(machine)} did not start{why and ': ' + why}", hint="\n".join(hints))


def _meant(session: Session, image: str) -> str:
    """A sentence about the images that workers have, where the one that is wanted is misspelled, or of another day."""
    from hawker.core.similar import similar_images

    with suppress(HawkerError):  # it only helps
        found = similar_images(image, (name for each in session.send(calls.ListImages()) for name in each.names))
        if found:
            return f"no worker has {image}; there {'are' if len(found) > 1 else 'is'} {', '.join(found)}"
    return ""


def _without_image(session: Session, image: str, sentence: str) -> HawkerError:
    from hawker.model.image import NOT_IN_TIME

    meant = _meant(session, image) if image != HOST_IMAGE else ""
    hint = f"hawker image pull {image} tells at once whether workers get it" if image != HOST_IMAGE else ""
    kind = DeadlineExceeded if f": {NOT_IN_TIME} " in sentence else HawkerError
    return kind(f"{sentence}; {meant}" if meant else sentence, hint=hint)


def _url(session: Session, app: str, machine: Machine) -> str:
    """Where users come to it, "" when nowhere."""
    if not http_ports([machine]):
        return ""
    with suppress(HawkerError):  # it is ordered, whatever becomes of this question
        found = url_of(session.send(calls.ShowApp(app)), [machine])
        return found if isinstance(found, str) else ""
    return ""


@contextmanager
def _own_words() -> Iterator[None]:
    """Tells in the command line's terms where a program belongs: the API's name fields of its JSON."""
    try:
        yield
    except HawkerError as error:
        told = error.details if isinstance(error.details, dict) else {}
        if told.get("field") == "config.init.exec" and told.get("value") in ([], [""]):
            command = click.get_current_context().command
            error.message = "the image host has no program of its own: put the command after --"
            error.hint = f"hawker machine {command.name} ... -- COMMAND"
        raise


def port_text(port: Port) -> str:
    """A published port, as people read it."""
    return f"{port.internal_port}/{port.protocol} is port {port.host_port} of its worker's host"


def _timings(header: str) -> dict[str, float]:
    """Milliseconds by phase, from a `server-timing` header."""
    phases = (part.strip().partition(";dur=") for part in header.split(",") if part.strip())
    return {name: float(ms) for name, _, ms in phases}


@click.command()
@machine_argument
@click.argument("command", nargs=-1)
@click.option("--image", help="Another image.")
@config_options
@click.option("--skip-launch", is_flag=True, help="Leave a running machine stopped.")
@waiting_options
@market_command
def update(
    session: Session,
    /,
    machine: str,
    app: str | None,
    command: tuple[str, ...],
    image: str | None,
    skip_launch: bool,
    image_timeout: int | None,
    detach: bool,
    **given: Any,
) -> None:
    """Change a machine's configuration; a running one is restarted with it.

    Options add to what it has; --config replaces it all. Put -- before a new command.
    """
    if not (command or image or any(value not in (None, ()) and value is not False for value in given.values())):
        raise click.UsageError(
            "nothing to change: give an option, or a command after --; hawker machine restart only restarts it"
        )
    found = session.machine(machine, app)
    config = configure({} if given["config"] else found.config, command, given)
    if image:
        config["image"] = image
    change = calls.UpdateMachine(
        app_of(found),
        found.id,
        config=config,
        current_version=found.version,
        skip_launch=skip_launch,
        image_timeout=image_timeout,
    )
    with _own_words():
        taken = session.send(change)
    if detach:
        session.show(taken, f"is being updated to version {taken.version}")
        return
    wanted = config.get("image", HOST_IMAGE)
    longest_s = LONGEST_STOP_S + IMAGE_S if wanted != HOST_IMAGE else LONGEST_STOP_S
    ends = ["started", "stopped", "failed"]
    after = session.wait(found, ends, longest_s, "updating", lambda: _meant(session, wanted))
    if after.version != taken.version:
        raise _without_image(session, wanted, f"{label(after)} runs on as it was: {failure_of(after)}")
    if after.state == "failed" and found.state != "failed":
        raise HawkerError(f"{label(after)} has its new configuration and did not start: {failure_of(after)}")
    session.show(after, f"has version {after.version} and is {after.state}")


@click.command()
@machine_argument
@region_option("Where; the same region without.")
@click.option("--name", help="The name of the new machine; by default the market makes one up.")
@click.option("--to-app", metavar="APP", help="The app of the new machine; by default the same.")
@click.option("--skip-launch", is_flag=True, help="Do not start it.")
@waiting_options
@machine_command
def clone(
    session: Session,
    /,
    found: Machine,
    region: str | None,
    name: str | None,
    to_app: str | None,
    skip_launch: bool,
    image_timeout: int | None,
    detach: bool,
) -> None:
    """Order another machine with a machine's configuration."""
    order = calls.CreateMachine(
        to_app or app_of(found),
        config=found.config,
        name=name or None,
        region=region or found.region,
        skip_launch=skip_launch,
        image_timeout=image_timeout,
    )
    _place(session, order, detach=detach)
