"""`hawker logs`: what all machines of an app write, merged by time.

Each machine's log is a stream of its own, read by a thread. Lines wait a moment before they are printed, so that those
of other machines can go before them. Machines that come later are found by looking.
"""

from __future__ import annotations

import heapq
import queue
import sys
import threading
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import click

from hawker.cli import calls, output
from hawker.cli.params import app_option, region_option
from hawker.cli.session import Session, about_app, app_of, market_command
from hawker.errors import HawkerError, NotFound

if TYPE_CHECKING:
    from hawker.model.api import Machine

LOOK_S = 1.0
"""How often it is looked for machines that are new."""
MERGE_S = 0.1
"""How long a line waits for older ones."""
HISTORY_S = 0.4
"""When nothing has come for so long, all that was written before has come."""
HISTORY_MOST_S = 2.0
NEW_TAIL = 10_000
AGAIN_S = (0.2, 0.5, 1.0, 2.0)
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


class Line(NamedTuple):
    """Sorts by time; `number` keeps the order of lines of one moment."""

    at: str
    number: int
    machine: Machine
    stream: str
    text: str


@click.command()
@app_option("The app.", required=True)
@region_option("Only machines of this region.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, also of new machines, until Ctrl-C.")
@click.option(
    "--tail",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    metavar="LINES",
    help="How many lines at most.",
)
@market_command
def logs(session: Session, app: str, region: str | None, follow: bool, tail: int) -> None:
    """Print what all machines of an app write, in one stream.

    Each line begins with its time, the machine's region and id, and ! if it was written to standard error. With --json
    each line is an object.
    """
    with about_app():
        found, silent = session.machines(app, region=region)
    output.silent(silent, "their machines are not followed")
    if not found and not follow:
        where = f" in {region}" if region else ""
        raise NotFound(f"app {app} has no machines{where}", hint=f"hawker machine run --app {app} ...")
    merging = _Merging(session, follow=follow)
    try:
        for machine in found:
            merging.add(machine, tail)
        merging.history(tail)
        if follow:
            merging.go_on(app, region)
    finally:
        merging.stop()


class _Merging:
    """Lines of many machines become one stream."""

    def __init__(self, session: Session, *, follow: bool) -> None:
        self._session = session
        self._follow = follow
        self._lines: queue.SimpleQueue[Line | _Reader] = queue.SimpleQueue()  # a reader tells that it has ended
        self._waiting: list[Line] = []
        self._readers: dict[str, _Reader] = {}
        self._numbers = count()
        self._colours: dict[str, str] = {}

    def add(self, machine: Machine, tail: int) -> None:
        if machine.id in self._readers:
            return
        reader = _Reader(self._session, machine, tail, self._lines, self._numbers, follow=self._follow)
        self._readers[machine.id] = reader
        self._colours[machine.id] = COLOURS[len(self._colours) % len(COLOURS)]
        reader.start()

    def history(self, tail: int) -> None:
        """The last lines that were written before."""
        began, left = monotonic(), len(self._readers)
        while left and monotonic() - began < (HISTORY_MOST_S if self._follow else float("inf")):
            try:
                came = self._lines.get(timeout=HISTORY_S if self._follow else None)
            except queue.Empty:
                break
            if isinstance(came, Line):
                heapq.heappush(self._waiting, came)
            else:
                left -= 1
        lines, self._waiting = sorted(self._waiting), []
        for line in lines[-tail:] if tail else ():
            self._print(line)
        sys.stdout.flush()
        self._troubles()

    def go_on(self, app: str, region: str | None) -> None:
        look_at = monotonic() + LOOK_S
        while True:
            self._take(max(0.0, look_at - monotonic()))
            if monotonic() < look_at:
                continue
            try:
                for machine in self._session.machines(app, region=region)[0]:
                    self.add(machine, NEW_TAIL)
            except HawkerError as error:
                if getattr(error, "status_code", 500) < 500:  # else the broker is away for a while
                    raise
            look_at = monotonic() + LOOK_S

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.stop()

    def _take(self, wait_s: float) -> None:
        """What comes within `wait_s` from the first line on, in order."""
        until = monotonic() + wait_s
        while (left := until - monotonic()) > 0:
            try:
                came = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(came, Line):
                if not self._waiting:
                    until = monotonic() + MERGE_S
                heapq.heappush(self._waiting, came)
        while self._waiting:
            self._print(heapq.heappop(self._waiting))
        sys.stdout.flush()
        self._troubles()

    def _troubles(self) -> None:
        for reader in self._readers.values():
            if reader.trouble is not None:
                output.note(f"machine {reader.machine.id}: {reader.trouble.message}")
                reader.trouble = None

    def _print(self, line: Line) -> None:
        machine = line.machine
        if self._session.json:
            told = {"timestamp": line.at, "region": machine.region, "machine": machine.id, "stream": line.stream}
            output.line({**told, "message": line.text})
            return
        who = click.style(f"{machine.region} {machine.id}", fg=self._colours[machine.id])
        sign = click.style("!", fg="red", bold=True) if line.stream == "stderr" else " "
        output.logged(f"{click.style(line.at, dim=True)} {who} {sign} ", line.text)


class _Reader(threading.Thread):
    """One machine's log. A stream that breaks off is taken up again after what was read."""

    def __init__(
        self,
        session: Session,
        machine: Machine,
        tail: int,
        lines: queue.SimpleQueue[Line | _Reader],
        numbers: count[int],
        *,
        follow: bool,
    ) -> None:
        super().__init__(name=f"log of {machine.id}", daemon=True)
        self.machine = machine
        self.trouble: HawkerError | None = None
        self._session = session
        self._tail = tail
        self._lines = lines
        self._numbers = numbers
        self._follow = follow
        self._stopped = threading.Event()
        self._last = ""  # time of the last line, and how many had that
        self._at_last = 0

    def run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            before = self._last, self._at_last
            try:
                self._read()
                break
            except HawkerError as error:
                status = getattr(error, "status_code", 500)  # without an answer it may come back, too
                if not self._follow or status < 500:
                    self.trouble = error if status != 404 else None  # destroyed
                    break
                failures = 0 if (self._last, self._at_last) != before else failures + 1
                self._tail = NEW_TAIL
                self._stopped.wait(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
        self._lines.put(self)

    def stop(self) -> None:
        self._stopped.set()

    def _read(self) -> None:
        skipped = 0
        last, at_last = self._last, self._at_last
        wanted = calls.FollowLogs(app_of(self.machine), self.machine.id, tail=self._tail, follow=self._follow)
        with (
            self._session.another_client() as client,
            client.stream(wanted) as lines,
        ):
            for line in lines:
                at = line.timestamp
                if at < last:
                    continue
                if at == last and skipped < at_last:
                    skipped += 1
                    continue
                self._at_last = self._at_last + 1 if at == self._last else 1
                self._last = at
                self._lines.put(Line(at, next(self._numbers), self.machine, line.stream, line.message))
                if self._stopped.is_set():
                    return
