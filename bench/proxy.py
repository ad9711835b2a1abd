"""What the proxy costs: requests a second and p99 beside bare HAProxy and without a proxy, memory of idle connections.

    python -m bench.proxy [--quick]

One run, in turns, on one machine: nginx answers, wrk asks, over loopback. Each data plane is a real agent (worker,
broker and proxy in one process) with nginx as its machine; bare HAProxy has a configuration of four lines, and leads to
that machine, too. HAProxy with fields is the same that tells machine and user what the proxy tells them, by the rules
of its manual, and does nothing else. Everything shares the cores, so only what stands in one run may be compared:
ratios are medians of those of each turn. The time on a core that is taken for a request depends less on what else runs.

`--quick` does without nginx and wrk where they are not installed: the ways are made, and idle connections measured.
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.command import Table, lacking, left_out, options, told
from bench.market import memory_mib
from bench.ways import BARE, NAME, Figure, Way, haproxy_alone, on_core_ns, straight, tell, through_hawker

CONNECTIONS = 64
WITH_FIELDS = "HAProxy with fields"
PLANES = ("haproxy", "embedded")
AIMS = {("haproxy", BARE): ">= 0.95", ("embedded", BARE): ">= 0.60"}


class Sizes(msgspec.Struct, frozen=True):
    rounds: int
    seconds: int
    idle: int


FULL = Sizes(rounds=5, seconds=4, idle=9_000)
QUICK = Sizes(rounds=1, seconds=1, idle=100)


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


def wrk(home: Path, way: Way, path: str, seconds: int) -> Figure:
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}", "-s", str(home / "report.lua"), "-H", f"Host: {NAME}"]
    before = sum(map(on_core_ns, way.pids))
    said = subprocess.run(
        [*command, f"http://127.0.0.1:{way.port}{path}"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    requests, micros, p99_us, failed = map(int, re.findall(r"RESULT (\d+) (\d+) (\d+) (\d+)", said)[0])
    spent_us = (sum(map(on_core_ns, way.pids)) - before) / 1000
    return Figure(requests / micros * 1e6, p99_us / 1000, failed, spent_us / requests)


def compare(table: Table, home: Path, ways: Sequence[Way], path: str, what: str, sizes: Sizes) -> None:
    """Each way in turn, several times over; medians."""
    found: dict[str, list[Figure]] = {way.name: [] for way in ways}
    for way in ways:
        wrk(home, way, path, 1)
    for _ in range(sizes.rounds):
        for way in ways:
            found[way.name].append(wrk(home, way, path, sizes.seconds))
    against = dict.fromkeys(PLANES, (BARE, WITH_FIELDS))
    tell(table, what, found, against, AIMS if path == "/small" else {})


def idle(table: Table, way: Way, count: int) -> None:
    """Memory per connection of clients that have had one answer and keep the connection."""
    before = sum(memory_mib(pid) for pid in way.pids)
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", way.port), timeout=10))
            sock.sendall(f"GET /small HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        grown = sum(memory_mib(pid) for pid in way.pids) - before
    table.add(f"{count} idle connections: {way.name}", grown / count * 10_000, "MiB", "", "for each 10,000")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    given = parser.parse_args(arguments)
    sizes = QUICK if given.quick else FULL
    absent = lacking("nginx", "wrk")
    if (absent and not given.quick) or lacking("haproxy"):
        parser.exit(1, f"bench.proxy needs {', '.join([*absent, *lacking('haproxy')])}\n")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place, ExitStack() as stack:
        home = Path(place)
        (home / "report.lua").write_text(REPORT)
        direct = stack.enter_context(straight(home))
        agents = [stack.enter_context(through_hawker(home, engine)) for engine in PLANES]
        to = agents[0].inside  # a machine's server shares the cores in another way than one beside it
        alone = ((BARE, ""), (WITH_FIELDS, FIELDS))
        ways = [direct, *(stack.enter_context(haproxy_alone(home, name, to, rules)) for name, rules in alone), *agents]
        if not absent:
            compare(table, home, ways, "/small", "small answers, 64 connections", sizes)
            compare(table, home, ways, "/big", "1 MB answers, 64 connections", sizes)
        for way in ways[1:]:
            idle(table, way, sizes.idle)
    told(table, given)
    return left_out(*absent) if absent else 0


if __name__ == "__main__":
    sys.exit(main())
