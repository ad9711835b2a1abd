"""The agents' log lines as events of a simulation: each with the node that wrote it, none on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog

from hawker.sim.platform.processes import PROCESS
from hawker.sim.platform.record import Record


@contextmanager
def logs_into(record: Record, hear: Callable[[str, str, dict[str, Any]], None] | None = None) -> Iterator[None]:
    """Until the block ends, every line of every logger is noted in `record`, and nothing else is done with it.

    `hear` is told its process, event and fields.
    """

    def note(logger: Any, level: str, fields: Any) -> Any:
        process = PROCESS.get()
        if process is not None and not process.dead:
            event = fields.pop("event", "")
            if fields.pop("exc_info", None):
                fields["error"] = repr(sys.exc_info()[1])
            text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("", None))
            record.note("log", process.name, f"{event} {text}")
            if hear:
                hear(process.name, event, fields)
        raise structlog.DropEvent

    handler = _Handler(note)
    server = logging.getLogger("uvicorn.error")
    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    propagates, server.propagate = server.propagate, False
    server.addHandler(handler)
    try:
        yield
    finally:
        server.removeHandler(handler)
        server.propagate = propagates
        structlog.configure(**before)


class _Handler(logging.Handler):
    """The HTTP server's own log: nothing of it is expected."""

    def __init__(self, note: Callable[[Any, str, Any], Any]) -> None:
        super().__init__()
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        with suppress(structlog.DropEvent):
            self._note(
                None,
                "",
                {"event": f"uvicorn.{record.levelname.lower()}", "text": record.getMessage(), "error": repr(error)},
            )
