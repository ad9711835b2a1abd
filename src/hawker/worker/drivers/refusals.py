"""What a supervisor refuses, as the exceptions of drivers."""

from __future__ import annotations

from collections.abc import Mapping

from hawker.errors import Broken
from hawker.worker.drivers.base import InstanceRunning, NotSupported, Refused, StartFailed, UnknownInstance


class SupervisorLost(Exception):
    """The supervisor went away in the middle of a request. The request may be repeated: every one is idempotent."""


class RuntimeKilled(Exception):
    """A container's runtime was killed while it made one. Nothing is left of it; it may be tried again."""


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (UnknownInstance, InstanceRunning, StartFailed, NotSupported, Refused, RuntimeKilled)
}


def told(answer: Mapping[str, str]) -> Exception:
    """The exception of an answer `{"error", "message"}`."""
    return _ERRORS.get(answer["error"], Broken)(answer["message"])
