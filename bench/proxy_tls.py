"""What TLS costs before the proxy: requests a second over HTTP/1.1 and HTTP/2, and handshakes, beside bare HAProxy.

    python -m bench.proxy_tls [--quick]

As `bench.proxy`, with h2load as users: 64 connections, over HTTP/2 ten requests at a time on each. All have the same
certificate (ECDSA, P-256), and lead to an nginx. A handshake is one of TLS 1.3 with a connection and a request of its
own. Time on a core is that of whoever carries the bytes, for each request or connection. `--quick` does without nginx
and h2load where they are not installed, and asks once each way.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.kit.authority import Authority

from bench.command import Table, lacking, left_out, options, told
from bench.ways import BARE, NAME, Figure, Way, answers, haproxy_alone, on_core_ns, tell, through_hawker

PLANES = ("haproxy", "embedded")
KINDS = {
    "HTTP/1.1, 64 connections": ("--h1", "-c64"),
    "HTTP/2, 64 connections of 10": ("-c64", "-m10"),
    "handshakes": ("--h1", "-c500", "-n500"),
}


def h2load(home: Path, way: Way, more: Sequence[str], seconds: int) -> Figure:
    """Its log has a line for each request: when it began, status, microseconds."""
    log = home / "h2load.log"
    log.unlink(missing_ok=True)
    of_time = () if "-n500" in more else (f"-D{seconds}",)
    command = ["h2load", "-t1", *more, *of_time, f"--log-file={log}", f"--connect-to=127.0.0.1:{way.port}"]
    before = sum(map(on_core_ns, way.pids))
    begun = time.monotonic()
    subprocess.run([*command, f"https://{NAME}/small"], stdout=subprocess.DEVNULL, check=True, timeout=60)
    took = time.monotonic() - begun
    spent_us = (sum(map(on_core_ns, way.pids)) - before) / 1000
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    if not lines:
        raise RuntimeError(f"no request was answered through {way.name}: is the machine too busy?")
    times = sorted(int(line[2]) for line in lines)
    failed = sum(line[1] != "200" for line in lines)
    return Figure(len(lines) / took, times[len(times) * 99 // 100] / 1000, failed, spent_us / len(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    given = parser.parse_args(arguments)
    rounds, seconds = (1, 1) if given.quick else (5, 3)
    absent = lacking("nginx", "h2load")
    if (absent and not given.quick) or lacking("haproxy"):
        parser.exit(1, f"bench.proxy_tls needs {', '.join([*absent, *lacking('haproxy')])}\n")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place, ExitStack() as stack:
        home = Path(place)
        certificates = home / "certificates"
        authority = Authority()
        authority.write(certificates, NAME)
        both = home / "bare.pem"
        both.write_bytes(b"".join((certificates / f"{NAME}.{kind}").read_bytes() for kind in ("crt", "key")))
        tls = authority.client()
        agents = [
            stack.enter_context(through_hawker(home, engine, certificates=certificates, tls=tls)) for engine in PLANES
        ]
        bind = f"ssl crt {both} alpn h2,http/1.1"
        ways = [stack.enter_context(haproxy_alone(home, BARE, agents[0].inside, bind=bind)), *agents]
        if absent:
            for way in ways:
                table.add(f"answers once: {way.name}", answers(way.port, tls), "", "1")
            told(table, given)
            return left_out(*absent)
        for what, more in KINDS.items():
            found: dict[str, list[Figure]] = {way.name: [] for way in ways}
            for _ in range(rounds):
                for way in ways:
                    found[way.name].append(h2load(home, way, more, seconds))
            tell(table, what, found, dict.fromkeys(PLANES, (BARE,)), {})
    told(table, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
