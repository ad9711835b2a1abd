"""Every error of the command: one sentence, what to try, the right exit status, never a traceback."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.programs import ENDS_S, PROGRAM, environment, hawker

from hawker.cli import output
from hawker.cli.main import exit_status, run
from hawker.cli.option_names import as_typed
from hawker.cli.orders import run as order_command
from hawker.client.client import ApiError
from hawker.errors import HawkerError, NotFound, PreconditionFailed, Unreachable

ORDER = ("machine", "run", "--app", "a")


@pytest.fixture(autouse=True)
def _no_market(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HAWKER_ENDPOINT", "HAWKER_TOKEN", "HAWKER_APP", "HAWKER_DEBUG", "FLY_FLAPS_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAWKER_HOME", str(tmp_path))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and nobody else can take."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["machne"], "No such command 'machne'. Did you mean 'machine'?", "hawker --help"),
        (["xyz"], "No such command 'xyz'.", "hawker --help"),
        (["machine", "stopp", "m"], "No such command 'stopp'. Did you mean", "hawker machine --help"),
        (["machine", "status"], "Missing argument 'MACHINE'.", "hawker machine status --help"),
        (["machine", "list", "--nope"], "No such option '--nope'.", "hawker machine list --help"),
        (["machine", "run", "host", "--", "ls"], "Missing option '-a' / '--app'", "hawker machine run --help"),
        ([*ORDER, "host", "python3", "-m", "http.server"], "No such option '-m'.", "put -- before the command"),
        (["machine", "exec", "m", "ls", "-l"], "No such option '-l'.", "put -- before the command"),
        ([*ORDER, "--cpus", "x", "host"], "Invalid value for '--cpus'", "hawker machine run --help"),
        ([*ORDER, "--restart", "sometimes", "host"], "Invalid value for '--restart'", "hawker machine run --help"),
        (["machine", "wait", "m", "--state", "done"], "Invalid value for '--state'", "hawker machine wait --help"),
        (
            ["machine", "stop", "m", "--timeout", "nan"],
            "Invalid value for '--timeout': 'nan' is not",
            "hawker machine st",
        ),
        (
            ["machine", "restart", "m", "--timeout", "inf"],
            "Invalid value for '--timeout': 'inf' is not",
            "hawker machine",
        ),
        (
            ["machine", "stop", "m", "--timeout", "-3"],
            "Invalid value for '--timeout': -3.0 is not in",
            "hawker machine",
        ),
        (["machine", "wait", "m", "--timeout", "inf"], "Invalid value for '--timeout': 'inf' is not", "hawker machine"),
        ([*ORDER, "--region", "", "host"], "Invalid value for '--region': it is empty", "hawker machine run --help"),
        ([*ORDER, "--region", " , ", "host"], "Invalid value for '--region': it is empty", "hawker machine run --help"),
        (["sql", "--worker", "", "select 1"], "Invalid value for '--worker': it is empty", "hawker sql --help"),
        (["machine", "update", "m"], "nothing to change: give an option, or a command", "hawker machine update --help"),
        (
            ["machine", "update", "m", "--skip-launch"],
            "nothing to change: give an option",
            "hawker machine update --help",
        ),
        (["machine", "list", "--state", "bogus"], "Invalid value for '--state': 'bogus' is not", "hawker machine list"),
        (
            ["completion"],
            "Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish",
            "hawker completion --help",
        ),
        (["completion", "tcsh"], "Invalid value for '{bash|zsh|fish}'", "hawker completion --help"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: list[str], sentence: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second = shown.err.splitlines()
    assert first.startswith(f"error: {sentence}")
    assert second.startswith(f"  try: {hint}")


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ([*ORDER, "-e", "X", "host"], 2, '--env: "X" is not valid: write KEY=VALUE'),
        ([*ORDER, "--metadata", "=x", "host"], 2, '--metadata: "=x" is not valid: write KEY=VALUE'),
        ([*ORDER, "--guest", "huge", "host"], 2, '--guest: "huge" is not valid: use shared-cpu'),
        ([*ORDER, "--endpoint", "nope", "--token", "t", "host"], 2, 'endpoint: "nope" is not valid'),
        ([*ORDER, "--endpoint", "http://[::1", "--token", "t", "host"], 2, 'endpoint: "http://[::1" is not valid'),
        (["apps", "list", "--endpoint", "http://a..b", "--token", "t"], 2, 'endpoint: "http://a..b" is not valid'),
        (["machine", "status", ""], 1, "no machine was given: the id or name is empty"),
        (["apps", "list"], 1, "no market was named, and none runs on this machine"),
        (["apps", "destroy", "0123456789abcd"], 3, "no app is called 0123456789abcd: that is a machine's id"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {sentence}")
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError("app not found", status_code=404), 3),
        (NotFound("no worker is called x"), 3),
        (ApiError("insufficient resources", status_code=409), 4),
        (ApiError("a lease is held", status_code=409), 4),
        (PreconditionFailed("it runs"), 4),
        (ApiError("deadline_exceeded", status_code=408), 5),
        (ApiError("config.guest.cpus: 3 is not valid", status_code=400), 2),
        (ApiError("internal error", status_code=500), 1),
        (Unreachable("nobody answers"), 1),
    ],
)
def test_scripts_tell_errors_apart_by_the_exit_status(error: HawkerError, status: int) -> None:
    assert exit_status(error) == status


@pytest.mark.parametrize(
    ("typed", "field", "told"),
    [
        (["--cpus", "3"], "config.guest.cpus", "--cpus"),
        (["--cpus", "3"], "config.guest.memory_mb", "config.guest.memory_mb"),
        (["--memory", "100"], "config.guest.memory_mb", "--memory"),
        (["-e", "A=B"], "config.env.A", "--env"),
        (["--config", "FILE"], "config.guest.cpus", "config.guest.cpus"),
        (["--port", "70000"], "config.services[0].ports[0].port", "--port"),
        (["--port", "80:0"], "config.services[0].internal_port", "--port"),
        (["--check", "/"], "config.services[1].checks[0].path", "--check"),
        (["--check", "/", "--check-grace", "9h"], "config.services[0].checks[0].grace_period", "--check-grace"),
        (["--hard-limit", "3"], "config.services[0].concurrency.hard_limit", "--hard-limit"),
        (["--min-running", "3"], "config.services[0].min_machines_running", "--min-running"),
        (["--user", "a:b:c"], "config.processes[0].user", "--user"),
        (["--rootfs-persist"], "config.rootfs", "--rootfs-persist"),
        (["--key", "k"], "Idempotency-Key", "--key"),
        (["--config", "FILE"], "config.services[0].checks[0].path", "config.services[0].checks[0].path"),
    ],
)
def test_an_error_of_the_api_names_the_option_that_was_typed(
    typed: list[str], field: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text("{}")
    typed = [str(tmp_path / "c.json") if word == "FILE" else word for word in typed]
    context = order_command.make_context("run", ["--app", "a", *typed, "host"])
    error = ApiError(f"{field}: 1 is not valid: ...", status_code=400, details={"field": field})
    with context:
        as_typed(error, context)
    assert error.message == f"{told}: 1 is not valid: ..."


def test_a_configuration_that_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"env": {"A": "\xe9"}}')
    assert run([*ORDER, "--endpoint", "http://127.0.0.1:1", "--token", "t", "--config", str(file), "host"]) == 2
    assert capsys.readouterr().err.startswith(f'error: --config: "{file}" is not valid: give a JSON object: ')


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK", b"HTTP/1.1 500 Oops"])
def test_an_answer_that_is_no_text_is_told(head: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error": "\xff"}'

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(ENDS_S)
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(4096)
            connection.sendall(b"%s\r\ncontent-length: %d\r\n\r\n%s" % (head, len(body), body))

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(ENDS_S)
        answering = threading.Thread(target=answer)
        answering.start()
        assert run(["apps", "list", "--endpoint", f"http://127.0.0.1:{server.getsockname()[1]}", "--token", "t"]) == 1
        answering.join()
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "a fault of hawker's own" not in said


def test_an_agent_s_file_that_is_no_text_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.toml").write_bytes(b"\xff")
    assert run(["agent", "--config", "./agent.toml"]) == 2
    assert capsys.readouterr().err.startswith('error: config: "agent.toml" is not valid: ')


def test_a_market_that_is_down_is_told_with_the_way_to_start_one(
    capsys: pytest.CaptureFixture[str], closed_port: int
) -> None:
    assert run(["apps", "list", "--endpoint", f"http://127.0.0.1:{closed_port}", "--token", "t"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: http://127.0.0.1:{closed_port} takes no connections"
    assert second.startswith("  try: is the market up? hawker dev")


def test_a_command_waits_for_a_market_that_is_coming_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, closed_port: int
) -> None:
    """As whoever types the tutorial is quicker than `hawker dev`."""
    told = json.dumps({"endpoint": f"http://127.0.0.1:{closed_port}", "token": "t"})
    with (tmp_path / "dev.lock").open("w") as lock:
        assert run(["apps", "list"]) == 1
        assert "none runs on this machine" in capsys.readouterr().err
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = threading.Timer(0.2, (tmp_path / "client.json").write_text, [told])
        begun.start()
        assert run(["apps", "list"]) == 1
        begun.join()
    assert f"127.0.0.1:{closed_port} takes no connections" in capsys.readouterr().err


def test_with_json_an_error_has_the_apis_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ORDER, "--json", "--env", "X", "host"]) == 2
    told = json.loads(capsys.readouterr().err)
    assert told["status"] == "invalid_argument"
    assert told["details"]["field"] == "--env"


def test_a_refused_order_shows_each_workers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = [
        {"worker": "ord-1", "reason": "full", "resource": "memory_mib", "wanted": 512, "free": 256},
        {"worker": "ord-2", "reason": "no_answer"},
    ]
    error = ApiError("insufficient", status_code=409, details={"refusals": refusals}, hint="order less\norder later")
    output.failure(error)
    assert capsys.readouterr().err.splitlines() == [
        "error: insufficient",
        "worker  reason     resource    wanted  free",
        "ord-1   full       memory mib     512   256",
        "ord-2   no answer  -                -     -",
        "  try: order less",
        "  try: order later",
    ]


def test_the_apis_word_before_its_sentence_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    error = ApiError("failed_precondition: machine m1 is stopped", status_code=412, word="failed_precondition")
    output.failure(error)
    assert capsys.readouterr().err == "error: machine m1 is stopped\n"
    form = output.Form()
    form.json = True
    output.failure(error, form)
    assert json.loads(capsys.readouterr().err)["error"] == error.message


def test_a_fault_of_the_market_names_the_request_to_look_for(capsys: pytest.CaptureFixture[str]) -> None:
    output.failure(ApiError("internal error", status_code=500, request_id="01ABC"))
    assert "request 01ABC" in capsys.readouterr().err
    output.failure(ApiError("no such machine", status_code=404, request_id="01ABC"))
    assert "01ABC" not in capsys.readouterr().err


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.failure(HawkerError("a\x1b[2Jb\rc"))
    output.table(["name"], [["\x1b]0;x\x07[red]"]])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out
    assert shown.err == "error: a\\x1b[2Jb\\rc\n"
    assert "[red]" in shown.out, "and markup is text"


FAULT = "import sys; from hawker.cli import main; main.COMMANDS['apps'] = ('hawker.cli.apps:gone', ''); "
"""A fault inside the program, made by naming a command that is not there."""


@pytest.mark.parametrize("debug", ["", "1"])
def test_an_unexpected_fault_is_a_sentence_and_a_traceback_only_when_asked_for(debug: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAULT + "main.main(['apps', 'list'])"],
        env=environment({"HAWKER_DEBUG": debug}),
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert ended.returncode == 1
    if debug:
        assert "Traceback" in ended.stderr
    else:
        first, second = ended.stderr.splitlines()
        assert first.startswith("error: a fault of hawker's own: AttributeError")
        assert "HAWKER_DEBUG=1" in second


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"]])
def test_a_full_disk_behind_the_output_is_told(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), timeout=ENDS_S
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: No space left on device\n"


def test_a_reader_that_goes_away_is_no_error_to_talk_about() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "machine", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(ENDS_S) == 1


def test_ctrl_c_ends_quietly_with_status_130() -> None:
    """While it waits for a market that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(ENDS_S)
        env = environment({"HAWKER_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HAWKER_TOKEN": "t"})
        process = subprocess.Popen(
            [*PROGRAM, "apps", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        connection, _ = server.accept()
        with connection:
            connection.settimeout(ENDS_S)
            assert connection.recv(10)  # it has asked, and waits
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=ENDS_S)
    assert process.returncode == 130
    assert out + err.strip() == ""


@pytest.mark.parametrize("program", [PROGRAM, (sys.executable, "-c", "from hawker.__main__ import main; main()")])
def test_ctrl_c_is_quiet_while_the_program_is_still_being_loaded(program: tuple[str, ...], tmp_path: Path) -> None:
    """As whoever notices the mistake at once. The library that it is held up at is not ours."""
    waiting = "import sys, time\nsys.stdout.write('here')\nsys.stdout.flush()\ntime.sleep(60)\n"
    (tmp_path / "click.py").write_text(waiting)
    process = subprocess.Popen(
        [*program, "apps", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": str(tmp_path)}),
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == "here"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=ENDS_S)
    assert (process.returncode, err) == (-signal.SIGINT, ""), "which a shell takes for 130"


CLOSED = [">&-", "2>&-", "<&-", ">&- 2>&-", ">&- 2>&- <&-"]


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [(("--help",), each) for each in CLOSED] + [(("apps", "list"), each) for each in CLOSED] + [(("doctor",), ">&-")],
)
def test_what_was_closed_is_written_to_nobody(arguments: tuple[str, ...], closed: str) -> None:
    status = {"--help": (0,), "doctor": (0, 1), "apps": (1,)}[arguments[0]]  # a host may lack something
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, *arguments]
    ended = subprocess.run(shell, capture_output=True, text=True, env=environment(), timeout=ENDS_S)
    assert ended.returncode in status, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "a fault of hawker's own" not in ended.stderr


def test_what_the_terminal_s_characters_cannot_say_is_shown_by_its_code() -> None:
    value = {"a": "\u00e9 \u2603 \U0001f600"}
    text = f"""
from hawker.cli import output
output.prepare()
output.say({value["a"]!r})
output.passed_on({value["a"]!r} + "\\n")
output.table(["name"], [[{value["a"]!r}]])
output.line({value!r})
output.data({value!r})
"""
    ended = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        env=environment({"PYTHONIOENCODING": "latin-1"}),
        timeout=ENDS_S,
        check=True,
    )
    said, passed_on, _, cell, line, *data = ended.stdout.decode("latin-1").splitlines()
    assert said == passed_on == cell == "\u00e9 \\u2603 \\U0001f600"
    assert json.loads(line) == json.loads("".join(data)) == value


def test_an_argument_that_is_no_text_is_named() -> None:
    """As from a terminal that is not one for UTF-8."""
    argv = [*map(str.encode, PROGRAM), b"apps", b"show", b"caf\xe9"]
    env = environment({"HAWKER_ENDPOINT": "http://127.0.0.1:1", "HAWKER_TOKEN": "t"})
    ended = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=ENDS_S)
    assert ended.returncode == 2
    assert ended.stderr.startswith('error: argument: "caf\\udce9" is not valid: it is not written in UTF-8')


def test_nothing_given_shows_the_help() -> None:
    ended = hawker()
    assert ended.status == 2
    assert "Commands:" in ended.err
