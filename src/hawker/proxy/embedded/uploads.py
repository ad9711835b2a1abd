"""Watches requests' bodies that are still on their way: what slow senders may take from others.

A request counts to its machine's hard limit from when it is sent there until it is answered, and a client that sends a
byte a minute would hold that for hours. So a body that is short enough to be kept is there before a machine is chosen,
as nginx has it. The others are watched:

- A body of which is known how long it is, and that comes slower than a modem (`upload_least`), is given up, as Kestrel,
  IIS and Apache do. One without a length may be a stream on which there is nothing to say; and so may be any of a
  service that speaks HTTP/2, such as gRPC.
- Where requests wait because a machine is full, those that wait have the places of bodies that come slowly
  (`upload_crowded`), the slowest first. As long as nobody waits, a slow body is in nobody's way.

Times when it is the machine that takes nothing do not count.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from hawker.proxy.base import Refused, ServicePort
from hawker.proxy.embedded.settings import Settings

LEAN_MOST = 4
"""In so many looks in a row a body may be too slow: with looks every 5 seconds as long as Apache waits (20 s)."""


class Sender(Protocol):
    """A request whose body is not complete."""

    @property
    def app(self) -> str: ...

    @property
    def port(self) -> ServicePort | None: ...

    @property
    def answered(self) -> bool:
        """Its answer has begun: the app talks with it."""
        ...

    @property
    def others(self) -> int:
        """How many requests wait for room at the machine that this one has; 0 while it has none."""
        ...

    def refuse(self, refusal: Refused) -> None: ...


class Upload:
    """One body. `awaited`: no machine is chosen before the body is complete. `held`: nobody reads more of it now.
    `came` counts the bytes that came since it is watched."""

    __slots__ = ("awaited", "came", "held", "lean", "rate", "seen", "sender", "since", "sized")

    def __init__(self, sender: Sender, now: float, *, sized: bool, awaited: bool) -> None:
        self.sender = sender
        self.sized = sized
        self.awaited = awaited
        self.held = False
        self.came = self.seen = 0
        self.since = now
        self.rate = math.inf
        self.lean = 0

    def look(self, now: float, least: float) -> None:
        """Note how fast the body came since the look before."""
        if self.held:
            self.rate, self.lean = math.inf, 0
        else:
            self.rate = (self.came - self.seen) / (now - self.since)
            self.lean = self.lean + 1 if self.rate < least else 0
        self.since, self.seen = now, self.came


class Uploads:
    """All bodies that a data plane watches."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._under_way: dict[Upload, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, sender: Sender, *, sized: bool, awaited: bool) -> Upload:
        """Watch a body. The caller drops it when the body is complete, or its request over."""
        upload = Upload(sender, self._loop.time(), sized=sized, awaited=awaited)
        self._under_way[upload] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._settings.upload_look_s, self._look)
        return upload

    def drop(self, upload: Upload) -> None:
        self._under_way.pop(upload, None)
        if not self._under_way and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        settings, now = self._settings, self._loop.time()
        self._timer = self._loop.call_later(settings.upload_look_s, self._look)
        slow: list[Upload] = []
        for upload in list(self._under_way):
            if now - upload.since < settings.upload_look_s / 2:
                continue  # it has only begun
            upload.look(now, settings.upload_least)
            if upload.sender.answered:
                continue
            if upload.lean >= LEAN_MOST and upload.sized and not _streams(upload.sender.port):
                self._end(upload, f"its body came slower than {settings.upload_least:g} bytes/s")
            elif upload.rate < settings.upload_crowded:
                slow.append(upload)
        self._make_room(slow)

    def _make_room(self, slow: list[Upload]) -> None:
        """End slow bodies where other requests wait for the room that these have."""
        in_the_way = [(upload, upload.sender.others) for upload in slow if upload.sender.others]
        waiting: dict[str, int] = {}
        for upload, others in in_the_way:
            waiting[upload.sender.app] = max(others, waiting.get(upload.sender.app, 0))
        for upload, _ in sorted(in_the_way, key=lambda each: each[0].rate):
            app = upload.sender.app
            if waiting[app]:
                waiting[app] -= 1
                self._end(upload, "its body comes slowly, and others wait for its place")

    def _end(self, upload: Upload, problem: str) -> None:
        self.drop(upload)
        upload.sender.refuse(Refused(408, "PH03", f"the request was given up: {problem}"))


def _streams(port: ServicePort | None) -> bool:
    return port is not None and port.h2_backend
