"""`machine exec`, with and without -it, and `console`, against a real market by way of its broker."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, environment, hawker
from tests.kit.markets import Market, running_market
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "talking"


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    home = tmp_path_factory.mktemp("talking")
    with running_market(home, ("--region", "ord", "--workers", "1")) as market:
        assert hawker("apps", "create", APP, env={"HAWKER_HOME": str(home)}).status == 0
        yield market
        assert hawker("apps", "destroy", APP, "--force", env={"HAWKER_HOME": str(home)}).status == 0


@pytest.fixture(scope="module")
def machine(market: Market) -> str:
    order = ("machine", "run", "--app", APP, "--json", "host", "--", "sleep", "600")
    ended = hawker(*order, env={"HAWKER_HOME": str(market.home)})
    assert ended.status == 0, ended
    name: str = ended.json()["id"]
    return name


class Screen:
    """A command at a terminal of its own. `shown` is everything that came so far."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes]) -> None:
        self._ours = ours
        self.process = process
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, pattern: str) -> None:
        """What matches `pattern` is shown, after what was found before it."""

        def found() -> bool:
            try:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            except BlockingIOError:
                pass
            except OSError:  # the other side is closed
                assert re.search(pattern, self.shown), self.shown
            return re.search(pattern, self.shown) is not None

        wait_until(found, f"{pattern!r} on the terminal", 20.0)
        self.shown = re.split(pattern, self.shown, maxsplit=1)[-1]

    def size(self, columns: int, rows: int) -> None:
        ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)  # as the kernel does to a terminal's owner

    def is_as_it_was(self) -> bool:
        """Whether the terminal echoes, and makes signals of keys, as it did."""
        flags = termios.tcgetattr(self._ours)[3]
        return bool(flags & termios.ECHO) and bool(flags & termios.ISIG)


@contextmanager
def at_terminal(market: Market, *arguments: str, columns: int = 80, rows: int = 24) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        env = environment({"TERM": "xterm", "HAWKER_HOME": str(market.home)})
        env.pop("COLUMNS", None)
        process = subprocess.Popen(
            [*PROGRAM, *arguments], env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
    finally:
        os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield Screen(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_command_has_a_terminal_of_the_size_of_ours_and_follows_it(market: Market, machine: str) -> None:
    with at_terminal(market, "machine", "exec", "-it", machine, "--", "sh", columns=101, rows=33) as screen:
        screen.type("stty size; tty; echo $TERM\n")
        screen.until(r"33 101\r\n/dev/pts/\d+\r\nxterm\r\n")
        screen.size(77, 20)
        screen.type("until stty size | grep '20 77'; do :; done; echo seen\n")
        screen.until(r"seen\r\n")
        screen.type("exit 7\n")
        assert screen.process.wait(ENDS_S) == 7
        assert screen.is_as_it_was()


def test_ctrl_c_goes_to_the_command_and_not_to_ours(market: Market, machine: str) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    with at_terminal(market, "machine", "exec", "-it", machine, "--", "sh", "-c", script) as screen:
        screen.until(r"ready\r\n")
        screen.type("\x03")
        screen.until(r"caught\r\n")
        assert screen.process.wait(ENDS_S) == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_us_ends_the_command_and_leaves_the_terminal_as_it_was(
    market: Market, machine: str, number: signal.Signals
) -> None:
    with at_terminal(market, "machine", "exec", "-it", machine, "--", "sh", "-c", "echo pid $$; sleep 600") as screen:
        screen.until(r"pid ")
        screen.until(r"\r\n")
        assert not screen.is_as_it_was()
        screen.process.send_signal(number)
        assert screen.process.wait(ENDS_S) == 128 + number
        assert screen.is_as_it_was()


def test_the_console_is_bash_where_there_is_one(market: Market, machine: str) -> None:
    with at_terminal(market, "console", machine) as screen:
        screen.type("echo shell:${BASH_VERSION:+bash}:\n")
        screen.until(r"shell:bash:\r\n")
        screen.type("exit\n")
        assert screen.process.wait(ENDS_S) == 0


def test_bytes_pass_both_ways_as_they_are(market: Market, machine: str) -> None:
    given = bytes(range(256)) * 4096  # a MiB, more than any buffer on the way
    ended = subprocess.run(
        [*PROGRAM, "machine", "exec", "-i", machine, "--", "cat"],
        env=environment({"HAWKER_HOME": str(market.home)}),
        input=given,
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == given


def test_output_and_errors_stay_apart_and_json_holds_both(market: Market, machine: str) -> None:
    env = {"HAWKER_HOME": str(market.home)}
    script = ("sh", "-c", "echo out; echo err >&2; exit 3")
    ended = hawker("machine", "exec", machine, "--", *script, env=env)
    assert (ended.status, ended.out, ended.err) == (3, "out\n", "err\n")
    ended = hawker("machine", "exec", "--json", machine, "--", *script, env=env)
    assert json.loads(ended.out) == {
        "timed_out": False,
        "exit_code": 3,
        "exit_signal": 0,
        "stdout": "out\n",
        "stderr": "err\n",
    }


def test_ctrl_c_without_a_terminal_in_between_ends_the_command(market: Market, machine: str) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "machine", "exec", machine, "--", "sh", "-c", "echo $$; exec sleep 1000"],
        env=environment({"HAWKER_HOME": str(market.home)}),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        running = Path(f"/proc/{int(process.stdout.readline())}")
        process.send_signal(signal.SIGINT)
        assert process.wait(ENDS_S) == 130
    wait_until(lambda: not running.exists(), "the command has ended", 20.0)


def test_a_command_that_is_not_there_is_told_with_the_status_that_shells_have_for_it(
    market: Market, machine: str
) -> None:
    ended = hawker("machine", "exec", machine, "--", "no-such-program", env={"HAWKER_HOME": str(market.home)})
    assert ended.status == 127
    assert "no-such-program" in ended.err
