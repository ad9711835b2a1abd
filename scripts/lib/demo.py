"""The demonstration behind `scripts/demo`: a real market on this machine, shown with the `hawker` command and the API.

Every step checks what it shows; the first thing that is not as told ends the demonstration with status 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REGIONS = ("ord", "mad", "syd")
UP_S = 60.0
ORDERS_TIMED = 30


class Api:
    """The market's HTTP API, as any program would use it."""

    def __init__(self, endpoint: str, token: str) -> None:
        self._address = endpoint.removeprefix("http://")
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._connection = http.client.HTTPConnection(self._address, timeout=60)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any, float]:
        """Status, decoded answer and milliseconds."""
        raw = None if body is None else json.dumps(body)
        began = time.perf_counter()
        self._connection.request(method, f"/v1{path}", body=raw, headers=self._headers)
        reply = self._connection.getresponse()
        data = reply.read()
        return reply.status, json.loads(data) if data else None, (time.perf_counter() - began) * 1000

    def another(self) -> Api:
        """One more connection, for another thread."""
        copy = Api(f"http://{self._address}", "")
        copy._headers = self._headers
        return copy


class Demo:
    """The steps, in order."""

    def __init__(self, home: Path, market: subprocess.Popen[bytes]) -> None:
        self._home = home
        self._market = market
        self._times: list[tuple[str, float, str]] = []
        client = json.loads((home / "client.json").read_text())
        self._endpoint: str = client["endpoint"]
        self._api = Api(client["endpoint"], client["token"])
        self._served: dict[str, tuple[str, str, str]] = {}  # machine, URL and how it rests, by app

    def run(self) -> None:
        self._say("The market: three regions, two workers each, every agent a process of its own")
        self._hawker("workers")
        self._say("An app, and a web server of it in each region")
        self._hawker("apps", "create", "hello")
        servers = {region: self._start_server(region) for region in REGIONS}
        self._hawker("machine", "list", "--app", "hello")
        self._say("How the one in ord was placed: every offer, every term of its score")
        self._hawker("explain", servers["ord"]["id"])
        self._catalog()
        self._refuse()
        self._measure()
        self._serve_and_sleep()
        self._kill_a_daemon(servers)
        self._print_times()

    def _start_server(self, region: str) -> dict[str, Any]:
        port = free_port()
        program = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        self._hawker(
            "machine", "run", "--app", "hello", "--region", region, "--name", f"web-{region}", "host", "--", *program
        )
        _, machines, _ = self._api.call("GET", f"/apps/hello/machines?region={region}")
        check(len(machines) == 1 and machines[0]["state"] == "started", f"one machine runs in {region}")
        url = f"http://127.0.0.1:{port}/"
        until(lambda: fetch(url) == 200, 20, f"the server in {region} answers")
        print(f"  GET {url} -> 200, from {machines[0]['hawker']['worker']}\n")
        return {"id": machines[0]["id"], "url": url, "pid": self._pid(machines[0]["id"])}

    def _catalog(self) -> None:
        self._say("The catalog: what one agent knows of all the others, without asking them")
        regions = "select region from app_regions"
        until(lambda: len(self._sql(regions)) == len(REGIONS), 20, "the broker knows where the app is")
        self._hawker("members")
        self._hawker("sql", "select app, region, workers from app_regions order by region")
        order = {"region": "ord", "config": {"image": "host", "init": {"exec": ["sleep", "600"]}}}
        _, machine, _ = self._api.call("POST", "/apps/hello/machines?wait=true", order)
        began = time.perf_counter()
        until(
            lambda: bool(self._sql(f"select 1 from machines where id = '{machine['id']}'")), 20, "the broker knows it"
        )
        self._time("filled, then in the catalog", (time.perf_counter() - began) * 1000, "at the broker, over the API")
        self._api.call("DELETE", f"/apps/hello/machines/{machine['id']}?force=true")

    def _sql(self, query: str) -> list[Any]:
        _, answer, _ = self._api.call("POST", "/hawker/sql", {"query": query})
        rows: list[Any] = answer["rows"]
        return rows

    def _refuse(self) -> None:
        self._say("Something impossible: refused at once, with a reason from every worker; nothing waits")
        self._hawker(
            *("machine", "run", "--app", "hello", "--region", "syd", "--cpu-kind", "performance", "--cpus", "64"),
            *("--memory", "131072", "host", "--", "sleep", "1"),
            expect=4,
        )

    def _measure(self) -> None:
        self._say(f"{ORDERS_TIMED} orders, one after the other")
        placed, running, refused = [], [], []
        config = {"image": "host", "init": {"exec": ["sleep", "600"]}, "restart": {"policy": "no"}}
        huge = {**config, "guest": {"cpu_kind": "performance", "cpus": 64, "memory_mb": 131072}}
        for _ in range(ORDERS_TIMED):
            for times, query, order in (
                (placed, "", {"region": "mad", "skip_launch": True, "config": config}),
                (running, "?wait=true", {"region": "mad", "config": config}),
            ):
                status, machine, ms = self._api.call("POST", f"/apps/hello/machines{query}", order)
                check(status == 200, f"an order is filled: {machine}")
                times.append(ms)
                self._api.call("DELETE", f"/apps/hello/machines/{machine['id']}?force=true")
            status, answer, ms = self._api.call("POST", "/apps/hello/machines", {"region": "mad", "config": huge})
            check(status == 409 and answer["status"] == "insufficient_capacity", "an impossible order is refused")
            refused.append(ms)
        self._time("order to durable place", statistics.median(placed), f"median of {ORDERS_TIMED}")
        self._time("order to running program", statistics.median(running), f"median of {ORDERS_TIMED}")
        self._time("refusal of the impossible", statistics.median(refused), f"median of {ORDERS_TIMED}")

    def _serve_and_sleep(self) -> None:
        self._say("Behind the proxy: an app has a name that users come to, wherever its machines are")
        port = free_port()
        program = [sys.executable, "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        self._serve("process", "stop", "--port", f"80:{port}", "host", "--", *program)
        self._isolate()
        self._sleep()

    def _isolate(self) -> None:
        """The same as a container and as a microVM, from an image that is made here: where the host can."""
        found = json.loads(self._output("doctor", "--json"))
        works = {f["what"].removeprefix("driver "): f for f in found if f["what"].startswith("driver ")}
        lacks = {name: works[name]["remedy"] for name in ("container", "microvm") if works[name]["state"] == "missing"}
        network = next(f for f in found if f["what"] == "network")
        busybox = shutil.which("busybox")
        if "container" in lacks or busybox is None:
            print(f"\n  no containers here: {lacks.get('container') or 'the demonstration packs busybox, not there'}")
            return
        own = "files and processes" if network["state"] == "missing" else "files, processes, network, limits"
        self._say(f"An image made of a directory, and a container of it: its own {own}")
        root = self._home / "site"
        (root / "bin").mkdir(parents=True)
        shutil.copy(busybox, root / "bin" / "busybox")
        for applet in ("sh", "httpd", "ps", "uname"):
            (root / "bin" / applet).symlink_to("busybox")
        (root / "www").mkdir()
        (root / "www" / "index.html").write_text("hello\n")
        serve = [f"--cmd={word}" for word in ("httpd", "-f", "-p", "8080", "-h", "/www")]
        self._hawker("image", "build-from", "--region", "mad", str(root), "site:1", *serve)
        for runtime, rest in (("container", "stop"), ("microvm", "suspend")):
            if why := lacks.get(runtime):
                print(f"  no {runtime} here: {why}\n")
                continue
            began = time.perf_counter()
            if network["state"] == "missing":
                machine = self._run(f"site-{runtime}", "--runtime", runtime, "site:1")
                print(f"  nobody can reach its port, as machines have no network here: {network['remedy']}\n")
                self._time(
                    f"ordered, then {runtime} runs", (time.perf_counter() - began) * 1000, "with the command line"
                )
            else:
                machine = self._serve(runtime, rest, "--runtime", runtime, "--port", "80:8080", "site:1")
                ms = (time.perf_counter() - began) * 1000
                self._time(f"ordered, then {runtime} answers", ms, "with the command line")
            shown = {"container": ("ps",), "microvm": ("uname", "-a")}[runtime]  # its own processes, its own kernel
            self._hawker("machine", "exec", machine, "--", *shown)

    def _serve(self, runtime: str, rest: str, *order: str) -> str:
        """An app of one web server behind the proxy, which answers. Its machine."""
        app = f"site-{runtime}"
        machine = self._run(app, "--autostop", rest, *order)
        _, shown, _ = self._api.call("GET", f"/apps/{app}")
        url = shown["urls"]["80"]
        until(lambda: fetch(url) == 200, 60, f"the {runtime} answers")
        print(f"  GET {url} -> 200, through the proxy\n")
        self._served[app] = (machine, url, rest)
        return machine

    def _run(self, app: str, *order: str) -> str:
        """An app of one machine, which runs. The machine."""
        self._hawker("apps", "create", app)
        self._hawker("machine", "run", "--app", app, "--region", "mad", "--name", app, *order)
        _, (machine,), _ = self._api.call("GET", f"/apps/{app}/machines")
        return str(machine["id"])

    def _sleep(self) -> None:
        """Everything is put to rest, and one request to each wakes it."""
        self._say("Asleep, as the proxy puts each after five idle minutes by itself: nothing of it runs")
        for app, (_, _, rest) in self._served.items():
            self._hawker("machine", rest, app)
        self._say("Awake: one request to each. It is held while the machine starts, and answered by it")
        for app, (machine, url, _) in self._served.items():
            ms = self._curl(url)
            until(lambda at=f"/apps/{app}/machines/{machine}": self._state(at) == "started", 10, f"{app} runs")  # type: ignore[misc]
            self._time(f"asleep, then {app.removeprefix('site-')} answers", ms, "one request, which woke it")
        print()
        self._hawker("machine", "stop", "site-process")
        self._hawker("ping", "--app", "site-process", "-c", "3", "-i", "0.1")
        self._hawker("logs", "--app", "site-process", "--tail", "4")
        for app in self._served:
            self._api.call("DELETE", f"/apps/{app}?force=true")

    def _state(self, path: str) -> str:
        _, machine, _ = self._api.call("GET", path)
        state: str = machine["state"]
        return state

    def _curl(self, url: str) -> float:
        """One request, shown as it is made. Milliseconds up to its answer."""
        print(f"$ curl -s -o /dev/null -w '%{{http_code}}' {url}", flush=True)
        curl = shutil.which("curl")
        began = time.perf_counter()
        if curl:
            host, _, port = url.removeprefix("http://").partition(":")
            known = ("--resolve", f"{host}:{port}:127.0.0.1")  # for a curl that does not know that localhost is here
            argv = [curl, "-s", "-o", os.devnull, "-w", "%{http_code}", *known, url]
            status = int(subprocess.run(argv, stdout=subprocess.PIPE, timeout=90, text=True).stdout)
        else:
            status = fetch(url, timeout=90)
        ms = (time.perf_counter() - began) * 1000
        check(status == 200, f"the first request to {url} is answered: {status}")
        print(f"{status}, after {ms:.0f} ms", flush=True)
        return ms

    def _output(self, *arguments: str) -> str:
        environ = {**os.environ, "HAWKER_HOME": str(self._home)}
        argv = [sys.executable, "-m", "hawker", *arguments]
        return subprocess.run(argv, env=environ, timeout=60, stdout=subprocess.PIPE, text=True).stdout

    def _kill_a_daemon(self, servers: dict[str, Any]) -> None:
        self._say("kill -9 of the worker daemons of ord in the middle of creates: they pick up where they left off")
        for attempt in range(1, 11):
            resumed = self._crash_once(attempt)
            if resumed:
                break
        check(resumed > 0, "a create was cut off by the kill and resumed")
        print(f"  {resumed} runs were cut off in the middle and resumed (attempt {attempt})")
        for region, server in servers.items():
            check(self._pid(server["id"]) == server["pid"], f"the server in {region} is the same process as before")
            check(fetch(server["url"]) == 200, f"the server in {region} answers")
        print("  the three web servers are the same processes as before, and answer")

    def _crash_once(self, attempt: int) -> int:
        """Kill both daemons of ord while creates are under way. Returns how many runs were resumed."""
        before = {name: self._resumed(name) for name in ("ord-1", "ord-2")}
        acknowledged: list[str] = []
        threads = [
            threading.Thread(target=self._create_in_ord, args=(self._api.another(), acknowledged)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(acknowledged) >= 8 * attempt, 20, "creates are under way")
        began = time.perf_counter()
        for name in before:
            os.kill(int((self._home / f"{name}.pid").read_text()), signal.SIGKILL)
        for thread in threads:
            thread.join()
        until(self._all_reachable, 30, "the killed daemons are back")
        self._time("killed daemon answers again", (time.perf_counter() - began) * 1000, "started again by hawker dev")

        def all_started() -> bool:
            _, machines, _ = self._api.call("GET", "/apps/hello/machines?region=ord")
            states = {m["id"]: m["state"] for m in machines}
            return set(states.values()) == {"started"} and all(a in states for a in acknowledged)

        until(all_started, 30, f"every one of {len(acknowledged)} acknowledged machines runs")
        print(f"  {len(acknowledged)} creates were acknowledged; all of them run")
        _, machines, _ = self._api.call("GET", "/apps/hello/machines?region=ord")
        for machine in machines:
            if machine["name"] != "web-ord":
                self._api.call("DELETE", f"/apps/hello/machines/{machine['id']}?force=true")
        return sum(self._resumed(name) - before[name] for name in before)

    def _create_in_ord(self, api: Api, acknowledged: list[str]) -> None:
        """Create machines until the daemon that is asked goes away."""
        order = {"region": "ord", "config": {"image": "host", "init": {"exec": ["sleep", "600"]}}}
        for _ in range(20):
            try:
                status, machine, _ = api.call("POST", "/apps/hello/machines", order)
            except (OSError, http.client.HTTPException):
                return
            if status != 200:
                return
            acknowledged.append(machine["id"])

    def _resumed(self, worker: str) -> int:
        return (self._home / f"{worker}.log").read_text().count('"event": "run.resumed"')

    def _all_reachable(self) -> bool:
        _, workers, _ = self._api.call("GET", "/hawker/workers")
        return all(w["reachable"] for w in workers)

    def _pid(self, machine: str) -> int:
        _, processes, _ = self._api.call("GET", f"/apps/hello/machines/{machine}/ps")
        pid: int = min(p["pid"] for p in processes)
        return pid

    # --- showing -----------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        print(f"\n--- {text}\n", flush=True)

    def _hawker(self, *arguments: str, expect: int = 0) -> None:
        shown = shlex.join(a if a != sys.executable else "python3" for a in arguments)
        print(f"$ hawker {shown}", flush=True)
        environ = {**os.environ, "HAWKER_HOME": str(self._home)}
        ended = subprocess.run([sys.executable, "-m", "hawker", *arguments], env=environ, timeout=60)
        check(ended.returncode == expect, f"hawker {shown} ends with status {expect}, not {ended.returncode}")
        print(flush=True)

    def _time(self, what: str, ms: float, note: str) -> None:
        self._times.append((what, ms, note))

    def _print_times(self) -> None:
        self._say("Times, measured on this machine just now")
        for what, ms, note in self._times:
            print(f"  {what:<32} {ms:>8.1f} ms   {note}")
        print()


@contextmanager
def market(home: Path, *, keep: bool) -> Iterator[subprocess.Popen[bytes]]:
    """`hawker dev` in the background, ended with everything it started unless `keep`."""
    began = time.perf_counter()
    output = open(home / "dev.out", "wb")  # noqa: SIM115  # handed to the child
    argv = [sys.executable, "-m", "hawker", "dev", "--dir", str(home), "--port", "0", "--http", "0"]
    process = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
    output.close()
    up = False
    try:
        until(lambda: (home / "client.json").exists() or process.poll() is not None, UP_S, "the market comes up")
        check(process.poll() is None, f"the market stays up: {(home / 'dev.out').read_text()}")
        print(f"the market came up in {time.perf_counter() - began:.1f} s")
        yield process
        up = True
    finally:
        if not (keep and up):
            process.terminate()
            process.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def fetch(url: str, timeout: float = 5) -> int:
    """The status of a GET; 0 while nobody answers. Names below localhost are this host, whatever its resolver says."""
    host = url.removeprefix("http://").partition("/")[0]
    name, _, port = host.partition(":")
    at = "127.0.0.1" if name.endswith(".localhost") else name
    connection = http.client.HTTPConnection(at, int(port), timeout=timeout)
    try:
        connection.request("GET", "/", headers={"host": host})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition, looking often, and fail when it does not come in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"{what} within {seconds:g} s")
        time.sleep(0.02)


def check(true: bool, what: str) -> None:
    if not true:
        raise SystemExit(f"demo: this did not hold: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Show a market at work on this machine.")
    parser.add_argument("--keep", action="store_true", help="leave the market up")
    keep = parser.parse_args().keep
    home = Path(tempfile.mkdtemp(prefix="hawker-demo-"))
    try:
        with market(home, keep=keep) as process:
            Demo(home, process).run()
            if keep:
                print(f"the market is still up. Use it:  HAWKER_HOME={home} hawker machine list --app hello")
                print(f"stop it:  kill {process.pid}")
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    print("demo: everything shown was checked; nothing was left behind" if not keep else "demo: everything was checked")


if __name__ == "__main__":
    main()
