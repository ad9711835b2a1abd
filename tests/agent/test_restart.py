"""Programs that begin anew in place: what they keep, what they leave, and when the watchdog makes them do it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.kit import begun_anew
from tests.kit.markets import free_port
from tests.kit.waiting import wait_until

from hawker.agent import restart
from hawker.agent.restart import Past
from hawker.listening import LOT, Listening, close_gently

LIMIT_S = 1.0
"""After three times as long a program ends that does nothing at all, also one that the host does not let get on."""


class Program:
    """`tests.kit.begun_anew` as a process."""

    def __init__(self, home: Path, limit_s: float) -> None:
        self.port = free_port()
        self.report = home / "stalled"
        argv = [sys.executable, begun_anew.PROGRAM, str(self.port), str(limit_s), str(self.report)]
        with (home / "err").open("ab") as err:
            self.process = subprocess.Popen(argv, stderr=err)

    def ask(self, word: str = "") -> tuple[int, int, int]:
        """Its process, its stalls, the length of the report that it found; then `word` is its wish."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as sock:
            pid, stalls, report = sock.recv(100).split()
            if word:
                sock.sendall(word.encode())
                assert sock.recv(1) == b"", "the wish begins to come true"
            return int(pid), int(stalls), int(report)

    def is_up(self) -> bool:
        try:
            self.ask()
        except ConnectionRefusedError:
            return False
        return True


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    it = Program(tmp_path, getattr(request, "param", LIMIT_S))
    try:
        wait_until(it.is_up, "the program is up")
        yield it
    finally:
        it.process.kill()
        it.process.wait()


def test_a_program_begun_anew_is_the_same_process_and_refuses_nobody(program: Program) -> None:
    for _ in range(3):
        before, *_ = program.ask("anew")
        answers = [program.ask() for _ in range(20)]
        assert {pid for pid, *_ in answers} == {before} == {program.process.pid}
    descriptors = os.listdir(f"/proc/{before}/fd")
    assert len(descriptors) < 12, "it has what it opened itself, and one socket"


@pytest.mark.parametrize("kind", ["busy", "asleep"])
def test_a_loop_that_stands_still_begins_anew_and_answers_who_waits(program: Program, kind: str) -> None:
    """Also those who have connected while it stood still. The stacks are there for the next one to tell."""
    pid, *_ = program.ask(kind)
    assert program.ask()[:2] == (pid, 1)
    assert program.ask()[2] > 0


def test_a_loop_that_stands_still_again_and_again_is_given_longer_each_time(program: Program) -> None:
    took = []
    for stalls in (1, 2):
        began = time.monotonic()
        program.ask("asleep")
        assert program.ask()[1] == stalls
        took.append(time.monotonic() - began)
    assert took[1] > 2 * LIMIT_S
    past = Past(1)
    for n in range(10):
        assert past.longer(60.0 + n) == min(64, 1 << n)
        past = past.stalled(60.0 + n)
    assert past.longer(60.0 + restart.FORGOTTEN_S + 10) == 1, "an hour without a stall"
    assert past.stalled(9000.0).stalls == 11


def test_a_process_in_which_not_even_threads_get_on_ends_and_leaves_their_stacks(program: Program) -> None:
    """C code has the interpreter's lock and does not let it go. Somebody else starts it again."""
    program.ask("locked")
    assert program.process.wait(30) == 1
    assert "in locked" in program.report.read_text()


@pytest.mark.parametrize("program", [2 * LIMIT_S], indirect=True)  # far from three times as long, on a busy host, too
def test_a_process_that_was_stopped_for_long_has_not_stood_still(program: Program) -> None:
    stat = Path(f"/proc/{program.process.pid}/stat")
    for _ in range(2):
        program.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: stat.read_text().split()[2] == "T", "it is stopped")
        time.sleep(2.2 * LIMIT_S)  # what is to be shown is that time alone does nothing
        program.process.send_signal(signal.SIGCONT)
        assert program.ask()[1] == 0


def test_children_of_the_program_before_are_seen_to_their_end() -> None:
    """Of nobody else they would be heard again: they would stay zombies."""
    code = (
        "import asyncio, os, subprocess, sys\n"
        "from hawker.agent import restart\n"
        "child = os.posix_spawnp('cat', ['cat', '/dev/null'], os.environ)\n"
        "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
        "async def main():\n"
        "    restart.reap_inherited()\n"
        "    print(child, flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "asyncio.run(main())\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        wait_until(lambda: not Path(f"/proc/{child}").exists(), "the zombie is gone")
        process.communicate(b"\n")


# --- sockets that were handed over -----------------------------------------------------------------------------------


@contextmanager
def listeners(*addresses: str) -> Iterator[list[socket.socket]]:
    made = []
    for address in addresses:
        made.append(socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET))
    try:
        yield made
    finally:
        for sock in made:
            sock.close()


async def test_a_socket_is_taken_for_the_address_that_it_is_bound_to() -> None:
    with listeners("127.0.0.1", "127.0.0.2") as (one, two):
        port = two.getsockname()[1]
        listening = Listening([one, two])
        (server,) = await listening.serve(asyncio.Protocol, "127.0.0.2", port, backlog=10)
        assert [sock.fileno() for sock in server.sockets] == [two.fileno()] == listening.numbers()
        assert len(listening.close_rest()) == 1
        assert one.fileno() == -1
        server.close()
        assert listening.numbers() == []


async def test_a_name_is_looked_up_for_it() -> None:
    with listeners("127.0.0.1") as (one,):
        assert Listening([one]).take("localhost", one.getsockname()[1]) == [one]


async def test_a_socket_that_would_be_in_the_way_of_a_new_one_is_closed() -> None:
    """The configuration has changed: it was on all addresses, and is to be on one."""
    with listeners("0.0.0.0") as (everywhere,):
        port = everywhere.getsockname()[1]
        (server,) = await Listening([everywhere]).serve(asyncio.Protocol, "127.0.0.1", port, backlog=10)
        assert server.sockets[0].getsockname() == ("127.0.0.1", port)
        assert everywhere.fileno() == -1
        server.close()


@pytest.mark.parametrize("both", [True, False])
def test_a_socket_of_both_families_is_one_for_all_addresses_of_ipv4(both: bool) -> None:
    """As systemd opens `ListenStream=80`."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=both) as sock:
        assert Listening([sock]).take("0.0.0.0", sock.getsockname()[1]) == ([sock] if both else [])


async def test_a_port_that_others_have_too_keeps_theirs() -> None:
    with listeners("127.0.0.1") as (one,):
        listening = Listening([one])
        assert listening.take("127.0.0.2", one.getsockname()[1]) == []
        assert listening.take("127.0.0.1", one.getsockname()[1]) == [one]


async def test_many_may_wait_and_few_are_accepted_at_a_time() -> None:
    """So that the first ones are answered before the last ones are read."""
    lots: list[int] = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            lots[-1] += 1
            transport.close()

    (server,) = await Listening().serve(Counted, "127.0.0.1", 0, backlog=4 * LOT)
    address = server.sockets[0].getsockname()
    waiting = [socket.create_connection(address, timeout=10) for _ in range(3 * LOT)]  # while the loop does not turn
    while sum(lots) < 3 * LOT:
        lots.append(0)
        await asyncio.sleep(0)
    assert max(lots) <= LOT
    for sock in waiting:
        sock.close()
    await close_gently([server])


def test_systemd_hands_sockets_over_in_its_own_way() -> None:
    """sd_listen_fds(3): by number, from 3 on, with the number of the process that they are for."""
    with listeners("127.0.0.1") as (one,):
        code = (
            "import os, sys\n"
            "from hawker.agent import restart\n"
            f"os.dup2({one.fileno()}, 3); os.dup2(0, 4)\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='a:b')\n"
            "past, sockets = restart.read(os.environ)\n"
            "left = [name for name in os.environ if name.startswith('LISTEN')]\n"
            "print(sockets[0].getsockname(), len(sockets), left, past.stalls, os.get_inheritable(3))\n"
        )
        argv = [sys.executable, "-c", code]
        said = subprocess.run(argv, pass_fds=[one.fileno()], capture_output=True, check=True, text=True).stdout
        assert said == f"{one.getsockname()} 1 [] 0 False\n"


def test_what_is_meant_for_another_process_is_left_alone() -> None:
    """A child that has inherited the environment has not inherited the sockets: its numbers are other files."""
    with listeners("127.0.0.1") as (one,):
        told = msgspec.json.encode(Past(os.getpid() + 1, sockets=(one.fileno(),), stalls=3)).decode()
        environ = {restart.VARIABLE: told, "LISTEN_PID": "1", "LISTEN_FDS": "5", "PATH": "/bin"}
        past, sockets = restart.read(environ)
        assert (past, sockets) == (Past(os.getpid()), [])
        assert environ == {"PATH": "/bin"}
        assert one.fileno() >= 0
