"""A request's body as it comes, kept until the answer begins, so that it can be sent to another machine.

When more comes than may be kept, of this request or of its app's together, the body passes as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hawker.proxy.base import Header
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.uploads import Sender, Upload


class BodyBuffer:
    """`kept` are the pieces that came, `whole` says whether none is missing there. `upload` watches how fast the rest
    comes."""

    __slots__ = ("_app", "_bytes", "_context", "kept", "trailers", "upload", "whole")

    def __init__(self, context: PlaneContext) -> None:
        self._context = context
        self._app = ""  # that the bytes count for
        self._bytes = 0
        self.kept: list[bytes] = []
        self.trailers: Sequence[Header] = ()
        self.whole = True
        self.upload: Upload | None = None

    def watch(self, sender: Sender, app: str, *, sized: bool, awaited: bool) -> None:
        """Look from now on how fast the body comes. `awaited`: no machine is chosen before all of it is there, unless
        too much is kept already."""
        held = self.too_much(app)
        self.upload = self._context.uploads.watch(sender, sized=sized, awaited=awaited and not held)
        self.upload.held = held

    @property
    def awaited(self) -> bool:
        return self.upload is not None and self.upload.awaited

    def add(self, data: bytes, app: str) -> bool:
        """A piece came, for a request of this app. Returns whether more is kept now than may be."""
        if self.upload is not None:
            self.upload.came += len(data)
        if not self.whole:
            return False
        self.kept.append(data)
        self._count(len(data), app)
        return self.too_much(app)

    def end(self, trailers: Sequence[Header]) -> None:
        """All of it has come."""
        self.trailers = trailers
        if self.upload is not None:
            self._context.uploads.drop(self.upload)

    def too_much(self, app: str) -> bool:
        self._count(0, app)
        context = self._context
        return self._bytes > context.settings.replay_bytes or context.body_budget.too_much(app)

    def pass_on(self) -> None:
        """Keep nothing from here on: the request cannot be sent again."""
        self.whole = False
        self.release()

    def release(self) -> None:
        if self._bytes:
            self._context.body_budget.drop(self._app, self._bytes)
            self._bytes = 0
            self.kept = []

    def close(self) -> None:
        """The request is over."""
        if self.upload is not None:
            self._context.uploads.drop(self.upload)
        self.release()

    def _count(self, more: int, app: str) -> None:
        """Count so many bytes more, all for the app that the request is for by now: it is not known from the start, and
        another one may get it."""
        budget = self._context.body_budget
        if self._bytes and self._app != app:
            budget.drop(self._app, self._bytes)
            budget.add(app, self._bytes)
        self._app = app
        budget.add(app, more)
        self._bytes += more
