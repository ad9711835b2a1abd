"""What a supervisor refuses, as the exceptions of drivers."""

from __future__ import annotations

from collections.abc import Mapping

from hawker.errors import Broken, Unreachable
from hawker.supervisor.protocol import HINDERED
from hawker.worker.drivers.base import InstanceRunning, NotSupported, Refused, StartFailed, UnknownInstance


class SupervisorLost(Unreachable):
    """The supervisor went away in the middle of a call. The call may be repeated: every call is idempotent."""

    def __init__(self) -> None:
        super().__init__("the supervisor of the machine went away in the middle of this; ask again")


class Hindered(Unreachable):
    """The supervisor met an error of its host, such as a full disk. Part of the call may have been carried out; it may
    be repeated."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the host hinders the supervisor of the machine: {problem}")


class RuntimeKilled(Exception):
    """A container's runtime was killed while it made one. Nothing is left of it; it may be tried again."""


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (UnknownInstance, InstanceRunning, StartFailed, NotSupported, Refused, RuntimeKilled)
} | {HINDERED: Hindered}


def told(answer: Mapping[str, str]) -> Exception:
    """The exception of an answer `{"error", "message"}`."""
    return _ERRORS.get(answer["error"], Broken)(answer["message"])
