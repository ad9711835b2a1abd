"""A real market for the tests: a broker and three workers, each its own process, on loopback, in a temporary directory.

It is started the way a person starts it, with `hawker dev`, and stopped by the same signal as Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients.api import Api

REGIONS = ("ord", "mad", "syd")
READY_S = 45.0
STOP_S = 30.0


@dataclass(frozen=True)
class Market:
    directory: Path
    api: Api


@contextlib.contextmanager
def running_market(directory: Path) -> Iterator[Market]:
    """One worker in each of three regions. On the way out every agent and machine has ended."""
    command = [sys.executable, "-m", "hawker", "dev", "--dir", str(directory), "--port", "0", "--workers", "1"]
    for region in REGIONS:
        command += ["--region", region]
    # Room for every test's machines at once: what is tested here is not what happens when a worker is full.
    command += ["--cpus", "200", "--memory", "65536", "--machines", "200"]
    with (directory / "dev.out").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        client = _wait_ready(process, directory)
        yield Market(directory, Api(client["endpoint"], client["token"]))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its agents and machines are then found and named by tests/kit/leftovers.py
            process.wait()
            raise AssertionError(f"hawker dev did not stop within {STOP_S:g} s; {_said(directory)}") from None
    assert status == 0, f"hawker dev ended with status {status}; {_said(directory)}"


def unused_port() -> int:
    """A port of loopback that is free now; nothing reserves it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _wait_ready(process: subprocess.Popen[bytes], directory: Path) -> dict[str, str]:
    """Wait for the file that tells clients where the market is; it is written once every worker answers."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            client: dict[str, str] = json.loads((directory / "client.json").read_text())
            return client
        assert process.poll() is None, f"hawker dev ended with status {process.returncode}; {_said(directory)}"
        time.sleep(0.05)
    raise AssertionError(f"the market did not come up within {READY_S:g} s; {_said(directory)}")


def _said(directory: Path) -> str:
    text = (directory / "dev.out").read_text(errors="replace").strip()
    return f"it said: {text[-2000:]}"
