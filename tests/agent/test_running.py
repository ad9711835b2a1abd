"""An agent as a process that is told to begin anew, or whose event loop stands still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tests.kit import stallable
from tests.kit.markets import free_port
from tests.kit.processes import alive
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PATIENCE_S = 60.0
"""An agent imports itself twice to begin anew, once for its check: on a busy host that takes its time."""


class Edge:
    """An agent with HAProxy on public port 80, and the embedded plane on 8080 and whatever is `added`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "log"
        self.ports = {number: free_port() for number in ("api", "80", "8080", "8081")}
        self.config = home / "edge.toml"
        self.configure("80", "8080")
        argv = [sys.executable, stallable.PROGRAM, "hawker", "agent", "--config", str(self.config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def configure(self, *public: str) -> None:
        listen = ", ".join(f'"{number}" = "127.0.0.1:{self.ports[number]}"' for number in public)
        self.config.write_text(
            f'name = "edge"\nregion = "ord"\ndirectory = "{self.home}/edge"\nwatchdog_s = 2.0\n'
            f'[tokens]\ncluster = "c"\n[broker]\nlisten = "127.0.0.1:{self.ports["api"]}"\n'
            f'[proxy]\nlisten = {{ {listen} }}\nengine = "haproxy"\nembedded = {{ drain_s = 2 }}\n'
        )

    def ask(self, port: str, path: str = "/") -> str:
        """The whole answer, on a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.ports[port]), timeout=PATIENCE_S) as sock:
            token = "authorization: Bearer c\r\n"
            sock.sendall(f"GET {path} HTTP/1.1\r\nhost: a.localhost\r\n{token}connection: close\r\n\r\n".encode())
            with sock.makefile("rb") as file:
                return file.read().decode()

    def answers(self, port: str) -> bool:
        try:
            return self.ask(port).startswith("HTTP/1.1 404 ")
        except OSError:
            return False

    def haproxy(self) -> list[str]:
        """Its processes that are children of the agent's: the master."""
        pid = self.process.pid
        found = []
        for each in sorted(_children(pid)):
            with suppress(OSError):  # another child, which has just ended
                if Path(f"/proc/{each}/comm").read_text().strip() == "haproxy":
                    found.append(each)
        return found

    def end(self) -> None:
        """Also of HAProxy, which outlives an agent that is killed."""
        left = self.haproxy() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)  # its workers end with it

    @contextmanager
    def never_away(self) -> Iterator[list[threading.Lock]]:
        """Somebody asks again and again, and is answered each time. Who holds the locks has nobody ask."""
        over = threading.Event()
        problems: list[str] = []
        locks = [threading.Lock() for _ in range(3)]

        def ask(lock: threading.Lock) -> None:
            while not over.wait(0.01):
                try:
                    with lock:
                        answer = self.ask("8080")
                    problems.extend([] if answer.startswith("HTTP/1.1 404 ") else [answer])
                except OSError as error:
                    problems.append(repr(error))

        threads = [threading.Thread(target=ask, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        try:
            yield locks
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert problems == []

    def stand_still(self, kind: str) -> None:
        """From now on its loop does."""
        number = stallable.STALLS[kind]
        self.process.send_signal(number)
        wait_until(lambda: not self._pending() >> number - 1 & 1, "it has got the signal", PATIENCE_S)

    def _pending(self) -> int:
        """Of its signals."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)


def _children(pid: int) -> set[str]:
    found = set[str]()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            found.update((thread / "children").read_text().split())
    return found


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Edge]:
    it = Edge(tmp_path)
    try:
        wait_until(lambda: it.answers("8080"), "the edge answers", PATIENCE_S)
        yield it
    finally:
        it.end()


def test_an_agent_begins_anew_without_being_away(edge: Edge) -> None:
    haproxy = edge.haproxy()
    assert len(haproxy) == 1

    # A configuration that is none is refused, and the agent goes on.
    right = edge.config.read_text()
    edge.config.write_text(right.replace('engine = "haproxy"', 'engine = "swift"'))
    edge.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "restart.refused" in edge.log.read_text(), "it is refused", PATIENCE_S)
    assert "proxy.engine" in edge.log.read_text()

    # Nor does it give up what it has for an address that somebody else has.
    with socket.create_server(("127.0.0.1", edge.ports["8081"])):
        edge.configure("80", "8080", "8081")
        edge.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "proxy.listen.8081" in edge.log.read_text(), "it is refused", PATIENCE_S)
    assert edge.answers("80")

    # With another one it begins anew, over the same sockets. HAProxy does not notice.
    edge.configure("80", "8080", "8081")
    with edge.never_away() as asking:
        edge.process.send_signal(signal.SIGHUP)
        wait_until(lambda: edge.answers("8081"), "it serves at a new port", PATIENCE_S)
        assert edge.answers("80")
        assert edge.haproxy() == haproxy

        # Its loop stands still, and the watchdog begins it anew. Whose request it had taken would get no answer: there
        # is none at that moment.
        with ExitStack() as nobody_asks:
            for lock in asking:
                nobody_asks.enter_context(lock)
            edge.stand_still("busy")
        wait_until(lambda: "loop.stalled" in edge.log.read_text(), "it has begun anew", PATIENCE_S)
    assert "in busy" in edge.log.read_text(), "the log shows where it stood"
    assert edge.answers("80")
    assert edge.haproxy() == haproxy
    told = edge.ask("api", "/metrics")
    assert "hawker_loop_stalls_total 0.0" not in told
    assert "hawker_loop_stalls_total " in told

    # Told to end while it begins anew, it ends: in order, and with HAProxy.
    edge.process.send_signal(signal.SIGHUP)
    edge.process.send_signal(signal.SIGTERM)
    assert edge.process.wait(PATIENCE_S) == 0
    assert not alive(int(haproxy[0]))
    assert os.path.getsize(edge.home / "edge" / "stalled") == 0


def test_what_it_is_told_while_its_loop_stands_still_is_heeded_by_the_next_program(edge: Edge) -> None:
    edge.stand_still("asleep")
    edge.process.send_signal(signal.SIGTERM)
    assert edge.process.wait(PATIENCE_S) == 0
    assert "loop.stalled" in edge.log.read_text()
