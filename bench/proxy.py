"""What the proxy costs: requests a second and p99 beside bare HAProxy and without a proxy, memory of idle connections.

    python -m bench.proxy [--quick]

One run, in turns, on one machine: nginx answers, wrk asks, over loopback. Each data plane is a real agent (worker,
broker and proxy in one process) with nginx as its machine; bare HAProxy has a configuration of four lines, and leads to
that machine, too. HAProxy with fields is the same that tells machine and user what the proxy tells them, by the rules
of its manual, and does nothing else. Everything shares the cores, so only what stands in one run may be compared:
ratios are medians of those of each turn. The time on a core that is taken for a request depends less on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from tests.kit.markets import Client

from bench.command import Table
from bench.market import USER, free_port, memory_mib, start_agent, wait_listening, worker_role

CONNECTIONS = 64
BIG = 1_000_000
APP = "web"
BARE = "bare HAProxy"
WITH_FIELDS = "HAProxy with fields"


class Sizes(msgspec.Struct, frozen=True):
    rounds: int
    seconds: int
    idle: int


FULL = Sizes(rounds=5, seconds=4, idle=9_000)
QUICK = Sizes(rounds=1, seconds=1, idle=1_000)


class Figure(msgspec.Struct, frozen=True):
    """Of one run of wrk; `failed` are answers of another status and connections that broke. `cpu_us`: time on a core,
    of who carries the bytes, for each request."""

    per_second: float
    p99_ms: float
    failed: int
    cpu_us: float


class Way(msgspec.Struct, frozen=True):
    """A way to nginx: where, the processes that carry the bytes, and at which port nginx itself is."""

    name: str
    port: int
    pids: tuple[int, ...] = ()
    inside: int = 0


NGINX = """
user root; daemon off; worker_processes 1;
pid {home}/nginx.pid; error_log {home}/nginx.err; events {{ worker_connections 9900; }}
http {{
    access_log off; keepalive_requests 100000000; keepalive_timeout 600s; client_body_temp_path {home}/body;
    proxy_temp_path {home}/p; fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location /small {{ return 200 "hello\\n"; }}
        location /big {{ root {home}/files; }}
    }}
}}
"""
HAPROXY = """
global
    nbthread 1
    maxconn 9900
defaults
    mode http
    timeout connect 5s
    timeout client 600s
    timeout server 600s
    http-reuse always
frontend f
    bind 127.0.0.1:{port}
    {rules}
    default_backend b
backend b
    server s 127.0.0.1:{upstream}
"""
FIELDS = """
    unique-id-format "01KAJXQ0000000000000000000-%{+X}pid-%{+X}rt-ord"
    http-request add-header fly-client-ip %[src]
    http-request add-header x-forwarded-proto http
    http-request add-header x-forwarded-port 80
    http-request add-header x-forwarded-ssl off
    http-request add-header fly-forwarded-port 80
    http-request add-header fly-region ord
    http-request add-header x-forwarded-for %[src]
    http-request add-header via "1.1 hawker"
    http-request add-header fly-request-id %[unique-id]
    http-response set-header server hawker
    http-response add-header via "1.1 hawker"
    http-response add-header fly-request-id %[unique-id]
"""
REPORT = """
done = function(summary, latency, requests)
  local e = summary.errors
  local failed = e.connect + e.read + e.write + e.status + e.timeout
  print(string.format("RESULT %d %d %d %d", summary.requests, summary.duration, latency:percentile(99.0), failed))
end
"""


@contextmanager
def upstream(home: Path) -> Iterator[Way]:
    """nginx by itself."""
    (home / "files").mkdir()
    (home / "files" / "big").write_bytes(os.urandom(BIG))
    port = free_port()
    (home / "nginx.conf").write_text(NGINX.format(home=home, port=port))
    process = subprocess.Popen(["nginx", "-c", str(home / "nginx.conf"), "-e", f"{home}/nginx.err"])
    try:
        wait_listening(port, process)
        yield Way("direct", port)
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def haproxy_alone(home: Path, name: str, to: int, rules: str) -> Iterator[Way]:
    port = free_port()
    path = home / f"{port}.cfg"
    path.write_text(HAPROXY.format(port=port, upstream=to, rules=rules))
    # A session of its own, as the agent's has: the kernel shares cores among sessions (sched(7), autogroup).
    process = subprocess.Popen(["haproxy", "-db", "-f", str(path)], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_listening(port, process)
        yield Way(name, port, (process.pid,))
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def through_hawker(home: Path, engine: str) -> Iterator[Way]:
    """An agent whose proxy leads to a machine: an nginx of its own, like the other."""
    api, broker, http, backhaul, inside = (free_port() for _ in range(5))
    directory = home / engine
    (directory / "files").mkdir(parents=True)
    shutil.copy(home / "files" / "big", directory / "files" / "big")
    conf = directory / "nginx.conf"
    conf.write_text(NGINX.format(home=directory, port=inside))
    role = (
        f'{worker_role(api, 1000)}\n[broker]\nlisten = "127.0.0.1:{broker}"\n'
        f'[proxy]\nengine = "{engine}"\nbackhaul = "127.0.0.1:{backhaul}"\nlisten = {{ "80" = "127.0.0.1:{http}" }}\n'
    )
    agent = start_agent(directory, engine, role, broker)
    try:
        asyncio.run(start_machine(broker, inside, conf))
        yield Way(engine, http, (agent.pid, *children(agent.pid, "haproxy")), inside)
    finally:
        agent.terminate()
        agent.wait(60)


async def start_machine(broker: int, inside: int, conf: Path, public: int = 80, *handlers: str) -> None:
    service = {
        "protocol": "tcp",
        "internal_port": inside,
        "ports": [{"port": public, "handlers": handlers or ["http"]}],
        "concurrency": {"type": "requests", "soft_limit": 100_000},
    }
    command = ["nginx", "-c", str(conf), "-e", f"{conf.parent}/nginx.err"]
    # A core of its own, as the other nginx has: of shared ones a machine is promised the sixteenth part.
    guest = {"cpu_kind": "performance", "cpus": 1, "memory_mb": 2048}
    config = {"image": "host", "init": {"exec": command}, "services": [service], "guest": guest}
    client = Client(f"http://127.0.0.1:{broker}", USER)
    try:
        await client.call("POST", "/apps", {"app_name": APP, "org_slug": "bench"})
        made = await client.call("POST", f"/apps/{APP}/machines", {"region": "ord", "config": config})
        assert made.status == 200, made
    finally:
        await client.close()


def children(pid: int, name: str) -> Iterator[int]:
    """Processes of a name below another one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # another one has ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")
                if fields[0].endswith(f"({name}") and pid in ancestors(int(entry.name)):
                    yield int(entry.name)


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def wrk(home: Path, way: Way, path: str, seconds: int) -> Figure:
    host = f"Host: {APP}.localhost"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}", "-s", str(home / "report.lua"), "-H", host]
    before = sum(map(on_core_ns, way.pids))
    said = subprocess.run(
        [*command, f"http://127.0.0.1:{way.port}{path}"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    requests, micros, p99_us, failed = map(int, re.findall(r"RESULT (\d+) (\d+) (\d+) (\d+)", said)[0])
    spent_us = (sum(map(on_core_ns, way.pids)) - before) / 1000
    return Figure(requests / micros * 1e6, p99_us / 1000, failed, spent_us / requests)


def on_core_ns(pid: int) -> int:
    """Of all threads that it has now."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def compare(table: Table, home: Path, ways: Sequence[Way], path: str, what: str, sizes: Sizes) -> None:
    """Each way in turn, several times over; medians."""
    found: dict[str, list[Figure]] = {way.name: [] for way in ways}
    for way in ways:
        wrk(home, way, path, 1)
    for _ in range(sizes.rounds):
        for way in ways:
            found[way.name].append(wrk(home, way, path, sizes.seconds))
    aims = {"haproxy": ">= 0.95", "embedded": ">= 0.60"}
    for way in ways:
        figures = found[way.name]
        rate, p99, cpu = (
            statistics.median(column)
            for column in zip(*((each.per_second, each.p99_ms, each.cpu_us) for each in figures), strict=True)
        )
        failed = sum(figure.failed for figure in figures)
        notes = f"p99 {p99:.2f} ms, {cpu:.1f} us on a core each, {failed} failed"
        table.add(f"{what}: {way.name}", rate, "req/s", "", notes)
        for other in (BARE, WITH_FIELDS) if way.name in aims else ():
            turns = zip(figures, found[other], strict=True)
            ratio = statistics.median(mine.per_second / other.per_second for mine, other in turns)
            aim = aims[way.name] if other == BARE and path == "/small" else ""
            table.add(f"{what}: {way.name} / {other}", ratio, "times", aim)


def idle(table: Table, way: Way, count: int) -> None:
    """Memory per connection of clients that have had one answer and keep the connection."""
    before = sum(memory_mib(pid) for pid in way.pids)
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", way.port), timeout=10))
            sock.sendall(f"GET /small HTTP/1.1\r\nHost: {APP}.localhost\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        grown = sum(memory_mib(pid) for pid in way.pids) - before
    table.add(f"{count} idle connections: {way.name}", grown / count * 10_000, "MiB", "", "for each 10,000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sizes = QUICK if chosen.quick else FULL
    missing = [name for name in ("nginx", "haproxy", "wrk") if shutil.which(name) is None]
    if missing:
        parser.exit(1, f"bench.proxy needs {', '.join(missing)}\n")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place, ExitStack() as stack:
        home = Path(place)
        (home / "report.lua").write_text(REPORT)
        direct = stack.enter_context(upstream(home))
        agents = [stack.enter_context(through_hawker(home, engine)) for engine in ("haproxy", "embedded")]
        to = agents[0].inside  # a machine's nginx shares the cores in another way than one beside it
        alone = ((BARE, ""), (WITH_FIELDS, FIELDS))
        ways = [direct, *(stack.enter_context(haproxy_alone(home, name, to, rules)) for name, rules in alone), *agents]
        compare(table, home, ways, "/small", "small answers, 64 connections", sizes)
        compare(table, home, ways, "/big", "1 MB answers, 64 connections", sizes)
        for way in ways[1:]:
            idle(table, way, sizes.idle)
    if chosen.json:
        chosen.json.write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
