"""Agents for the benchmarks: real processes with configurations as `hawker dev` writes them, one broker, some
workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

CLUSTER, USER = "bench-cluster-token", "bench-user-token"
PROCESS = "[worker.process]\n" if find_spec("hawker.agent") else ""
if find_spec("hawker.supervisor.users"):
    PROCESS += "own_users = false\n"  # as in versions before, and for a Python that only its owner can run
"""A worker runs programs of its host if it is told to. The packages of 2026-11-21, which `bench.compare` measures, too,
did without, and refuse the word."""


class Agents:
    """A broker and its workers. `broker` and `workers` are ports; `pids` by name."""

    def __init__(
        self, broker: int, workers: Mapping[str, int], processes: Mapping[str, subprocess.Popen[bytes]]
    ) -> None:
        self.broker = broker
        self.workers = dict(workers)
        self.processes = dict(processes)

    def pid(self, name: str) -> int:
        return self.processes[name].pid


@contextmanager
def running_agents(home: Path, *, workers: int = 2, machines: int = 10_000_000) -> Iterator[Agents]:
    """Start agents in `home`, wait until all serve, stop them in order at the end."""
    names = [f"bench-{n}" for n in range(1, workers + 1)]
    ports = {name: free_port() for name in names}
    broker = free_port()
    listed = ", ".join(f'"{name}@ord=127.0.0.1:{port}"' for name, port in ports.items())
    processes: dict[str, subprocess.Popen[bytes]] = {}
    roles = {name: worker_role(port, machines) for name, port in ports.items()}
    roles["broker"] = f'[broker]\nlisten = "127.0.0.1:{broker}"\nworkers = [{listed}]'
    try:
        for name, role in roles.items():
            processes[name] = spawn_agent(home, name, role)
        for name, port in {**ports, "broker": broker}.items():
            wait_answering(port, processes[name], home / f"{name}.log")
        yield Agents(broker, ports, processes)
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            process.wait(60)


def worker_role(port: int, machines: int) -> str:
    capacity = (
        f"cpus_shared = {machines}, cpus_dedicated = 64, memory_mib = {machines * 512}, disk_mib = {machines * 2048}"
    )
    return f'[worker]\nlisten = "127.0.0.1:{port}"\ncapacity = {{ {capacity}, machines = {machines} }}\n{PROCESS}'


def start_agent(home: Path, name: str, role: str, port: int) -> subprocess.Popen[bytes]:
    """One agent, returned once it answers at this port."""
    process = spawn_agent(home, name, role)
    wait_answering(port, process, home / f"{name}.log")
    return process


def spawn_agent(home: Path, name: str, role: str) -> subprocess.Popen[bytes]:
    config = home / f"{name}.toml"
    head = [f'name = "{name}"', 'region = "ord"', f'directory = "{home / name}"', 'log_level = "warning"']
    tokens = ["[tokens]", f'cluster = "{CLUSTER}"', "[tokens.users]", f'bench = "{USER}"']
    config.write_text("\n".join([*head, "stop_machines_on_exit = true", *tokens, role, ""]))
    # An installed package has its bytecode. A checkout's is written with the first start, unless that is forbidden:
    # half of a start would be Python's compiler then.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with (home / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hawker", "agent", "--config", str(config)], stdout=log, stderr=log, env=environment
        )


def wait_answering(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until an agent has answered for the first time. It takes connections before, as soon as it begins."""
    wait_listening(port, process, log)
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {CLUSTER}"})
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != 200:
        raise RuntimeError(f"the agent at port {port} answers {status}:\n{log.read_text()[-2000:]}")


def wait_listening(port: int, process: subprocess.Popen[bytes], log: Path | None = None) -> None:
    """Raises RuntimeError with the end of its log when it ends before, or takes a minute; it is killed then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.001)
    process.kill()
    process.wait()
    said = f"\n{log.read_text()[-2000:]}" if log else ""
    raise RuntimeError(f"nothing came up on port {port}: {process.args!r}{said}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def memory_mib(pid: int) -> float:
    """Proportional set size: shared pages are counted by share."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def cpu_of(pid: int) -> float:
    """Seconds of cpu time so far, the children it has reaped included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def supervisor_pids(home: Path, name: str) -> list[int]:
    """The supervisor of a worker, found by its command line; none before the worker's first machine."""
    directory = str(home / name / "process")
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "hawker.supervisor" in words and directory in words:
            found.append(int(pid))
    return found
