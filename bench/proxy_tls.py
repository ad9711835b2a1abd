"""What TLS costs before the proxy: requests a second over HTTP/1.1 and HTTP/2, and handshakes, beside bare HAProxy.

    python -m bench.proxy_tls [--quick]

As `bench.proxy`, with h2load as users: 64 connections, over HTTP/2 ten requests at a time on each. All have the same
certificate (ECDSA, P-256), and lead to an nginx. A handshake is one of TLS 1.3 with a connection and a request of its
own. Time on a core is that of whoever carries the bytes, for each request or connection.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.authority import Authority

from bench.command import Table
from bench.market import free_port, start_agent, wait_listening, worker_role
from bench.proxy import APP, BARE, HAPROXY, NGINX, Figure, Way, children, on_core_ns, start_machine

NAME = f"{APP}.localhost"
KINDS = {
    "HTTP/1.1, 64 connections": ("--h1", "-c64"),
    "HTTP/2, 64 connections of 10": ("-c64", "-m10"),
    "handshakes": ("--h1", "-c500", "-n500"),
}


@contextmanager
def haproxy_alone(home: Path, to: int) -> Iterator[Way]:
    port = free_port()
    path = home / "bare.cfg"
    text = HAPROXY.format(port=port, upstream=to, rules="")
    path.write_text(text.replace(f":{port}\n", f":{port} ssl crt {home}/bare.pem alpn h2,http/1.1\n"))
    process = subprocess.Popen(["haproxy", "-db", "-f", str(path)], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_listening(port, process)
        yield Way(BARE, port, (process.pid,))
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def through_hawker(home: Path, engine: str, authority: Authority) -> Iterator[Way]:
    api, broker, https, backhaul, inside = (free_port() for _ in range(5))
    directory = home / engine
    directory.mkdir()
    conf = directory / "nginx.conf"
    conf.write_text(NGINX.format(home=directory, port=inside))
    role = (
        f'{worker_role(api, 1000)}\n[broker]\nlisten = "127.0.0.1:{broker}"\n[proxy]\nengine = "{engine}"\n'
        f'backhaul = "127.0.0.1:{backhaul}"\ncertificates = "{home}/certificates"\n'
        f'listen = {{ "443" = "127.0.0.1:{https}" }}\n'
    )
    agent = start_agent(directory, engine, role, broker)
    try:
        asyncio.run(start_machine(broker, inside, conf, 443, "tls", "http"))
        for _ in range(5):  # each thing that HAProxy does by itself is begun by a request before
            while not ask(https, authority.client()):
                time.sleep(0.1)
            time.sleep(0.6)
        yield Way(engine, https, (agent.pid, *children(agent.pid, "haproxy")), inside)
    finally:
        agent.terminate()
        agent.wait(60)


def ask(port: int, context: ssl.SSLContext) -> bool:
    """Whether it is answered as it should be."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as tls,
    ):
        tls.sendall(f"GET /small HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode())
        return tls.recv(4096).startswith(b"HTTP/1.1 200 ")


def h2load(home: Path, way: Way, options: Sequence[str], seconds: int) -> Figure:
    """Its log has a line for each request: when it began, status, microseconds."""
    log = home / "h2load.log"
    log.unlink(missing_ok=True)
    of_time = () if "-n500" in options else (f"-D{seconds}",)
    command = ["h2load", "-t1", *options, *of_time, f"--log-file={log}", f"--connect-to=127.0.0.1:{way.port}"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    rounds, seconds = (1, 1) if chosen.quick else (5, 3)
    missing = [name for name in ("nginx", "haproxy", "h2load") if shutil.which(name) is None]
    if missing:
        parser.exit(1, f"bench.proxy_tls needs {', '.join(missing)}\n")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    table = Table()
    with tempfile.TemporaryDirectory(prefix="hawker-bench-") as place, ExitStack() as stack:
        home = Path(place)
        authority = Authority()
        authority.write(home / "certificates", NAME)
        (home / "bare.pem").write_bytes(
            b"".join((home / "certificates" / f"{NAME}.{kind}").read_bytes() for kind in ("crt", "key"))
        )
        agents = [stack.enter_context(through_hawker(home, engine, authority)) for engine in ("haproxy", "embedded")]
        ways = [stack.enter_context(haproxy_alone(home, agents[0].inside)), *agents]
        for what, options in KINDS.items():
            found: dict[str, list[Figure]] = {way.name: [] for way in ways}
            for _ in range(rounds):
                for way in ways:
                    found[way.name].append(h2load(home, way, options, seconds))
            for way in ways:
                figures = found[way.name]
                rate, p99, cpu = (
                    statistics.median(column)
                    for column in zip(*((each.per_second, each.p99_ms, each.cpu_us) for each in figures), strict=True)
                )
                failed = sum(figure.failed for figure in figures)
                notes = f"p99 {p99:.2f} ms, {cpu:.1f} us on a core each, {failed} failed"
                table.add(f"{what}: {way.name}", rate, "a second", "", notes)
                if way.name != BARE:
                    turns = zip(figures, found[BARE], strict=True)
                    ratio = statistics.median(mine.per_second / other.per_second for mine, other in turns)
                    table.add(f"{what}: {way.name} / {BARE}", ratio, "times", "")


if __name__ == "__main__":
    main()
