"""The agents' log lines as events of a simulation: each with the node that wrote it, none on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from hawker.sim.loop import PROCESS
from hawker.sim.record import Record


@contextmanager
def logs_into(record: Record) -> Iterator[None]:
    """Until the block ends, every line of every logger is noted in `record`, and nothing else is done with it."""

    def note(logger: Any, level: str, fields: Any) -> Any:
        process = PROCESS.get()
        if process is not None and not process.dead:
            event = fields.pop("event", "")
            fields.pop("exc_info", None)
            text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in ("", None))
            record.note("log", process.name, f"{event} {text}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
