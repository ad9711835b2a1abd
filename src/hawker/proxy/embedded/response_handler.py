"""What a connection to a machine tells the request that it carries, whatever version of HTTP the machine speaks."""

from __future__ import annotations

from typing import Protocol

from hawker.proxy.base import Failure, Header
from hawker.proxy.embedded.heads import AnswerHead


class ResponseHandler(Protocol):
    """Handles what comes for one request. Exactly one of `ended`, `broken` and `switched` comes last."""

    def interim(self, head: AnswerHead) -> None: ...

    def answer(self, head: AnswerHead) -> None: ...

    def data(self, data: bytes) -> None: ...

    def ended(self, trailers: list[Header]) -> None: ...

    def broken(self, how: Failure, problem: str) -> None: ...

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        """The connection speaks another protocol from here on, whose first bytes are `rest`. It is the handler's
        now."""
        ...

    def flush(self) -> None:
        """All that has come so far was handed over."""
        ...

    def stalled(self, stalled: bool) -> None:
        """The machine takes nothing more (True), or takes it again."""
        ...

    @property
    def sending(self) -> bool:
        """Whether the request's body is not complete yet."""
        ...

    @property
    def may_go_elsewhere(self) -> bool:
        """Whether the request, sent as it is, could be made once more at another machine."""
        ...
