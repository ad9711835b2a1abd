"""Ways to one server for the benchmarks of the proxy: straight, through bare HAProxy, through an agent.

The server is nginx. A quick run does without it where it is not installed, and has a few lines of Python answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from tests.kit.doors import ANSWERS
from tests.kit.markets import Client

from bench.command import Table
from bench.market import USER, free_port, start_agent, wait_listening, worker_role

BIG = 1_000_000
APP = "web"
NAME = f"{APP}.localhost"
BARE = "bare HAProxy"
ANSWERS_S = 60.0


class Figure(msgspec.Struct, frozen=True):
    """Of one run of a load; `failed` are answers of another status and connections that broke. `cpu_us`: time on a
    core, of who carries the bytes, for each request."""

    per_second: float
    p99_ms: float
    failed: int
    cpu_us: float


class Way(msgspec.Struct, frozen=True):
    """A way to a server: where, the processes that carry the bytes, and at which port the server itself is."""

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


class Server(msgspec.Struct, frozen=True):
    """A program that answers at a port."""

    argv: list[str]
    env: dict[str, str]


def server(home: Path, port: int) -> Server:
    """Its files are in `home`."""
    if not shutil.which("nginx"):
        return Server([sys.executable, "-c", ANSWERS], {"PORT": str(port)})
    (home / "files").mkdir(parents=True, exist_ok=True)
    (home / "files" / "big").write_bytes(os.urandom(BIG))
    conf = home / "nginx.conf"
    conf.write_text(NGINX.format(home=home, port=port))
    return Server(["nginx", "-c", str(conf), "-e", f"{home}/nginx.err"], {})


@contextmanager
def straight(home: Path) -> Iterator[Way]:
    """The server by itself."""
    port = free_port()
    its = server(home, port)
    with _listening(subprocess.Popen(its.argv, env={**os.environ, **its.env}), port):
        yield Way("direct", port)


@contextmanager
def haproxy_alone(home: Path, name: str, to: int, rules: str = "", bind: str = "") -> Iterator[Way]:
    """`bind`: more words for the line that says where it listens."""
    port = free_port()
    path = home / f"{port}.cfg"
    text = HAPROXY.format(port=port, upstream=to, rules=rules)
    path.write_text(text.replace(f"bind 127.0.0.1:{port}\n", f"bind 127.0.0.1:{port} {bind}\n"))
    # A session of its own, as the agent's has: the kernel shares cores among sessions (sched(7), autogroup).
    process = subprocess.Popen(["haproxy", "-db", "-f", str(path)], stderr=subprocess.DEVNULL, start_new_session=True)
    with _listening(process, port):
        yield Way(name, port, (process.pid,))


@contextmanager
def _listening(process: subprocess.Popen[bytes], port: int) -> Iterator[None]:
    try:
        wait_listening(port, process)
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def through_hawker(
    home: Path, engine: str, *, certificates: Path | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Way]:
    """An agent (worker, broker and proxy in one process) with a server of its own as its machine, over TLS if there are
    certificates. Raises RuntimeError when that does not answer within a minute."""
    api, broker, http, backhaul, inside = (free_port() for _ in range(5))
    directory = home / engine
    directory.mkdir()
    public = 443 if certificates else 80
    role = (
        f'{worker_role(api, 1000)}\n[broker]\nlisten = "127.0.0.1:{broker}"\n'
        f'[proxy]\nengine = "{engine}"\nbackhaul = "127.0.0.1:{backhaul}"\n'
        f'listen = {{ "{public}" = "127.0.0.1:{http}" }}\n'
    )
    if certificates:
        role += f'certificates = "{certificates}"\n'
    agent = start_agent(directory, engine, role, broker)
    try:
        handlers = ("tls", "http") if certificates else ("http",)
        asyncio.run(start_machine(broker, inside, server(directory, inside), public, handlers))
        deadline = time.monotonic() + ANSWERS_S
        for _ in range(5 if tls else 1):  # each thing that HAProxy does by itself is begun by a request before
            while not answers(http, tls):
                if time.monotonic() > deadline:
                    log = (directory / f"{engine}.log").read_text()
                    raise RuntimeError(f"the machine behind {engine} does not answer\n{log[-2000:]}")
                time.sleep(0.1)
            time.sleep(0.6 if tls else 0)
        yield Way(engine, http, (agent.pid, *children(agent.pid, "haproxy")), inside)
    finally:
        agent.terminate()
        agent.wait(60)


def answers(port: int, tls: ssl.SSLContext | None = None) -> bool:
    """Whether a request is answered as it should be."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        if tls:
            sock = stack.enter_context(tls.wrap_socket(sock, server_hostname=NAME))
        sock.sendall(f"GET /small HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode())
        return sock.recv(4096).startswith(b"HTTP/1.1 200 ")


async def start_machine(broker: int, inside: int, program: Server, public: int, handlers: Sequence[str]) -> None:
    service = {
        "protocol": "tcp",
        "internal_port": inside,
        "ports": [{"port": public, "handlers": handlers}],
        "concurrency": {"type": "requests", "soft_limit": 100_000},
    }
    # A core of its own, as the other server has: of shared ones a machine is promised the sixteenth part.
    guest = {"cpu_kind": "performance", "cpus": 1, "memory_mb": 2048}
    init = {"exec": program.argv}
    config = {"image": "host", "init": init, "env": program.env, "services": [service], "guest": guest}
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


def on_core_ns(pid: int) -> int:
    """Of all threads that it has now."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def tell(
    table: Table,
    what: str,
    found: Mapping[str, Sequence[Figure]],
    against: Mapping[str, Sequence[str]],
    aims: Mapping[tuple[str, str], str],
) -> None:
    """Rows of each way, medians of its turns; beside those in `against` also the medians of the turns' ratios, each
    with its aim."""
    for name, figures in found.items():
        rate, p99, cpu = (
            statistics.median(column)
            for column in zip(*((each.per_second, each.p99_ms, each.cpu_us) for each in figures), strict=True)
        )
        failed = sum(figure.failed for figure in figures)
        table.add(f"{what}: {name}", rate, "1/s", "", f"p99 {p99:.2f} ms, {cpu:.1f} us on a core each, {failed} failed")
        for other in against.get(name, ()):
            turns = zip(figures, found[other], strict=True)
            ratio = statistics.median(mine.per_second / its.per_second for mine, its in turns)
            table.add(f"{what}: {name} / {other}", ratio, "times", aims.get((name, other), ""))
