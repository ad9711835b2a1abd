"""A real market for tests: `hawker dev` as a process of its own, reached over its HTTP API."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

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

    async def close(self) -> None:
        await self._peer.close()


class Market:
    """A market that runs. `home` holds a directory, a log, a pid file and a configuration for each agent."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.process = process
        found = json.loads((home / "client.json").read_text())
        self.endpoint: str = found["endpoint"]
        self.token: str = found["token"]

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


@contextmanager
def running_market(home: Path, options: Sequence[str] = ()) -> Iterator[Market]:
    """`hawker dev` in `home` on a free port, ended when the block ends. Fails when it does not come up."""
    home.mkdir(parents=True, exist_ok=True)
    output = home / "dev.out"
    argv = [sys.executable, "-m", "hawker", "dev", "--dir", str(home), "--port", "0", *options]
    with output.open("ab") as file:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_until(lambda: (home / "client.json").exists() or process.poll() is not None, UP_S, "the market is up")
        assert process.poll() is None, output.read_text()
        yield Market(home, process)
    finally:
        process.terminate()
        try:
            process.wait(DOWN_S)
        finally:
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Look until a condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """As `wait_until`, for a condition that is awaited; returns its first true value."""
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.02)
    return value
