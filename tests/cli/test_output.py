"""Tables for people, JSON for programs, and signs of life on a terminal."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from tests.cli.programs import environment, on_terminal

from hawker.cli import output


def test_a_table_that_goes_to_a_program_is_not_fitted_to_any_width(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    output.table(["name", "count", "points"], [[long, 7, 0.5], ["b", None, 10.0]])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == "name" + " " * 498 + "count  points"
    assert first == f"{long}      7   0.500"
    assert second == "b" + " " * 505 + "-  10.000", "numbers stand to the right"


def test_fields_stand_under_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    output.fields([("id", 1), ("name", "web")])
    assert capsys.readouterr().out == "id    1\nname  web\n"


def test_data_is_json_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    output.data({"é": [1, None, "\x1b"]})
    assert capsys.readouterr().out == '{\n  "é": [\n    1,\n    null,\n    "\\u001b"\n  ]\n}\n'


LOGGED = "a\tred \x1b[31mred\x1b[0m \x1b]0;title\x07\rover\x1b[2J"


@pytest.mark.slow
def test_on_a_terminal_a_logged_line_keeps_its_colours_and_steers_nothing_else() -> None:
    shows = f"from hawker.cli.output import logged; logged('m1 ', {LOGGED!r})"
    ended = on_terminal("-c", shows, program=[sys.executable])
    assert ended.out == "m1 a\tred \x1b[31mred\x1b[0m \\x1b]0;title\\x07\\rover\\x1b[2J\x1b[0m\n"


def test_elsewhere_a_logged_line_is_what_the_program_wrote_without_its_colours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.logged("m1 ", LOGGED)
    assert capsys.readouterr().out == f"m1 {click.unstyle(LOGGED)}\n"


WORKS = """
import sys, time
from hawker.cli.output import working
with working("ordering"):
    time.sleep(float(sys.argv[1]))
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "shown"), [("0", False), ("1.3", True)])
def test_what_takes_more_than_a_second_shows_it_on_a_terminal_and_takes_it_away(seconds: str, shown: bool) -> None:
    ended = on_terminal("-c", WORKS, seconds, program=[sys.executable])
    assert ("ordering, 1 s" in ended.out) is shown
    assert ended.out.rpartition("\r\x1b[2K")[2] == "done\n"


@pytest.mark.slow
def test_without_a_terminal_nothing_moves() -> None:
    argv = [sys.executable, "-c", WORKS, "1.3"]
    ended = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=20, check=True)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
