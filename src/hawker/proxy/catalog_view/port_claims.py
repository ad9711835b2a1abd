"""Knows which app has which public port to itself: ports where apps are not told apart by their names.

Where several apps claim one port, the oldest app has it, so that an app loses nothing to one that came later.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from hawker.catalog.view import Changed, RowView
from hawker.errors import StoreError
from hawker.model.services import read_ports
from hawker.telemetry import get_logger

CLAIMED_MOST = 256
"""How many ports of one service are opened for its app: a range may have thousands."""
ROWS_A_TURN = 500
DELAY_S = 0.05
"""How long changes are collected before their rows are read: machines come by the dozen, with the same ports."""
AGAIN_S = 1.0

_ROWS = "select id, app, ports from services where ports <> '[]' and protocol = 'tcp'"
_TEXTS = "select distinct ports from services where ports <> '[]' and protocol = 'tcp'"


class PortClaims:
    """`ports` are the apps by public port. `on_ports` is told when they are different. `close` when done."""

    def __init__(self, view: RowView, shared_ports: Iterable[int]) -> None:
        """`shared_ports` are those where many apps are told apart by their names; they belong to nobody."""
        self._view = view
        self._shared = frozenset(shared_ports)
        self._rows: dict[str, tuple[str, frozenset[int]]] = {}  # app and ports, by key of `services`
        self._claimed: dict[str, Counter[int]] = {}  # rows that claim a port, by app
        self._parsed: dict[str, frozenset[int]] = {}
        self._created: dict[str, int | None] = {}  # apps that claim ports; None: there is no such app
        self._again: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.ports: dict[int, str] = {}
        self.on_ports: list[Callable[[], None]] = []
        view.on_rows.append(self._changed)
        self._read_all()

    def close(self) -> None:
        if self._changed in self._view.on_rows:
            self._view.on_rows.remove(self._changed)
        if self._timer:
            self._timer.cancel()

    def settle(self) -> None:
        """Read at once what has changed."""
        while self._again:
            self._look()

    def _changed(self, changed: Changed) -> None:
        services, apps = changed.get("services", ()), changed.get("apps", ())
        if services is None:
            self._again = {"": None}
        elif "" not in self._again:
            self._again.update(dict.fromkeys(sorted(services)))
        for app in [*self._created] if apps is None else sorted(self._created.keys() & apps):
            del self._created[app]
            self._again.setdefault(f"/{app}", None)  # no key of a service
        if self._again and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        try:
            self._look()
        except StoreError as error:
            _logger.warning("claims.not_read", error=error.message, cause="a change of the catalog")
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._turn)
        else:
            if self._again:
                self._timer = asyncio.get_running_loop().call_later(0, self._turn)

    def _look(self) -> None:
        if "" in self._again:
            self._again.clear()
            self._read_all()
            return
        some = list(self._again)[:ROWS_A_TURN]
        differ = any(key.startswith("/") for key in some)
        found = {row[0]: row for row in self._view.rows(f"{_ROWS} and id in ({','.join('?' * len(some))})", some)}
        for key in some:
            differ |= self._set(key, found.get(key))
            del self._again[key]
        if differ:
            self._decide()

    def _read_all(self) -> None:
        self._rows.clear()
        self._claimed.clear()
        # Of many thousands of services most say the same, and claim nothing.
        texts = [text for (text,) in self._view.rows(_TEXTS) if self._ports_of(text)]
        for first in range(0, len(texts), ROWS_A_TURN):
            some = texts[first : first + ROWS_A_TURN]
            for row in self._view.rows(f"{_ROWS} and ports in ({','.join('?' * len(some))})", some):
                self._set(row[0], row)
        self._decide()

    def _set(self, key: str, row: Sequence[str] | None) -> bool:
        """Returns whether an app claims other ports now."""
        now = (row[1], self._ports_of(row[2])) if row else None
        if now is not None and not now[1]:
            now = None
        before = self._rows.get(key)
        if now == before:
            return False
        differ = False
        if before is not None:
            del self._rows[key]
            counts = self._claimed[before[0]]
            counts.subtract(before[1])
            gone = [port for port in before[1] if not counts[port]]
            for port in gone:
                del counts[port]
            differ |= bool(gone)
            if not counts:
                del self._claimed[before[0]]
        if now is not None:
            self._rows[key] = now
            counts = self._claimed.setdefault(now[0], Counter())
            differ |= any(port not in counts for port in now[1])
            counts.update(now[1])
        return differ

    def _ports_of(self, text: str) -> frozenset[int]:
        """A row that makes no sense claims nothing. The index reports it when its app is loaded."""
        found = self._parsed.get(text)
        if found is None:
            try:
                ranges = [(each.first, each.last) for each in read_ports(text)]
            except (ValueError, TypeError, msgspec.MsgspecError):
                ranges = []
            every = [port for first, last in ranges for port in range(max(1, first), min(last, 65535) + 1)]
            found = frozenset([port for port in every if port not in self._shared][:CLAIMED_MOST])
            if len(self._parsed) >= ROWS_A_TURN:
                self._parsed.clear()
            self._parsed[text] = found
        return found

    def _decide(self) -> None:
        created: dict[str, int] = {}
        self._created = {app: at_ms for app, at_ms in self._created.items() if app in self._claimed}
        for app in self._claimed:
            if app not in self._created:
                found = self._view.rows("select created_at_ms from apps where id = ?", (app,))
                self._created[app] = found[0][0] if found else None
            if (at_ms := self._created[app]) is not None:
                created[app] = at_ms
        now: dict[int, str] = {}
        # A row that does not say when its app was made takes nothing from others.
        for app in sorted(created, key=lambda app: (not created[app], created[app], app)):
            for port in self._claimed[app]:
                now.setdefault(port, app)
        if now != self.ports:
            self.ports = now
            for told in self.on_ports:
                told()


_logger = get_logger()
