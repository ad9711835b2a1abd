"""Talking to a command inside a machine: this terminal, or this program's input and output, become the command's.

A thread prints what the command writes, as it comes; the main thread passes input on, so that signals find it: a
terminal that changes its size, Ctrl-C where there is no terminal in between.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from hawker.cli import calls
from hawker.errors import DeadlineExceeded, HawkerError, Unreachable
from hawker.model import inside_api

if TYPE_CHECKING:
    from hawker.cli.session import Session
    from hawker.client.client import Client, Stream

_PIECE_BYTES = 32 << 10
_ENDED, _RESIZED = b"e", b"r"
TIMED_OUT = 124


@dataclass
class Ended:
    """How a command ended; `stdout` and `stderr` only where they were kept. One that was killed at its time-out has
    no exit code of its own."""

    exit_code: int = 0
    exit_signal: int = 0
    timed_out: bool = False
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    @property
    def status(self) -> int:
        """The exit status as a shell shows it, or as timeout(1) does."""
        if self.timed_out:
            return TIMED_OUT
        return 128 + self.exit_signal if self.exit_signal else self.exit_code


def talk(
    session: Session,
    app: str,
    machine: str,
    command: Sequence[str],
    *,
    tty: bool = False,
    feed: bool = False,
    keep: bool = False,
    timeout_s: float | None = None,
) -> Ended:
    """Run a command beside a machine's program up to its end. `tty`: with a terminal, this one if there is one; `feed`:
    it gets this program's input; `keep`: its output is not printed.

    However this ends, the command has ended and the terminal is as it was: Ctrl-C ends it, too, but with `tty` goes to
    it.
    """
    client = session.client
    columns, rows = _window()
    env = {"TERM": os.environ["TERM"]} if tty and os.environ.get("TERM") else {}
    opened = client.send(
        calls.OpenSession(app, machine, command=list(command), tty=tty, columns=columns, rows=rows, env=env)
    )
    running = opened.id
    done = False
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ended_in_order())
            pieces = stack.enter_context(client.stream(calls.ReadSession(app, machine, running)))
            wake_out, wake_in = os.pipe()
            stack.callback(os.close, wake_out)
            stack.callback(os.close, wake_in)
            reader = _Reader(pieces, wake_in, keep)
            stack.callback(reader.stop)
            raw = tty and feed and sys.stdin.isatty()
            if raw:
                stack.enter_context(_raw_terminal())
                stack.enter_context(_told_of_sizes(wake_in))
            reader.start()
            talking = _Talking(client, (app, machine, running), wake_out)
            try:
                talking.go_on(feed, monotonic() + timeout_s if timeout_s else None)
            except DeadlineExceeded:
                return reader.at_time_out()
            done = True
        return reader.result()
    finally:
        if not done:
            with contextlib.suppress(HawkerError):  # it ends by itself when nobody reads
                client.send(calls.CloseSession(app, machine, running))


class _Talking:
    def __init__(self, client: Client, names: tuple[str, str, str], wake: int) -> None:
        self._client = client
        self._names = names
        self._wake = wake

    def go_on(self, feed: bool, deadline: float | None) -> None:
        """Until the command has ended. Raises `DeadlineExceeded`."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        stdin = sys.stdin.fileno() if feed else -1
        if feed:
            poll.register(stdin, select.POLLIN)
        else:
            self._write(b"", end=True)
        while True:
            wait_ms = None if deadline is None else max(0, round((deadline - monotonic()) * 1000))
            ready = dict(poll.poll(wait_ms))
            if not ready:
                raise DeadlineExceeded("deadline_exceeded")
            if self._wake in ready:
                told = os.read(self._wake, 64)
                if _ENDED in told:
                    return
                if _RESIZED in told:
                    with contextlib.suppress(HawkerError):  # it has just ended
                        self._client.send(calls.ResizeSession(*self._names, *_window()))
            if stdin in ready:
                data = os.read(stdin, _PIECE_BYTES)
                self._write(data, end=not data)
                if not data:
                    poll.unregister(stdin)

    def _write(self, data: bytes, *, end: bool) -> None:
        from hawker.client.client import ApiError

        try:
            self._client.send(calls.WriteSession(*self._names, data, end=end))
        except ApiError as error:
            if error.status_code != 404:  # it has just ended: the reader hears of it
                raise


class _Reader(threading.Thread):
    """Takes the frames as they come. Whatever ends it is told through `wake`."""

    def __init__(self, pieces: Stream[bytes], wake: int, keep: bool) -> None:
        super().__init__(name="output of the command", daemon=True)
        self._pieces = pieces
        self._wake = wake
        self._keep = keep
        self._ended = Ended()
        self._complete = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self._error = error
        finally:
            with contextlib.suppress(OSError):
                os.write(self._wake, _ENDED)

    def stop(self) -> None:
        self._pieces.wake()
        if self.is_alive():
            self.join()

    def result(self) -> Ended:
        """Raises what ended the stream before the command did."""
        if self._complete:
            return self._ended
        raise self._error or Unreachable("the command's output broke off before its end")

    def at_time_out(self) -> Ended:
        """What it has written until now; it is still to be killed."""
        self._ended.timed_out = True
        return self._ended

    def _read(self) -> None:
        held = bytearray()
        for piece in self._pieces:
            held += piece
            for kind, data in inside_api.frames(held):
                if kind == inside_api.KIND_END:
                    end = msgspec.json.decode(data, type=inside_api.SessionEnd)
                    self._ended.exit_code, self._ended.exit_signal = end.exit_code, end.exit_signal
                    self._complete = True
                    return
                self._take(kind, data)

    def _take(self, kind: int, data: bytes) -> None:
        if kind not in (inside_api.KIND_STDOUT, inside_api.KIND_STDERR):
            return
        if self._keep:
            kept = self._ended.stderr if kind == inside_api.KIND_STDERR else self._ended.stdout
            kept += data
            return
        stream = sys.stderr if kind == inside_api.KIND_STDERR else sys.stdout
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the command, Ctrl-C too. The terminal is as it was afterwards."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is kept
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Signals that would end this program at once, and leave its terminal raw, end it as an error does."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in found.items() if handler is signal.SIG_DFL}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _told_of_sizes(wake: int) -> Iterator[None]:
    before = signal.signal(signal.SIGWINCH, lambda number, frame: os.write(wake, _RESIZED) and None)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def _window() -> tuple[int, int]:
    """Columns and rows of this terminal; 80 and 24 where there is none."""
    for stream in (sys.__stdout__, sys.__stdin__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]  # None is an AttributeError
            if size.columns and size.lines:
                return size.columns, size.lines
    return 80, 24
