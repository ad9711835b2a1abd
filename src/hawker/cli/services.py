"""The options that say how a machine is reached: its ports, what a proxy does with them, and their checks.

What is right and wrong in them is the market's to say, but for the form of `--port`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hawker.cli.params import together
from hawker.cli.session import Object
from hawker.errors import HawkerError, Invalid, NotFound, Refused

if TYPE_CHECKING:
    from hawker.model.api import App, Machine

HANDLERS = ("http", "tls", "pg_tls", "proxy_proto")  # those of `model/services.py`, not imported for help
USUAL = {80: ["http"], 443: ["tls", "http"]}
"""What a port is that names no handler: browsers come here. Any other takes bytes as they are."""
PREFERRED = (443, 80)
_WANT = "write 8080, 80:8080, 443:8080/tcp:tls:http or 53/udp"


service_options = together(
    click.option(
        "--port",
        "ports",
        multiple=True,
        metavar="PORT[:INSIDE][/PROTOCOL[:HANDLER...]]",
        help="A port that users connect to, and the one INSIDE where the program listens, by default the same. "
        f"Handlers: {', '.join(HANDLERS)}; for 80 and 443 those of the web by themselves. Repeatable.",
    ),
    click.option(
        "--autostart/--no-autostart",
        default=None,
        help="Whether a request starts it when it is stopped or suspended. It does by default.",
    ),
    click.option(
        "--autostop",
        type=click.Choice(["off", "stop", "suspend"]),
        help="What the proxy does with it when it has served no request for a while. Default: off.",
    ),
    click.option(
        "--min-running", type=click.IntRange(min=0), metavar="COUNT", help="Machines that keep running in a region."
    ),
    click.option(
        "--concurrency",
        type=click.Choice(["connections", "requests"]),
        help="What the limits count. Default: connections.",
    ),
    click.option(
        "--soft-limit",
        type=click.IntRange(min=1),
        metavar="COUNT",
        help="Beyond this the proxy prefers other machines, or starts one. Default: 20.",
    ),
    click.option(
        "--hard-limit",
        type=click.IntRange(min=1),
        metavar="COUNT",
        help="The proxy sends it no more than this at once. Default: none.",
    ),
    click.option(
        "--check",
        "checks",
        multiple=True,
        metavar="PATH|tcp",
        help="It gets requests only while GET PATH gives 2xx, or while its port takes connections. Repeatable.",
    ),
    click.option("--check-interval", metavar="DURATION", help="Time from one check to the next. Default: 15s."),
    click.option("--check-timeout", metavar="DURATION", help="Time for one check. Default: 2s."),
    click.option("--check-grace", metavar="DURATION", help="Time after a start in which failures do not count."),
)


def add_services(config: Object, given: dict[str, Any]) -> None:
    """Put into `config` what the options say. They hold for the ports that are given with them; without any, for those
    that `config` has. Raises `Invalid`, and `click.UsageError` when there are none."""
    services: list[Object] = list(config.get("services") or [])
    fresh: list[Object] = []
    for text in given["ports"]:
        service = service_of(text)
        inside = (service["protocol"], service["internal_port"])
        same = [each for each in fresh if (each["protocol"], each["internal_port"]) == inside]
        if same:
            same[0]["ports"] += service["ports"]
        else:
            fresh.append(service)
    about = _about(given)
    checks = _checks(given)
    changed = [*services, *fresh]
    for number, service in enumerate(changed):
        if fresh and number < len(services):
            continue
        concurrency = {**(service.get("concurrency") or {}), **about.get("concurrency", {})}
        changed[number] = {**service, **about, **({"concurrency": concurrency} if concurrency else {})}
        if checks:
            changed[number]["checks"] = checks
    if (about or checks) and not changed:
        raise click.UsageError(
            "these options are about the ports of a machine, and it has none: give --port 80:8080, too"
        )
    if changed:
        config["services"] = changed


def only_given(**options: Any) -> Object:
    """The options that the command line has a value for."""
    return {name: value for name, value in options.items() if value is not None}


def _about(given: dict[str, Any]) -> Object:
    limits = only_given(type=given["concurrency"], soft_limit=given["soft_limit"], hard_limit=given["hard_limit"])
    return only_given(
        autostart=given["autostart"],
        autostop=given["autostop"],
        min_machines_running=given["min_running"],
        concurrency=limits or None,
    )


def _checks(given: dict[str, Any]) -> list[Object]:
    times = only_given(
        interval=given["check_interval"], timeout=given["check_timeout"], grace_period=given["check_grace"]
    )
    if times and not given["checks"]:
        raise click.UsageError(
            "--check-interval, --check-timeout and --check-grace are of checks: give --check / or --check tcp, too"
        )
    checks = []
    for text in given["checks"]:
        if text == "tcp":
            checks.append({"type": "tcp", **times})
        elif text.startswith("/"):
            checks.append({"type": "http", "path": text, **times})
        else:
            raise Invalid("--check", text, "write the path of a GET such as /health, or tcp")
    return checks


def service_of(text: str) -> Object:
    """A service from `PORT[:INSIDE][/PROTOCOL[:HANDLER...]]`. Raises `Invalid`."""
    numbers, _, how = text.partition("/")
    outside, _, inside = numbers.partition(":")
    protocol, *handlers = how.split(":")
    inside, protocol = inside or outside, protocol or "tcp"
    if not (outside.isdecimal() and inside.isdecimal()) or protocol not in ("tcp", "udp"):
        raise Invalid("--port", text, _WANT)
    if wrong := [name for name in handlers if name not in HANDLERS]:
        raise Invalid("--port", text, f"{wrong[0] or 'nothing'} is no handler; there are {', '.join(HANDLERS)}")
    port: Object = {"port": int(outside)}
    if not how and int(outside) in USUAL:
        handlers = USUAL[int(outside)]
    if handlers:
        port["handlers"] = handlers
    return {"protocol": protocol, "internal_port": int(inside), "ports": [port]}


def service_text(service: Object) -> str:
    """A service as people read it."""
    ports = []
    for port in service.get("ports") or []:
        number = port.get("port") or f"{port.get('start_port')}-{port.get('end_port')}"
        handlers = "+".join(port.get("handlers") or [])
        ports.append(f"{number} {handlers}".strip())
    limits = service.get("concurrency") or {}
    told = [f"{', '.join(ports) or 'no port'} to {service['internal_port']}/{service.get('protocol') or 'tcp'}"]
    told += [f"autostop {service['autostop']}"] if service.get("autostop") not in (None, "", "off", False) else []
    told += ["no autostart"] if service.get("autostart") is False else []
    told += [f"{service['min_machines_running']} stay"] if service.get("min_machines_running") else []
    told += [f"{name} limit {limits[f'{name}_limit']}" for name in ("soft", "hard") if limits.get(f"{name}_limit")]
    return "; ".join(told)


def http_ports(machines: Sequence[Machine]) -> dict[int, bool]:
    """The public ports at which machines speak HTTP, and whether by TLS; the first of ranges."""
    found: dict[int, bool] = {}
    for machine in machines:
        for service in machine.config.get("services") or []:
            for port in service.get("ports") or []:
                handlers = port.get("handlers") or []
                number = port.get("port") or port.get("start_port")
                if "http" in handlers and number:
                    found[number] = "tls" in handlers
    return found


def url_of(app: App, machines: Sequence[Machine]) -> str | HawkerError:
    """Where an app is served, or why that cannot be told."""
    name, urls = app.name, app.urls
    if not machines:
        return NotFound(f"app {name} has no machines", hint=f"hawker machine run --app {name} --port 80:8080 ...")
    speaking = http_ports(machines)
    if not speaking:
        return Refused(
            f"no machine of app {name} has a service that speaks HTTP",
            hint=f"hawker machine update {machines[0].id} --port 80:8080\n"
            f"hawker proxy 8080 --app {name} leads to any port without one",
        )
    if not urls:
        return Refused(
            "the market does not say where apps are served", hint="whoever runs the broker sets [broker] urls"
        )
    for port in [*(port for port in PREFERRED if port in speaking), *sorted(speaking)]:
        if url := urls.get(str(port)):
            return str(url)
    ports, taken = ", ".join(map(str, sorted(speaking))), ", ".join(urls)
    return Refused(f"app {name} speaks HTTP on port {ports}, and the proxy takes users on {taken}")
