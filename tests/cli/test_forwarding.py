"""`hawker proxy` against a real market: bytes to a machine's port and back, by way of broker and worker."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, environment, hawker
from tests.kit.markets import Market, free_port, running_market
from tests.kit.processes import PYTHON
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "forwarded"
PROGRAM_TEXT = """
import asyncio, socket, struct, sys

async def take(reader, writer):
    kind = await reader.read(1)
    try:
        if kind == b"e":  # says back what it hears, to its end
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        elif kind == b"f":  # ends its own side first
            writer.write(b"first")
            writer.write_eof()
            print(len(await reader.read()), flush=True)
        elif kind == b"r":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            await asyncio.sleep(3600)
    except OSError:
        print("broken", flush=True)
    writer.close()

async def main():
    async with await asyncio.start_server(take, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


class Site:
    """A market with an app of one machine, whose program listens on `port` once it is up."""

    def __init__(self, market: Market) -> None:
        self.market = market
        self.env = {"HAWKER_HOME": str(market.home)}
        self.port = free_port()
        self.machine = self.run()

    def run(self, name: str = "one") -> str:
        command = ("host", "--", PYTHON, "-c", PROGRAM_TEXT, str(self.port))
        ended = hawker("machine", "run", "--app", APP, "--name", name, "--json", *command, env=self.env)
        for _ in range(10):
            if ended.status == 0 or "no_answer" not in f"{ended.out}{ended.err}":
                break  # else its worker was too slow to make an offer
            ended = hawker("machine", "run", "--app", APP, "--name", name, "--json", *command, env=self.env)
        assert ended.status == 0, ended
        machine: str = ended.json()["id"]
        return machine

    def hawker(self, *arguments: str) -> Any:
        return hawker(*arguments, env=self.env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("forwarding")
    with running_market(home, ("--region", "ord", "--workers", "1")) as market:
        assert hawker("apps", "create", APP, env={"HAWKER_HOME": str(home)}).status == 0
        yield Site(market)
        assert hawker("apps", "destroy", APP, "--force", env={"HAWKER_HOME": str(home)}).status == 0


class Proxy:
    """`hawker proxy` in the background. `port` is where it listens."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def connect(self, kind: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=ENDS_S)
        sock.sendall(kind)
        return sock

    def answers(self) -> bool:
        """Whether the machine's program says again what it is told."""
        with self.connect(b"e?") as sock:
            try:
                return sock.recv(1) == b"?"
            except ConnectionResetError:
                return False

    def said(self) -> str:
        """The next line on standard error."""
        assert self.process.stderr
        return self.process.stderr.readline().strip()


@contextmanager
def proxying(site: Site, *arguments: str) -> Iterator[Proxy]:
    process = subprocess.Popen(
        [*PROGRAM, "proxy", *arguments],
        env=environment(site.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    with process:
        try:
            line = process.stdout.readline()
            found = re.match(r"127\.0\.0\.1:(\d+) leads to port \d+ of machine \w+ \(\w+\) in ord; Ctrl-C ends", line)
            assert found, (line, process.stderr and process.stderr.read())
            yield Proxy(process, int(found[1]))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(ENDS_S)


@pytest.fixture(scope="module")
def proxy(site: Site) -> Iterator[Proxy]:
    with proxying(site, f"0:{site.port}", "--app", APP) as proxy:
        ready = proxy.connect(b"e")  # the program may not listen yet
        ready.close()

        wait_until(proxy.answers, "the machine's program answers")
        yield proxy


def send_all(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def all_of(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_a_connection_carries_bytes_both_ways_and_the_end_of_each(proxy: Proxy) -> None:
    with proxy.connect(b"e") as sock:
        sock.sendall(b"hello")
        assert sock.recv(100) == b"hello"
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock) == b""


def test_a_machine_that_ends_first_still_hears_the_rest(site: Site, proxy: Proxy) -> None:
    with proxy.connect(b"f") as sock:
        assert all_of(sock) == b"first"
        sock.sendall(b"x" * 4321)
    wait_until(lambda: "4321" in site.hawker("machine", "logs", site.machine).out, "the machine has heard it all")


def test_many_connections_at_once_keep_their_bytes_apart(proxy: Proxy) -> None:
    whole: list[bool] = []

    def one(number: int) -> None:
        data = bytes([number]) * (512 << 10)
        with proxy.connect(b"e") as sock:
            sender = threading.Thread(target=send_all, args=(sock, data))
            sender.start()
            whole.append(all_of(sock) == data)
            sender.join()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert whole == [True] * 20


def test_a_machine_that_does_not_read_makes_the_sender_wait(proxy: Proxy) -> None:
    most = 32 << 20
    with proxy.connect(b"s") as sock:
        sock.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < most:
                sent += sock.send(bytes(1 << 16))
        assert sent < most


def test_a_connection_that_breaks_on_one_side_breaks_on_the_other(site: Site, proxy: Proxy) -> None:
    with proxy.connect(b"r") as sock, pytest.raises(ConnectionResetError):
        sock.recv(1)
    with proxy.connect(b"e?") as sock:
        assert sock.recv(1) == b"?"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: "broken" in site.hawker("machine", "logs", site.machine).out, "the machine has seen it break")


def test_a_port_where_the_machine_does_not_listen_is_told_even_if_others_of_the_host_do(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as others:
        port = others.getsockname()[1]
        with proxying(site, f"0:{port}", "--machine", site.machine) as proxy:
            with proxy.connect() as sock, pytest.raises(ConnectionResetError):
                sock.recv(1)
            why = "takes no connection: none of its programs listens there"
            assert proxy.said() == f"a connection failed: port {port} of machine {site.machine} {why}"
            others.setblocking(False)
            with pytest.raises(BlockingIOError):
                others.accept()


def test_a_connection_that_failed_keeps_none_of_the_next_ones(site: Site) -> None:
    late = free_port()
    with proxying(site, f"0:{late}", "--machine", site.machine) as proxy:
        with proxy.connect() as sock, pytest.raises(ConnectionResetError):
            sock.recv(1)
        with listening_late(site, late), proxy.connect(b"now") as sock:
            assert sock.recv(3) == b"now"


@contextmanager
def listening_late(site: Site, port: int) -> Iterator[None]:
    """One more program of the machine, which says back what it hears on `port`."""
    text = (
        "import socket\n"
        f"with socket.create_server(('127.0.0.1', {port})) as server:\n"
        "    print('listens', flush=True)\n"
        "    sock, _ = server.accept()\n"
        "    sock.sendall(sock.recv(3))\n"
    )
    command = [*PROGRAM, "machine", "exec", site.machine, "--", PYTHON, "-c", text]
    with subprocess.Popen(command, env=environment(site.env), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "listens"
            yield
        finally:
            process.terminate()


def test_ctrl_c_ends_it_with_what_it_carries(site: Site) -> None:
    with proxying(site, f"0:{site.port}", "--app", APP) as proxy:
        sock = proxy.connect(b"e?")
        assert sock.recv(1) == b"?"
    with sock, pytest.raises(ConnectionResetError):
        sock.recv(1)
    assert proxy.process.returncode == 130


def test_what_cannot_be_forwarded_is_refused_before_it_listens(site: Site, proxy: Proxy) -> None:
    for arguments, told in (
        (("8080",), "give --app, or --machine"),
        (("80x", "--app", APP), "write a port, or two such as 8080:80"),
        (("0", "--app", APP), "write a port, or two such as 8080:80"),
        (("0:80", "--app", "nope"), "app not found: nope"),
        (("0:80", "--app", APP, "--region", "syd"), f"app {APP} has no machines in syd"),
        ((f"{proxy.port}:80", "--app", APP), f"cannot listen on 127.0.0.1 port {proxy.port}: Address already in use"),
        ((f"{site.port}", "--app", APP), f"its port {site.port} is this host's own"),
    ):
        ended = site.hawker("proxy", *arguments)
        assert ended.status in (1, 2, 3), arguments
        assert told in ended.err


def test_the_next_connection_goes_to_a_machine_that_runs(site: Site, proxy: Proxy) -> None:
    """The last of this file: it stops the machine that the others talk to."""
    with proxy.connect(b"e?") as sock:
        assert sock.recv(1) == b"?"
        assert site.hawker("machine", "stop", site.machine).status == 0
        assert sock.recv(1) == b"", "its kernel has ended what it had open"
    ended = site.hawker("proxy", "0:80", "--app", APP)
    assert (ended.status, ended.err) == (
        4,
        f"error: no machine of app {APP} runs\n  try: hawker machine start {site.machine}\n",
    )
    site.run("two")

    wait_until(proxy.answers, "the other machine answers")
