"""The recipes of docs/recipes.md, word for word: their files are written, their lines run, their output compared.

Each server of a recipe has an address of the loopback network and a directory of its own, in the place of those that
the page names. `systemctl` is played by `Server`, which does what the unit in docs/operations.md tells systemd to do.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.programs import environment
from tests.kit.processes import marked, word
from tests.kit.waiting import wait_until

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "recipes.md").read_text()
UNIT = (DOCS / "operations.md").read_text()
NETWORK = f"127.{77 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
"""Of this run: other runs of the tests on this host listen elsewhere."""
LIMIT_S = 30.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # four agents, on a host that may be busy


class Block(msgspec.Struct, frozen=True):
    kind: str
    servers: tuple[str, ...]
    text: str
    shows: tuple[str, ...] = ()


def blocks(section: str) -> Iterator[Block]:
    """In the page's order. A block of text is what the block before it shows."""
    within = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert within, section
    found = re.findall(r"^```(\w+)\n(.*?)^```(?:\n+```text\n(.*?)^```)?", within[1], re.DOTALL | re.MULTILINE)
    for kind, text, shows in found:
        first = re.match(r"# on ([\w, -]+?)(?:: (\S+))?\n", text)
        servers = tuple(first[1].split(", ")) if first else ()
        yield Block(kind, servers, f"{first[2]}\n{text}" if first and first[2] else text, tuple(shows.splitlines()))


class Server:
    """A server of a recipe: its files below `root`, its agent as systemd runs it."""

    def __init__(self, root: Path, address: str) -> None:
        self.root = root
        self.address = address
        (root / "etc/hawker").mkdir(parents=True)
        (root / "var/lib").mkdir(parents=True)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(root / "notify"))
        self._notified.settimeout(1)
        self._tells: list[str] = []
        self.agent: subprocess.Popen[bytes] | None = None

    def here(self, text: str) -> str:
        """A line of the page as it is for this server."""
        for place in "/etc/hawker", "/var/lib":
            text = text.replace(place, f"{self.root}{place}")
        own = text.replace("0.0.0.0", self.address).replace("127.0.0.1", self.address)
        return re.sub(r"\b10(\\?\.)0\\?\.0\\?\.(?=\d)", lambda dots: NETWORK.replace(".", dots[1]) + dots[1], own)

    def systemctl(self, verb: str) -> None:
        match verb:
            case "start":
                program = self.here(setting("ExecStart")).split()
                program[0] = str(Path(sys.executable).with_name("hawker"))
                with (self.root / "journal").open("ab") as journal:
                    self.agent = subprocess.Popen(
                        program,
                        env=environment({"NOTIFY_SOCKET": str(self.root / "notify"), "PATH": "/usr/bin:/bin"}),
                        stdin=subprocess.DEVNULL,
                        stdout=journal,
                        stderr=journal,
                    )
                self._tells = ["READY=1"]
            case "reload":
                assert self.agent
                assert setting("ExecReload") == "/bin/kill -HUP $MAINPID"
                self.agent.send_signal(signal.SIGHUP)
                self._tells = ["RELOADING=1", "READY=1"]
            case "stop":
                self.wait_ready()
                assert self.agent
                assert setting("KillMode") == "process"
                self.agent.terminate()
                assert self.agent.wait(LIMIT_S) == 0
                self.agent = None
            case _:
                raise AssertionError(verb)

    def close(self) -> None:
        if self.agent:
            self.agent.terminate()
            self.agent.wait(LIMIT_S)
        self._notified.close()

    def wait_ready(self) -> None:
        """Until the agent has told what a service manager waits for."""
        wait_until(self._ready, f"{self.root.name} tells {self._tells}", LIMIT_S)

    def _ready(self) -> bool:
        if not self._tells:
            return True
        assert self.agent
        assert self.agent.poll() is None, (self.root / "journal").read_text()
        with suppress(TimeoutError):
            if self._tells[0] in self._notified.recv(65536).decode().splitlines():
                self._tells.pop(0)
        return not self._tells


def setting(name: str) -> str:
    found = re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    assert found, name
    return found[1]


class Site:
    """The servers of a recipe, and the shell of whoever follows it: what it exports stays for the next block."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.servers: dict[str, Server] = {}
        self.exports: list[str] = []
        (home / "bin").mkdir()
        (home / "bin/hawker").symlink_to(Path(sys.executable).with_name("hawker"))

    def follow(self, section: str) -> None:
        for block in blocks(section):
            self.run(block)

    def run(self, block: Block) -> None:
        """On its servers, or else on the first one."""
        servers = [self._server(name) for name in block.servers or tuple(self.servers)[:1]]
        for server in servers:
            if block.kind == "toml":
                path, text = server.here(block.text).split("\n", 1)
                Path(path).write_text(text)
            else:
                self._run(block, server)
        for server in servers:
            server.wait_ready()

    def close(self) -> None:
        for server in self.servers.values():
            server.close()

    def _server(self, name: str) -> Server:
        if name not in self.servers:
            self.servers[name] = Server(self.home / name, f"{NETWORK}.{len(self.servers) + 1}")
        return self.servers[name]

    def _run(self, block: Block, server: Server) -> None:
        """Lines of systemctl are the server's, all others the shell's. A block that shows something and is one command
        is given again until it does: what servers tell each other takes a moment."""
        *others, last = re.split(r"^(systemctl \w+) hawker$", block.text, flags=re.MULTILINE)
        for script, command in zip(others[::2], others[1::2], strict=True):
            self.shell(script, server)
            server.systemctl(command.split()[1])
        if last.strip():
            server.wait_ready()
        if block.shows and not re.search(r"\brun\b|\bcreate\b", last):
            wait_until(lambda: shown(self.shell(last, server), block.shows), f"{block.shows} of {last}", LIMIT_S)
        elif block.shows:
            assert shown(said := self.shell(last, server), block.shows), said
        else:
            self.shell(last, server)

    def shell(self, script: str, server: Server) -> str:
        text = "\n".join([*self.exports, server.here(script)])
        self.exports += [line for line in server.here(script).splitlines() if line.startswith("export ")]
        if not re.search(r"^[^#\s]", script, re.MULTILINE):
            return ""
        env = environment({"PATH": f"{self.home / 'bin'}:/usr/bin:/bin"})
        ended = subprocess.run(
            ["sh", "-eu"], input=text, cwd=self.home, env=env, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, (script, ended.stdout, ended.stderr)
        return ended.stdout


def shown(output: str, lines: tuple[str, ...]) -> bool:
    """Whether each of the lines is, or is within, one of the output, whatever the space between words. A list of
    servers has no others."""
    there = [" ".join(line.split()) for line in output.splitlines()]
    servers = [line for line in there if line.startswith("srv-")]
    if len(lines) > 1 and len(servers) != len(lines):
        return False
    return all(any(re.search(rf"(?<!\S){re.escape(line)}(?!\S)", each) for each in there) for line in lines)


@contextmanager
def site(home: Path) -> Iterator[Site]:
    try:
        with socket.create_server((f"{NETWORK}.1", 80)):
            pass
    except PermissionError:
        pytest.skip("an ordinary user may not listen on ports 80 and 443, which the recipes serve")
    it = Site(home)
    try:
        yield it
    finally:
        it.close()


def test_one_server_serves_over_tls_and_comes_back_from_its_backup(tmp_path: Path) -> None:
    with site(tmp_path) as it:
        it.follow("One server with TLS")
        backup, restore = blocks("Back up and restore a worker")
        it.run(backup)
        later = word()
        it.shell(f"hawker machine run --app hello host -- sleep {later}", it.servers["box"])
        assert marked(later)
        it.run(restore)
        assert not marked(later)
        destroy(it, "hello")


def test_three_servers_get_a_fourth_and_lose_the_first(tmp_path: Path) -> None:
    with site(tmp_path) as it:
        it.follow("Three servers")
        table = ports()
        for server in it.servers.values():
            assert server.agent
            assert listening(server.agent.pid) == table, "docs/recipes.md, Ports for the firewall"
        fill(it, "srv-1")
        it.follow("Add a server")
        it.follow("Empty a server")
        it.follow("Remove a server")
        destroy(it, "jobs")


@pytest.mark.full
def test_three_servers_get_other_tokens(tmp_path: Path) -> None:
    with site(tmp_path) as it:
        it.follow("Three servers")
        it.follow("Rotate tokens")


def fill(it: Site, worker: str) -> None:
    """Order machines until one is on the worker: who empties it has something to do."""
    server = it.servers[worker]
    it.shell("hawker apps create jobs", server)
    for _ in range(20):
        if int(it.shell(f"hawker sql \"select count(*) from machines where worker = '{worker}'\"", server).split()[-1]):
            return
        it.shell("hawker machine run --app jobs host -- sleep 3600", server)
    raise AssertionError(f"no order was filled on {worker}")


def destroy(it: Site, app: str) -> None:
    it.shell(f"hawker apps destroy --force {app}\n", next(iter(it.servers.values())))


def ports() -> set[tuple[int, str]]:
    """What the page's table says that a server listens at."""
    rows = re.findall(r"^\| (\d+) \| (TCP|UDP) \| `[a-z.]+` \|", PAGE, re.MULTILINE)
    assert len(rows) > 3
    return {(int(port), protocol) for port, protocol in rows}


def listening(pid: int) -> set[tuple[int, str]]:
    """The ports of a process, but those that only its own machines reach."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = set()
    for protocol, state in (("TCP", "0A"), ("UDP", "07")):
        for line in Path(f"/proc/{pid}/net/{protocol.lower()}").read_text().splitlines()[1:]:
            fields: list[Any] = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in sockets:
                found.add((int(fields[1].rpartition(":")[2], 16), protocol))
    return found
