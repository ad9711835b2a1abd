"""An app as its users come to it: `open`, `ping`, `logs`, and what `apps` says of where it is served."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, Ended, environment, hawker, on_terminal
from tests.kit.markets import Market, free_port, running_market
from tests.kit.processes import PYTHON
from tests.kit.waiting import wait_until

from hawker.cli.services import url_of
from hawker.cli.visiting import phases
from hawker.errors import HawkerError
from hawker.model.api import App, Machine

APP = "visited"
WEB = {"config": {"services": [{"internal_port": 8080, "ports": [{"port": 80, "handlers": ["http"]}]}]}, "id": "m1"}
SECURE = {
    "config": {
        "services": [{"ports": [{"port": 80, "handlers": ["http"]}, {"port": 443, "handlers": ["tls", "http"]}]}]
    }
}
RAW = {"config": {"services": [{"internal_port": 5432, "ports": [{"port": 5432}]}]}, "id": "m2"}


@pytest.mark.parametrize(
    ("urls", "machines", "expected"),
    [
        ({"80": "http://web.apps.example"}, [RAW, WEB], "http://web.apps.example"),
        ({"80": "http://a", "443": "https://a"}, [SECURE], "https://a"),
        ({"80": "http://a"}, [SECURE], "http://a"),
        ({"80": "http://a"}, [], "app web has no machines"),
        ({"80": "http://a"}, [RAW], "no machine of app web has a service that speaks HTTP"),
        ({}, [WEB], "the market does not say where apps are served"),
        ({"443": "https://a"}, [WEB], "app web speaks HTTP on port 80, and the proxy takes users on 443"),
    ],
)
def test_an_app_is_opened_where_a_proxy_takes_users_to_a_service_of_the_web(
    urls: dict[str, str], machines: list[dict[str, Any]], expected: str
) -> None:
    app = cast(App, SimpleNamespace(name="web", urls=urls))
    found = url_of(app, [cast(Machine, SimpleNamespace(**{"id": "m", **machine})) for machine in machines])
    assert (found.message if isinstance(found, HawkerError) else found) == expected


def test_phases_are_told_apart_by_who_spent_them() -> None:
    worker = (
        "worker-obtain;dur=170.2, worker-connect;dur=0.3, worker-wait;dur=170.1, worker-start;dur=20.1, "
        "worker-ready;dur=149.9, worker-first-byte;dur=176.9"
    )
    edge = "edge-obtain;dur=1.1, edge-connect;dur=2, edge-first-byte;dur=181"
    assert phases([worker, edge]) == {"look-up": 1.3, "start": 20.1, "boot": 149.9, "reach": 2.3, "answer": 6.4}
    assert phases(["edge-first-byte;dur=2.5"]) == {"look-up": 0, "start": 0, "boot": 0, "reach": 0, "answer": 2.5}
    assert phases(["edge-first-byte;dur=2", 'db;dur=5.2;desc="x", edge-a;dur=y, edge-b'])["answer"] == 2
    assert phases(["cache;dur=3, app"]) == {}, "what the machine's own program says is its own"


class Site:
    """A market of two regions with an app that has a web server, asleep by its own wish, and another program."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self.env = {"HAWKER_HOME": str(market.home)}
        self("apps", "create", APP)
        port = free_port()
        self.web = self.run(
            *(
                "--region",
                "ord",
                "--port",
                f"80:{port}",
                "--autostop",
                "stop",
                "--check",
                "/",
                "--check-interval",
                "1s",
            ),
            command=("python3", "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1"),
        )

    def __call__(self, *arguments: str, status: int = 0) -> Ended:
        ended = hawker(*arguments, env=self.env)
        assert ended.status == status, (arguments, ended)
        return ended

    def restarts(self, machine: str) -> bool:
        return hawker("machine", "restart", "--force", machine, env=self.env).status == 0

    def run(self, *options: str, command: tuple[str, ...]) -> str:
        program = (PYTHON, *command[1:]) if command[0] == "python3" else command
        ended = self("machine", "run", "--app", APP, "--json", *options, "host", "--", *program)
        machine: str = ended.json()["id"]
        return machine


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    options = ("--region", "ord", "--region", "mad", "--workers", "1", "--http", "0")
    with running_market(tmp_path_factory.mktemp("visiting"), options) as market:
        yield Site(market)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_where_an_app_is_served_is_shown_and_opened(site: Site) -> None:
    url = site("open", "--app", APP).out.strip()
    assert url.startswith(f"http://{APP}.localhost:")
    assert site("open", "--app", APP, "--path", "/a?b=c").out == f"{url}a?b=c\n"
    assert site("apps", "list").out.splitlines()[1].split()[-1] == url.rstrip("/")
    shown = dict(line.split(maxsplit=1) for line in site("apps", "show", APP).out.splitlines())
    assert (shown["app"], shown["machines"], shown["url"]) == (APP, "1 started in ord", url.rstrip("/"))
    assert site("apps", "show", APP, "--json").json()["url"] == url.rstrip("/")
    assert site("open", "--app", "nope", status=3).err == "error: app not found: nope\n  try: hawker apps list\n"
    assert f"no app is called {site.web}" in site("apps", "show", site.web, status=3).err
    opened = on_terminal("open", "--app", APP, env={**site.env, "BROWSER": "echo opened %s"})
    assert f"opened {url}" in opened.out


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ping_wakes_an_app_and_shows_what_that_took(site: Site) -> None:
    site("machine", "stop", site.web)
    pings = [json.loads(line) for line in site("ping", "--app", APP, "-c", "2", "-i", "0", "--json").out.splitlines()]
    assert [ping["status"] for ping in pings] == [200, 200]
    asleep, awake = (ping["phases"] for ping in pings)
    assert list(asleep) == ["connect", "look-up", "start", "boot", "reach", "answer"]
    assert asleep["boot"] > 0
    assert sum(asleep.values()) <= pings[0]["ms"]
    assert (awake["start"], awake["boot"]) == (0, 0)
    shown = site("ping", "--app", APP, "-c", "2", "-i", "0").out.splitlines()
    assert shown[0] == "GET " + site("open", "--app", APP).out.strip()
    assert all(line.startswith("  200 in ") for line in shown[1:3])
    assert shown[3].startswith("2 requests: 2 answered 200; min/avg/max ")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ping_says_what_refuses_it(site: Site) -> None:
    refused = site("ping", "--app", APP, "-c", "1", "--machine", "00000000000000", status=1)
    assert "; PR" in refused.out.splitlines()[1]
    missing = site("ping", "--app", APP, "-c", "1", "--path", "/missing")
    assert missing.out.splitlines()[1].startswith("  404 in "), "the program's own answer is one"


@contextmanager
def following(site: Site, *arguments: str) -> Iterator[list[dict[str, Any]]]:
    """The lines of `hawker logs --follow` as they come."""
    argv = [*PROGRAM, "logs", "--app", APP, "--follow", "--json", *arguments]
    process = subprocess.Popen(
        argv, env=environment(site.env), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: list[dict[str, Any]] = []

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.append(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield lines
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(ENDS_S)
        reader.join()
        assert process.stdout
        process.stdout.close()
        assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_logs_of_all_machines_are_one_stream_by_time(site: Site) -> None:
    counting = "i=0; while [ $i -lt 5 ]; do echo {} $i; i=$((i+1)); sleep 0.03; done; exec sleep 600"
    first = site.run("--region", "mad", command=("sh", "-c", counting.format("a")))
    with following(site) as lines:
        wait_until(lambda: sum(line["machine"] == first for line in lines) == 5, "what was written before")
        second = site.run("--region", "ord", command=("sh", "-c", counting.format("b")))
        wait_until(
            lambda: sum(line["machine"] == second for line in lines) == 5, "what a machine writes that came later"
        )
        site.market.kill("mad-1")  # its stream breaks off, and is taken up again
        # Its worker is away for a moment, its machine is not.
        wait_until(lambda: site.restarts(first), "the worker is back")
        wait_until(lambda: sum(line["machine"] == first for line in lines) == 10, "what it writes after that")
    assert [line["message"] for line in lines if line["machine"] == second] == [f"b {i}" for i in range(5)]
    assert [line["message"] for line in lines if line["machine"] == first] == [f"a {i}" for i in range(5)] * 2
    told = [json.loads(line) for line in site("logs", "--app", APP, "--json").out.splitlines()]
    assert [line["timestamp"] for line in told] == sorted(line["timestamp"] for line in told)
    said = [(line["region"], line["message"]) for line in told if line["machine"] in (first, second)]
    a, b = [("mad", f"a {i}") for i in range(5)], [("ord", f"b {i}") for i in range(5)]
    assert said == a + b + a
    assert len(site("logs", "--app", APP, "--tail", "3").out.splitlines()) == 3
    only = site("logs", "--app", APP, "--region", "mad").out
    assert f" mad {first}   a 4\n" in only
    assert second not in only
    assert "\x1b[" not in only
    assert "\x1b[" in on_terminal("logs", "--app", APP, env=site.env).out
    assert "has no machines in syd" in site("logs", "--app", APP, "--region", "syd", status=3).err
    for machine in (first, second):
        site("machine", "destroy", "--force", machine)
