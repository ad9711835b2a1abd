"""A supervisor that was started by another version of the daemon: what it can be asked, and when another takes its
place.

It is replaced as soon as nothing runs under it: the daemon kills it, which harms no machine and loses nothing, because
its files say what has ended. Until then it gets the calls that it understands, and the others are refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hawker.supervisor.calls import MakeContainer, MakeTree, Request, Start
from hawker.supervisor.protocol import PROTOCOL, features, needed
from hawker.worker.drivers.base import StartFailed

ENDED_S = 5.0


class RunningSupervisor(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor that a daemon is connected to, as its hello says."""

    pid: int
    protocol: int = 0
    features: frozenset[str] = frozenset()
    instances: Sequence[Mapping[str, Any]] = ()

    def outdated(self, options: Sequence[str]) -> bool:
        """Whether one that was started now, with these options, could do more, or means other things."""
        return self.protocol != PROTOCOL or not self.features.issuperset(features(options))

    def check(self, request: Request) -> None:
        """Raises `StartFailed` for a call that it does not understand. It understands those about machines that run."""
        lacking = needed(request) - self.features
        if isinstance(request, Start | MakeContainer | MakeTree) and self.protocol not in (0, PROTOCOL):
            lacking.add(f"protocol {PROTOCOL}")
        if lacking:
            raise StartFailed(
                f"the supervisor (process {self.pid}) is of another version than this worker and cannot do this: it "
                f"lacks {', '.join(sorted(lacking))}. It is replaced as soon as no machine runs under it: stop or move "
                "those that do"
            )

    async def end(self) -> None:
        """Kill it. Returns once it is gone, or after a while."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            async with asyncio.timeout(ENDED_S):
                await gone.wait()
        except (ProcessLookupError, TimeoutError):
            pass  # whoever connects next finds out
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)


def runs_nothing(instances: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing runs under the supervisor that has these instances."""
    return all(shown["exit"] for shown in instances)
