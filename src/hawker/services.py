"""What an agent or a worker starts: services, opened in order and closed in reverse.

A part that opens, closes, serves calls or measures something is a `Service`. Its constructor gets all that it needs, so
whoever puts an agent or a worker together writes a list; `opened` starts the list. The simulator starts the same list.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Protocol

from hawker.http.handlers import Route
from hawker.telemetry import Metrics


class Service(Protocol):
    """One part of an agent or of a worker. A class that derives from it overrides what it has: by default a service
    opens and closes nothing, serves nothing and measures nothing."""

    async def open(self) -> None:
        """Start. When this raises, the service has left nothing behind, and `close` is not called."""
        return None

    async def close(self) -> None:
        """End what `open` has started. What may outlive this process, such as machines, goes on."""
        return None

    def routes(self) -> Iterable[Route]:
        """Declared calls and what answers them (`hawker.http.handlers`)."""
        return ()

    def measure(self, metrics: Metrics) -> None:
        """Set the gauges that show this service, just before somebody reads the metrics."""
        return None


async def opened(services: Iterable[Service]) -> AsyncExitStack:
    """Open the services in order. Closing the stack closes them in reverse. When one cannot be opened, those before it
    are closed and its error is raised."""
    async with AsyncExitStack() as stack:
        for service in services:
            await service.open()
            stack.push_async_callback(service.close)
        return stack.pop_all()
