"""`hawker open` and `hawker ping`: an app as its users come to it, through the proxy."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import click

from hawker.cli import calls, output
from hawker.cli.params import app_option
from hawker.cli.services import url_of
from hawker.cli.session import Object, Session, about_app, market_command
from hawker.errors import HawkerError, Invalid

PINGS = 5
ANSWER_S = 75.0
"""A request may be held for a minute while a machine starts."""
BODY_MOST = 64 << 20


def _url(session: Session, app: str, path: str) -> str:
    if not path.startswith("/"):
        raise Invalid("--path", path, "begin it with a slash")
    with about_app():
        found = url_of(session.send(calls.ShowApp(app)), session.machines(app)[0])
    if isinstance(found, HawkerError):
        raise found
    return found.rstrip("/") + path


@click.command("open")
@app_option("The app.", required=True)
@click.option("--path", default="/", show_default=True, metavar="PATH", help="The path to open.")
@click.option("--print", "only_print", is_flag=True, help="Do not open a browser.")
@market_command
def open_(session: Session, app: str, path: str, only_print: bool) -> None:
    """Print where an app is served, and open it in the browser if there is one."""
    url = _url(session, app, path)
    session.tell({"url": url}, url)
    if not only_print and not session.json and sys.stdout.isatty() and _has_display():
        click.launch(url)


def _has_display() -> bool:
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


# --- ping ------------------------------------------------------------------------------------------------------------


@click.command()
@app_option("The app.", required=True)
@click.option(
    "-c", "--count", type=click.IntRange(min=0), default=PINGS, show_default=True, help="Requests; 0: until Ctrl-C."
)
@click.option(
    "-i",
    "--interval",
    type=click.FloatRange(0.0, 86400.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one request to the next.",
)
@click.option("--path", default="/", show_default=True, metavar="PATH", help="The path to request.")
@click.option("--machine", metavar="ID", help="Send the requests to this machine only.")
@market_command
def ping(session: Session, app: str, count: int, interval: float, path: str, machine: str | None) -> None:
    """Send requests to an app, and show where their time goes.

    Each is a GET on a connection of its own. connect: until the proxy took it; look-up: until the proxy had chosen a
    machine; start: until a machine that slept ran; boot: until its program listened and its checks passed; reach:
    until the request was there; answer: until the program's first byte. These requests wake apps as any others do.
    """
    url = _url(session, app, path)
    headers = {"fly-force-instance-id": machine} if machine else {}
    if not session.json:
        output.say(f"GET {url}")
    answers: list[Object] = []
    try:
        for number in _paced(count, interval):
            answer = ask(url, headers)
            answers.append(answer)
            if session.json:
                output.line({"number": number, **answer})
            else:
                output.say(_line(answer))
            sys.stdout.flush()
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            output.say("")  # the terminal shows ^C at the beginning of the line
        raise
    finally:
        if answers and not session.json:
            output.say(_summary(answers))
    if not any(answer["status"] and not answer["refused"] for answer in answers):
        click.get_current_context().exit(1)


def _paced(count: int, interval: float) -> Iterator[int]:
    number = 0
    began = time.monotonic()
    while True:
        number += 1
        yield number
        if number == count:
            return
        began = max(began + interval, time.monotonic() - interval)
        time.sleep(max(0.0, began - time.monotonic()))


def ask(url: str, headers: Mapping[str, str]) -> Object:
    """One GET: `status` (0 without an answer, then `error` says why), `ms` up to its last byte, `phases` in ms,
    `refused` what the proxy itself said."""
    from http.client import HTTPConnection, HTTPException

    began = time.perf_counter()
    try:
        sock, host = _connected(url)
    except OSError as error:
        return {"status": 0, "ms": _ms(began), "phases": {}, "refused": "", "error": error.strerror or str(error)}
    connect_ms = _ms(began)
    connection = HTTPConnection(host, timeout=ANSWER_S)
    connection.sock = sock
    try:
        target = url.split("://", 1)[1].partition("/")[2]
        fields = {"user-agent": "hawker-ping", "hawker-timing": "1", "connection": "close", **headers}
        connection.request("GET", f"/{target}", headers=fields)
        answer = connection.getresponse()
        body = answer.read(BODY_MOST)
    except (OSError, HTTPException) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return {"status": 0, "ms": _ms(began), "phases": {"connect": connect_ms}, "refused": "", "error": why}
    finally:
        connection.close()
    own = answer.getheader("proxy-status", "").startswith("hawker")
    return {
        "status": answer.status,
        "ms": _ms(began),
        "phases": {"connect": connect_ms, **phases(answer.headers.get_all("server-timing") or [])},
        "refused": body[:200].decode(errors="replace").strip() if own else "",
        "error": "",
    }


def _connected(url: str) -> tuple[Any, str]:
    """A connection to the URL's host, and what the request calls it. Raises `OSError`."""
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    local = host == "localhost" or host.endswith(".localhost")  # RFC 6761, as browsers and curl have it
    address = ("127.0.0.1" if local else host, parts.port or (443 if secure else 80))
    sock: socket.socket = socket.create_connection(address, timeout=ANSWER_S)
    if secure:
        import ssl

        try:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
    return sock, parts.netloc


def phases(fields: list[str]) -> dict[str, float]:
    """Milliseconds by phase, from what the proxy at the edge and that of the machine's worker say (`server-timing`).
    They may be one: then the edge's are all."""
    told: dict[str, float] = {}
    for part in ",".join(fields).split(","):
        name, _, ms = part.strip().partition(";dur=")
        if name.startswith(("edge-", "worker-")):
            with suppress(ValueError):  # the machine's program has fields of its own, in any form
                told[name] = float(ms)
    at = "worker" if any(name.startswith("worker-") for name in told) else "edge"

    def of(where: str, name: str) -> float:
        return told.get(f"{where}-{name}", 0.0)

    if f"{at}-first-byte" not in told:
        return {}
    obtain, start, boot = of(at, "obtain"), of(at, "start"), of(at, "ready")
    connect = of(at, "connect")
    found = {
        "look-up": max(0.0, obtain - start - boot),
        "start": start,
        "boot": boot,
        "reach": connect,
        "answer": max(0.0, of(at, "first-byte") - obtain - connect),
    }
    if at == "worker":
        found["look-up"] += of("edge", "obtain")
        found["reach"] += of("edge", "connect")
    return {name: round(ms, 3) for name, ms in found.items()}


def _line(answer: Object) -> str:
    if not answer["status"]:
        return f"  no answer after {answer['ms']:.1f} ms: {answer['error']}"
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in answer["phases"].items() if ms >= 0.05)
    refused = f"; {answer['refused']}" if answer["refused"] else ""
    return f"  {answer['status']} in {answer['ms']:.1f} ms: {told}{refused}"


def _summary(answers: list[Object]) -> str:
    from collections import Counter

    times = [answer["ms"] for answer in answers if answer["status"]]
    count = f"{len(answers)} request" + ("s" if len(answers) > 1 else "")
    if not times:
        return f"{count}, no answer"
    statuses = Counter(answer["status"] for answer in answers if answer["status"])
    told = ", ".join(f"{n} answered {status}" for status, n in statuses.items())
    silent = len(answers) - len(times)
    lost = f", {silent} without an answer" if silent else ""
    return f"{count}: {told}{lost}; min/avg/max {min(times):.1f}/{sum(times) / len(times):.1f}/{max(times):.1f} ms"


def _ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 3)
