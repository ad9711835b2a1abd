"""Everything that the command line prints: only this module writes to standard output and standard error.

For people: sentences, fields and tables. For programs: JSON, whole and unchanged, and on errors the API's error form. A
table that does not go to a terminal is not fitted to any width, so that `grep` and `cut` see whole lines.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import cycle
from typing import Any, TextIO

import click

from hawker.errors import HawkerError

PROGRESS_AFTER_S = 1.0
_FRAME_S = 0.1
_ERASE_LINE = "\r\x1b[2K"
_COLOUR, _COLOUR_END = re.compile(r"(\x1b\[[0-9;:]*m)"), "\x1b[0m"
_WIDE = 10_000  # columns; wider than any row


class Form:
    """How this run of the program writes: `json` for programs. Set by the option of the command that was called."""

    json = False


def prepare() -> None:
    """Have somewhere to write to, whoever started us: what goes to one that was closed goes nowhere, and what the
    terminal's characters cannot show is shown by its code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:  # its number, which is the lowest that is free, would be the next connection's
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))
        elif mode == "w" and isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


# --- for people ------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line on standard output. Characters that would steer the terminal are shown by their codes."""
    click.echo(_plain(text))


def passed_on(text: str, *, err: bool = False) -> None:
    """What somebody else's program wrote, unchanged and without a line end of ours."""
    click.echo(text, nl=False, err=err)


def logged(lead: str, text: str) -> None:
    """A line that somebody's program logged, behind our `lead`. On a terminal its colours and tabs stay; whatever else
    would steer the terminal, such as a carriage return that hides the lead or a title, is shown by its code."""
    if sys.stdout.isatty():
        parts = _COLOUR.split(text)
        parts[::2] = [part if part.isprintable() else "\t".join(map(_plain, part.split("\t"))) for part in parts[::2]]
        text = "".join(parts) + (_COLOUR_END if len(parts) > 1 else "")
    passed_on(f"{lead}{text}\n")


def note(text: str) -> None:
    """A line on standard error, beside the result."""
    click.echo(_plain(text), err=True)


def fields(pairs: Sequence[tuple[str, object]]) -> None:
    """Names and values under each other."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        say(f"{name:<{width}}  {value}")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, err: bool = False) -> None:
    """A table; numbers stand to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream: TextIO = sys.stderr if err else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _WIDE, highlight=False)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        cells = [row[number] for row in rows if row[number] not in (None, "")]
        right = bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)
        shown.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(_plain(cell(value))) for value in row))
    with console.capture() as capture:
        console.print(shown)
    for line in capture.get().splitlines():
        click.echo(line.rstrip(), file=stream)


def cell(value: object) -> str:
    """A value as tables show it."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def silent(workers: Sequence[str], lacking: str = "") -> None:
    """A note on the workers that did not answer, and on what is `lacking` because of that. Nothing when all did."""
    if workers:
        note(f"these workers did not answer{lacking and ', ' + lacking}: {', '.join(workers)}")


def ids(values: Iterable[str]) -> None:
    """One a line, for `$(...)` and `xargs`."""
    for value in values:
        say(value)


# --- for programs ----------------------------------------------------------------------------------------------------


def data(value: Any) -> None:
    """JSON on standard output."""
    click.echo(_json(value))


def line(value: Any) -> None:
    """JSON on a line of standard output, of many."""
    import msgspec

    click.echo(_carried(msgspec.json.encode(value).decode()))


def _json(value: Any) -> str:
    import msgspec

    return _carried(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _carried(text: str) -> str:
    """JSON as the output carries it: what its characters cannot say is escaped as JSON has it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        import json

        return re.sub(r"[^\x00-\x7f]", lambda one: json.dumps(one[0])[1:-1], text)
    return text


# --- errors ----------------------------------------------------------------------------------------------------------


def failure(error: HawkerError, form: Form | None = None) -> None:
    """One sentence, the workers' reasons where an order was refused, and what to try. On standard error."""
    if form and form.json:
        click.echo(_json(error.body()), err=True)
        return
    word = getattr(error, "word", "")  # some of the API's sentences begin with it, for programs
    note(f"error: {error.message.removeprefix(f'{word}: ')}")
    refusals = error.details.get("refusals") if isinstance(error.details, dict) else None
    if refusals:
        columns = ("worker", "reason", "resource", "wanted", "free")
        table(columns, [[_word(refusal.get(name)) for name in columns] for refusal in refusals], err=True)
    for hint in error.hint.splitlines():
        note(f"  try: {hint}")
    request = getattr(error, "request_id", "")
    if request and getattr(error, "status_code", 0) >= 500:
        note(f"  the market's logs call this request {request}")


def _word(value: Any) -> Any:
    return value.replace("_", " ") or None if isinstance(value, str) else value


# --- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error that something goes on, once it has taken a second, and takes it away again. Only on a
    terminal. What it gives takes notes meanwhile."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield note
        return

    def interject(text: str) -> None:
        sys.stderr.write(_ERASE_LINE)
        note(text)

    done = threading.Event()
    thread = threading.Thread(target=_spin, args=(text, done), name="progress", daemon=True)
    thread.start()
    try:
        yield interject
    finally:
        done.set()
        thread.join()


def _spin(text: str, done: threading.Event) -> None:
    waited = PROGRESS_AFTER_S
    if done.wait(waited):
        return
    for frame in cycle("|/-\\"):
        sys.stderr.write(f"{_ERASE_LINE}{frame} {text}, {waited:.0f} s")
        sys.stderr.flush()
        waited += _FRAME_S
        if done.wait(_FRAME_S):
            break
    sys.stderr.write(_ERASE_LINE)
    sys.stderr.flush()


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """Progress bars on standard error, one for each name, while the block runs: call what it gives with a name, how
    many bytes of how many are done, and what goes on. Only on a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield lambda name, done, total, doing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[doing]}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:

        def show(name: str, done: int, total: int, doing: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(_plain(name), total=None, doing="")
            progress.update(tasks[name], completed=done, total=total or None, doing=_plain(doing))

        yield show
