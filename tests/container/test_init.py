"""The init of containers, compiled and run: what it tells, whom it signals, whom it reaps."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import termios
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import wait_until

from hawker.init.build import NoCompiler, program

PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc, of gcc, and libc6-dev")


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program("container", tmp_path_factory.mktemp("cache"))


class Run:
    """The init with a program, as PID 1 of a namespace of its own if `alone`."""

    def __init__(
        self, init: Path, place: Path, argv: Sequence[str], *options: str, alone: bool = False, **more: Any
    ) -> None:
        self._status = place / "status"
        self._output = place / "output"
        status = os.open(self._status, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        command: list[str | Path] = [init, "--status-fd", str(status), *options, "--", *argv]
        # unshare stays: it is the parent, and passes nothing on
        before = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if alone else []
        try:
            with open(self._output, "wb") as output:
                self.process = subprocess.Popen([*before, *command], stdout=output, pass_fds=[status], **more)
        finally:
            os.close(status)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._status.read_text().splitlines()]

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def program(self) -> int:
        """Its pid, once it runs."""
        wait_until(lambda: bool(self.told), "the program was started")
        pid: int = self.told[0]["started"]
        return pid

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.output, f"it says {text}")

    def ended(self) -> int:
        return self.process.wait(timeout=10)


@pytest.fixture
def run(init: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def start(*argv: str, options: Sequence[str] = (), alone: bool = False, **more: Any) -> Run:
        runs.append(Run(init, tmp_path, argv, *options, alone=alone, **more))
        return runs[-1]

    yield start
    for each in runs:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize(
    ("script", "record", "status"),
    [
        ("exit 0", {"code": 0}, 0),
        ("exit 7", {"code": 7}, 7),
        ("exit 255", {"code": 255}, 255),
        ("kill -KILL $$", {"signal": 9}, 137),
        ("kill -SEGV $$", {"signal": 11}, 139),
    ],
)
def test_how_the_program_ended_is_told_and_is_its_own_status(
    run: Any, script: str, record: dict[str, int], status: int
) -> None:
    one = run("sh", "-c", script)
    assert one.ended() == status
    assert one.told == [{"started": one.program}, record]


def test_a_program_may_have_a_terminal_whose_output_is_ours(run: Any) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && stty size && echo mine > /dev/tty && ps -o stat= -p $$; exit 3"
    one = run("sh", "-c", script, options=["--terminal", "100x30"])
    assert one.ended() == 3
    size, mine, state = one.output.splitlines()
    assert (size, mine) == ("30 100", "mine")
    assert "s" in state  # leads its session
    assert "+" in state  # and is in the foreground of its terminal


def test_the_last_words_at_a_terminal_are_whole_whatever_is_left_at_it(run: Any) -> None:
    one = run("sh", "-c", "(sleep 60; echo late) & seq 20000", options=["--terminal", "80x24"])
    assert one.ended() == 0
    assert one.output.split() == [str(number) for number in range(1, 20001)]


def test_a_terminal_that_nobody_reads_holds_up_whoever_writes_and_nobody_else(init: Path) -> None:
    """As between two supervisors: signals arrive all the same, orphans are reaped, and nothing is lost."""
    script = "trap 'exit 4' USR1; seq 100000 & wait"
    read, write = os.pipe()
    with (
        open(read, "rb") as output,
        subprocess.Popen([init, "--terminal", "80x24", "--", "sh", "-c", script], stdout=write) as process,
    ):
        try:
            wait_until(lambda: not select.select([], [write], [], 0)[1], "the pipe is full")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            shell = children.read_text().split()[0]
            (seq,) = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            stat = Path(f"/proc/{seq}/stat")
            wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "it waits for its terminal")
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda: shell not in children.read_text().split(), "the program has ended, and was reaped")
            assert process.poll() is None
        except BaseException:
            process.kill()
            raise
        finally:
            os.close(write)
        *said, _ = output.read().split()  # the last may be cut off
    assert process.returncode == 4
    assert said == [str(number).encode() for number in range(1, len(said) + 1)]


@pytest.mark.parametrize(
    ("argv", "code", "why"),
    [
        (["no-such-program"], 127, "no-such-program: not found in PATH"),
        (["/no/such/program"], 127, "/no/such/program: not found"),
        (["/etc/passwd"], 126, "/etc/passwd: not an executable file"),
        (["/etc"], 126, "/etc: not an executable file"),
        (["/etc/passwd/x"], 127, "/etc/passwd/x: not a directory"),
        ([""], 127, '"": not found'),
        (['quo"te\\ \n\t\x7f'], 127, 'quo"te\\ ???: not found in PATH'),
        (["x" * 5000], 127, "x" * 256 + ": not found in PATH"),
    ],
)
def test_what_cannot_be_started_is_told_instead(run: Any, argv: list[str], code: int, why: str) -> None:
    one = run(*argv)
    assert one.ended() == code
    (record,) = one.told
    assert (record["code"], record["error"]) == (code, why)


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"#!/no/such/interpreter\n", 0o755, "its interpreter is not found"),
        (b"\x7fELF and no more", 0o755, "not a program for this machine"),
        (b"#!/bin/sh\n", 0o644, "not an executable file"),
    ],
)
def test_a_file_that_is_no_program_is_told_apart(run: Any, tmp_path: Path, content: bytes, mode: int, why: str) -> None:
    path = tmp_path / "prog"
    path.write_bytes(content)
    path.chmod(mode)
    one = run(str(path))
    assert one.ended() in (126, 127)
    assert why in one.told[0]["error"]
    by_name = run("prog", env={"PATH": f"/nowhere:{tmp_path}"})
    assert by_name.ended() in (126, 127)
    assert why in by_name.told[0]["error"]


def test_a_name_is_looked_up_in_the_programs_own_path_in_order(run: Any, tmp_path: Path) -> None:
    for name, code in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prog").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name / "prog").chmod(0o755)
    assert run("prog", env={"PATH": f"{tmp_path}/second:{tmp_path}/first"}).ended() == 2
    assert run("prog", env={"PATH": ""}, cwd=tmp_path / "first").ended() == 1  # an empty part is where it is
    without = run("prog", env={})
    assert without.ended() == 127
    assert without.told[0]["error"] == "prog: not found: PATH is not set"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGWINCH, signal.SIGPIPE])
def test_signals_go_to_the_program(run: Any, number: signal.Signals) -> None:
    one = run("sh", "-c", f"trap 'echo got; exit 3' {number.value}; echo ready; while :; do sleep 0.01; done")
    one.says("ready")
    one.process.send_signal(number)
    assert one.ended() == 3
    assert "got" in one.output


@pytest.mark.root
def test_a_signal_that_the_program_does_not_catch_ends_it_also_under_pid_1(run: Any) -> None:
    one = run("sh", "-c", "echo ready; kill -TERM 1; exec sleep 60", alone=True)
    assert one.ended() == 128 + signal.SIGTERM
    assert one.told[-1] == {"signal": signal.SIGTERM}


def test_the_program_starts_with_no_signal_blocked_or_ignored(run: Any) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a shell has it for what it runs in the background
    try:
        one = run("grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
    finally:
        signal.signal(signal.SIGQUIT, before)
    one.ended()
    values = {line.split()[0]: int(line.split()[1], 16) for line in one.output.splitlines()}
    assert values == {"SigBlk:": 0, "SigIgn:": 0}


@pytest.mark.root
def test_orphans_are_reaped_and_what_is_left_ends_with_the_program(run: Any) -> None:
    script = """
        for i in 1 2 3 4 5; do (sleep 0 & exec true) & done; wait
        (setsid sleep 600 &)
        until ps -o args= --ppid 1 | grep -qx 'sleep 600'; do :; done
        until [ "$(ps -o stat= --ppid 1 | grep -c Z)" = 0 ]; do :; done
        ps -o comm= --ppid 1
    """
    one = run("sh", "-c", script, alone=True)
    assert one.ended() == 0
    assert sorted(one.output.split()) == ["sh", "sleep"]  # ended, for PID 1 ended


def test_orphans_are_reaped_by_a_subreaper_too(run: Any) -> None:
    one = run("sh", "-c", "(sh -c 'echo $PPID >/dev/null; sleep 0.05; echo mine' &); exec cat", stdin=subprocess.PIPE)
    one.says("mine")
    children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children")
    wait_until(lambda: children.read_text().split() == [str(one.program)], "only the program is left")
    one.process.stdin.close()
    assert one.ended() == 0


def test_the_program_sees_no_descriptor_but_the_three_and_has_a_session_of_its_own(run: Any) -> None:
    leaked = os.open("/", os.O_RDONLY)
    try:
        one = run("sh", "-c", "ls /proc/$$/fd; cut -d' ' -f6 /proc/$$/stat; echo $$", stdin=subprocess.DEVNULL)
        os.set_inheritable(leaked, True)
        assert one.ended() == 0
    finally:
        os.close(leaked)
    *fds, session, pid = one.output.split()
    assert fds == ["0", "1", "2"]
    assert session == pid


@pytest.mark.root
def test_nobody_of_the_same_user_gets_at_the_init(run: Any) -> None:
    script = "cat /proc/1/environ || echo no; echo x > /proc/1/fd/$STATUS || echo no; ls -l /proc/1/fd || echo no"
    options = ("--user", "1000:1000")
    one = run(
        "sh", "-c", script, options=options, alone=True, env={**os.environ, "STATUS": "3"}, stderr=subprocess.DEVNULL
    )
    assert one.ended() == 0
    assert one.output.split() == ["no", "no", "no"]
    assert one.told[-1] == {"code": 0}


def test_the_program_has_the_terminal_as_its_own(init: Path) -> None:
    child, master = pty.fork()
    if child == 0:
        os.execv(
            init,
            [
                str(init),
                "--",
                "sh",
                "-c",
                "trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 0.01; done",
            ],
        )
    try:
        seen = b""
        while b"ready" not in seen:
            seen += os.read(master, 1024)
        assert os.tcgetpgrp(master) != child
        os.write(master, termios.tcgetattr(master)[6][termios.VINTR])  # ^C
        while b"interrupted" not in seen:
            seen += os.read(master, 1024)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
    finally:
        os.close(master)


@pytest.mark.parametrize("let_go", [True, False])
def test_it_waits_until_it_is_let_go_and_ends_where_nobody_can(init: Path, let_go: bool) -> None:
    wait, go = os.pipe()
    process = subprocess.Popen([init, "--go-fd", str(wait), "--", "echo", "gone"], pass_fds=[wait], **PIPES)
    os.close(wait)
    assert process.poll() is None
    if let_go:
        os.write(go, b"g")
    os.close(go)
    said, complaint = process.communicate(timeout=10)
    assert (process.returncode, said) == ((0, "gone\n") if let_go else (125, ""))
    assert let_go or "ended first" in complaint


@pytest.mark.root
def test_without_a_runtime_it_changes_root_directory_and_user(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", root / "bin/busybox")
    (root / "proc").mkdir()
    options = ("--root", str(root), "--cwd", "/made/for/it", "--user", "12:34,56,78")
    one = run(
        "/bin/busybox",
        "sh",
        "-c",
        "pwd; busybox id -u; busybox id -G; busybox ls /",
        options=options,
        env={"PATH": "/bin"},
    )
    assert one.ended() == 0, one.told
    assert one.output.split() == ["/made/for/it", "12", "34", "56", "78", "bin", "made", "proc"]
    nowhere = run("x", options=("--root", str(tmp_path / "nowhere")))
    assert (nowhere.ended(), nowhere.told[0]["code"]) == (125, 125)


@pytest.mark.parametrize(
    "arguments", [[], ["--"], ["--status-fd"], ["--what", "x", "--", "true"], ["--user", "me", "--", "true"]]
)
def test_a_misuse_is_said(init: Path, arguments: list[str]) -> None:
    done = subprocess.run([init, *arguments], capture_output=True, text=True)
    assert done.returncode == 125
    assert done.stderr.startswith("init: ")


# --- compiling it -----------------------------------------------------------------------------------------------------


def test_it_is_compiled_once_whoever_asks(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        made = set(pool.map(lambda _: program("container", tmp_path), range(4)))
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == [made.pop().name]


def test_without_a_compiler_the_packages_are_named_unless_it_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="apt install gcc libc6-dev"):
        program("container", tmp_path / "empty")
    monkeypatch.undo()
    ready = program("container", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program("container", tmp_path / "cache") == ready


def test_a_compiler_that_fails_leaves_nothing_and_says_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho cannot find -lc >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(NoCompiler, match=r"cannot find -lc.*libc6-dev"):
        program("container", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
