"""Keeps connections of HTTP/2 to machines, by their address."""

from __future__ import annotations

import asyncio

from hawker.proxy.base import Address
from hawker.proxy.embedded.h2_upstream import UpstreamLink, UpstreamStream
from hawker.proxy.embedded.pool import Attempts
from hawker.proxy.embedded.settings import Settings


class H2Pool:
    """Connections by address, each with room for many requests."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._links: dict[Address, list[UpstreamLink]] = {}
        self._attempts = Attempts(settings, loop)
        self._opening: dict[Address, asyncio.Task[UpstreamLink]] = {}
        self._closed = False
        self.opened = 0

    def take(self, address: Address, repeatable: bool) -> UpstreamStream | None:
        for link in self._links.get(address, ()):
            stream = link.stream()
            if stream is not None:
                return stream
        return None

    async def connect(self, address: Address) -> UpstreamStream:
        """A stream on a new connection, which all share that ask at the same time. Raises `OSError`, `TimeoutError`."""
        while True:
            opening = self._opening.get(address)
            if opening is None:
                opening = self._opening[address] = self._loop.create_task(self._open(address))
                opening.add_done_callback(_look)
            try:
                link = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_unwanted)
                raise
            stream = link.stream()
            if stream is not None:
                return stream
            if link.ended:
                raise ConnectionResetError("it closed the connection at once")
            if link.closing or not link.streams:
                link.close()
                raise ConnectionResetError("it takes no requests on its connections")

    def forget(self, link: UpstreamLink) -> None:
        """This connection takes no more requests."""
        links = self._links.get(link.address)
        if links is not None and link in links:
            links.remove(link)
            if not links:
                del self._links[link.address]

    def let_go(self, address: Address) -> None:
        """The machine there is put to rest: connections are closed once nothing is under way on them."""
        self._attempts.end(address)
        for link in list(self._links.get(address, ())):
            link.close()

    def unanswered(self) -> dict[Address, float]:
        """Does the same as `Pool`'s."""
        now, found = self._loop.time(), dict[Address, float]()
        for address in self._links:
            if seconds := max((each.unanswered_s(now) for each in self._streams(address)), default=0.0):
                found[address] = seconds
        return found

    def give_up(self, address: Address, problem: str, waited_s: float, every: bool) -> None:
        """As of `Pool`."""
        now = self._loop.time()
        for stream in self._streams(address):
            if every or stream.unanswered_s(now) >= waited_s:
                stream.give_up(problem, every)

    def _streams(self, address: Address) -> list[UpstreamStream]:
        streams = [stream for link in self._links.get(address, ()) for stream in link.streams.values()]
        return [stream for stream in streams if isinstance(stream, UpstreamStream)]

    def close(self) -> None:
        self._closed = True
        for links in list(self._links.values()):
            for link in list(links):
                link.close()

    async def _open(self, address: Address) -> UpstreamLink:
        try:
            async with self._attempts.one(address):
                _, link = await self._loop.create_connection(
                    lambda: UpstreamLink(address, self.forget, self._settings, self._loop), *address
                )
                try:
                    await link.ready
                except asyncio.CancelledError:
                    link.abort()
                    raise
        finally:
            del self._opening[address]
        self.opened += 1
        if not self._closed:
            self._links.setdefault(address, []).append(link)
        return link


def _look(opening: asyncio.Task[UpstreamLink]) -> None:
    """Look at how the attempt ended: perhaps all that waited for it are gone, and nobody else does."""
    if not opening.cancelled():
        opening.exception()


def _unwanted(opening: asyncio.Task[UpstreamLink]) -> None:
    """One that waited for the connection is gone; it is closed as an unused one unless another takes it."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().rest()
