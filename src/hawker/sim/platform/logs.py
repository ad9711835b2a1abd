"""The agents' log lines as events of a simulation: each with the node that wrote it, none on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hawker import telemetry
from hawker.sim.platform.processes import PROCESS
from hawker.sim.platform.record import Record


@contextmanager
def logs_into(record: Record, hear: Callable[[str, str, dict[str, Any]], None] | None = None) -> Iterator[None]:
    """Until the block ends, every line of every logger is noted in `record`, and nothing else is done with it.

    `hear` is told its process, event and fields.
    """

    def note(level: str, event: str, fields: dict[str, Any]) -> None:
        process = PROCESS.get()
        if process is not None and not process.dead:
            if error := fields.pop("exc_info", None):
                fields["error"] = repr(error)
            text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("", None))
            record.note("log", process.name, f"{event} {text}")
            if hear:
                hear(process.name, event, fields)

    handler = _Handler(note)
    server = logging.getLogger("uvicorn.error")
    propagates, server.propagate = server.propagate, False
    server.addHandler(handler)
    try:
        with telemetry.logs_into(note):
            yield
    finally:
        server.removeHandler(handler)
        server.propagate = propagates


class _Handler(logging.Handler):
    """Notes the HTTP server's own log, which should stay empty."""

    def __init__(self, note: telemetry.Sink) -> None:
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        level, error = record.levelname.lower(), record.exc_info[1] if record.exc_info else None
        self._note(level, f"uvicorn.{level}", {"text": record.getMessage(), "error": repr(error)})
