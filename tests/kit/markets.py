"""A real market for tests: `hawker dev` as a process of its own, reached over its HTTP API.

A broker and workers are each a process of theirs, on loopback, in a temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.kit.ports import free_port as free_port
from tests.kit.waiting import wait_until

from hawker.client.connection import Peer

UP_S = 60.0
DOWN_S = 40.0
SLEEPER = {"image": "host", "init": {"exec": ["sleep", "3600"]}, "restart": {"policy": "no"}}


class Answer(msgspec.Struct, frozen=True):
    """Status, decoded JSON (None without a body) and headers."""

    status: int
    body: Any
    headers: dict[str, str]


class Client:
    """Calls to a market's API from any number of tasks at once."""

    def __init__(self, endpoint: str, token: str, connections_max: int = 128) -> None:
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._peer = Peer(host, int(port), headers=headers, connections_max=connections_max)

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, timeout_s: float = 60
    ) -> Answer:
        raw = b"" if body is None else msgspec.json.encode(body)
        reply = await self._peer.request(method, f"/v1{path}", body=raw, headers=headers or {}, timeout_s=timeout_s)
        decoded = msgspec.json.decode(reply.body) if reply.body else None
        return Answer(reply.status, decoded, dict(reply.headers))

    async def ok(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The body of an answer that must be 2xx."""
        answer = await self.call(method, path, body, **options)
        assert answer.status < 300, (method, path, answer)
        return answer.body

    async def filled(self, app: str, order: Any) -> Any:
        """The machine of an order, placed again while workers are too slow to offer anything: all agents of a market
        may have one core between them."""
        until_s = time.monotonic() + UP_S
        while True:
            answer = await self.call("POST", f"/apps/{app}/machines", order)
            if answer.status < 300 or "no_answer" not in str(answer.body) or time.monotonic() > until_s:
                assert answer.status < 300, answer
                return answer.body

    async def close(self) -> None:
        await self._peer.close()


class Market:
    """A market that runs. `home` holds a directory, a log, a pid file and a configuration for each agent."""

    def __init__(self, home: Path, endpoint: str, token: str) -> None:
        self.home = home
        self.endpoint = endpoint
        self.token = token

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(self.endpoint, self.token)
        try:
            yield client
        finally:
            await client.close()

    def workers(self) -> list[str]:
        return sorted(path.stem for path in self.home.glob("*-*.toml"))

    def pid(self, agent: str) -> int:
        return int((self.home / f"{agent}.pid").read_text())

    def kill(self, agent: str) -> None:
        """kill -9 of an agent; the market starts it again."""
        os.kill(self.pid(agent), signal.SIGKILL)

    def database(self, worker: str) -> Path:
        return self.home / worker / "worker.db"

    @property
    def http(self) -> tuple[str, int]:
        """Where apps are served, as http://APP.localhost."""
        host, _, port = tomllib.loads((self.home / "broker.toml").read_text())["proxy"]["listen"]["80"].rpartition(":")
        return host, int(port)


@contextmanager
def running_market(home: Path, options: Sequence[str] = ()) -> Iterator[Market]:
    """`hawker dev` in `home` on free ports, as a person starts it and, by the signal of Ctrl-C, ends it.

    Fails when it does not come up, and when it does not end in order with every agent and machine.
    """
    home.mkdir(parents=True, exist_ok=True)
    output = home / "dev.out"
    argv = ["dev", "--dir", str(home), "--port", "0", "--http", "0", *options]
    process = _started(argv, output)
    found: dict[str, str] = {}

    def is_up() -> bool:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            found.update(json.loads((home / "client.json").read_text()))
        return bool(found) or process.poll() is not None

    try:
        wait_until(is_up, "the market is up", UP_S)
        assert found, _ended(process, output)
        yield Market(home, **found)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(DOWN_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its agents and machines are then found and named by tests/kit/leftovers.py
            process.wait()
            raise AssertionError(f"the market did not stop within {DOWN_S:g} s; {_said(output)}") from None
    assert status == 0, _ended(process, output)


@contextmanager
def running_agent(config: Path, port: int) -> Iterator[None]:
    """`hawker agent` with a configuration that makes it listen on `port`, from when it does to the block's end."""
    output = config.with_suffix(".out")
    process = _started(["agent", "--config", str(config)], output)

    def is_up() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        return process.poll() is not None

    try:
        wait_until(is_up, f"the agent of {config.name} is up", UP_S)
        assert process.poll() is None, _ended(process, output)
        yield
    finally:
        process.terminate()
        process.wait(DOWN_S)


def _started(arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "hawker", *arguments]
    with output.open("ab") as file:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def _ended(process: subprocess.Popen[bytes], output: Path) -> str:
    return f"it ended with status {process.returncode}; {_said(output)}"


def _said(output: Path) -> str:
    return f"it said: {output.read_text(errors='replace').strip()[-2000:]}"
