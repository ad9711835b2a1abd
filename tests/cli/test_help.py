"""What the command tells about itself, and how soon."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from tests.cli.programs import environment, hawker

import hawker as package
from hawker.cli.machines import STATES
from hawker.cli.main import COMMANDS, root
from hawker.model.machine import State

HEAVY = ("asyncio", "http.client", "ssl", "email", "tempfile", "logging", "xml")
"""Of the standard library: each takes longer than all of the help."""
LIGHT = {"hawker", "hawker.errors", "hawker.cli"}


def commands(group: click.Group = root, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    ctx = click.Context(group, info_name="hawker")
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["machine", "--help"], ["machine", "run", "--help"], ["workers", "--help"]]
)
def test_help_appears_at_once_for_it_imports_little(arguments: list[str]) -> None:
    text = f"""
import sys
before = set(sys.modules)
from hawker.cli.main import run
status = run({arguments!r})
print(sorted(sys.modules.keys() - before))
sys.exit(status)
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment(), check=True)
    loaded = ast.literal_eval(ended.stdout.splitlines()[-1])
    assert "hawker.cli.main" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {"hawker", "click"}
    ours = {name for name in loaded if name.startswith("hawker")}
    assert {name for name in ours if not name.startswith("hawker.cli.")} == LIGHT


def test_the_first_help_says_of_each_command_what_the_command_says_of_itself() -> None:
    ctx = click.Context(root)
    for name, (_, line) in COMMANDS.items():
        command = root.get_command(ctx, name)
        assert command is not None
        assert line.rstrip(".") == command.get_short_help_str(limit=200).rstrip("."), name


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_has_help(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from hawker.cli.main import run

    assert run([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    usage, _, rest = shown.partition("\n\n")
    assert usage.startswith(f"Usage: hawker {' '.join(path)}")
    assert rest.strip()[0].isupper(), "the help begins with a sentence"


def test_the_states_to_choose_from_are_those_there_are() -> None:
    assert list(STATES) == [state.value for state in State]


def test_the_version_is_the_packages() -> None:
    assert hawker("--version").out == f"hawker {package.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_the_shell_can_read(shell: str) -> None:
    script = hawker("completion", shell)
    assert script.status == 0
    assert "_HAWKER_COMPLETE" in script.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script.out, text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("ma", ["machine"]),
        ("machine st", ["status", "start", "stop"]),
        ("machine run --sk", ["--skip-launch"]),
        ("completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_commands_and_options_are_completed(typed: str, expected: list[str]) -> None:
    assert completed(typed) == expected


def test_without_a_market_names_are_not_completed_and_nothing_is_said(tmp_path: object) -> None:
    assert completed("machine status ", HAWKER_HOME=f"{tmp_path}/none") == []


def completed(typed: str, **env: str) -> list[str]:
    words = f"hawker {typed}"
    env = {**env, "_HAWKER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ended = hawker(env=env)
    assert ended.err == ""
    return [line.partition(",")[2] for line in ended.out.splitlines() if line]
