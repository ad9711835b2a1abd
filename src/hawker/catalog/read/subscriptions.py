"""Subscriptions: the result of a query, then every change of it, for as long as somebody listens.

A node holds one result for each distinct query, however many listen to it. The view tells which tables may have
changed; then the node runs the query again, beside the event loop, and compares the new result with the old one.
Listeners get hints: many changes within a short time are one, and nobody hears of a result that did not change.

Changes are numbered, and the last ones are kept for all listeners together. A listener that falls behind them is cut
off. One that comes back within them gets what it missed, and any other a fresh snapshot.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Iterator

from hawker.catalog.read.queries import Queries, check, tables_told_of
from hawker.catalog.view import View
from hawker.core import results
from hawker.core.results import Row, RowChange
from hawker.errors import HawkerError, Invalid, TooManyRequests, Unreachable
from hawker.host import Host
from hawker.http.events import KEEP_ALIVE, event
from hawker.store.sql import ROWS_MAX, Found

DEBOUNCE_S = 0.1
SHARE = 4
"""A query rests so many times as long as it took before it is run again."""
RUNNING_MOST = 2
LOOK_S = 2.0
"""Between two looks at what the view does not tell of: membership, positions, rows put aside."""
KEEP_ALIVE_S = 15.0
IDLE_S = 120.0
"""How long a result is kept up to date that nobody listens to, for listeners that come back."""
SUBSCRIPTIONS_MOST = 64
LISTENERS_MOST = 1024
TEXT_MOST = 4 << 20
"""Characters of text in one result, at most."""
KEPT_MOST = 2 * ROWS_MAX
"""Changes that are kept, at most: one result may take the place of another altogether."""
KEPT_BYTES = 8 << 20
_PIECE_BYTES = 64 << 10


class TooSlow(TooManyRequests):
    """A listener that took its changes more slowly than they came."""

    code = "too_slow"


class Subscription:
    """One query's result. `name` is in every event's id, so that ids of another node are told apart from ours."""

    def __init__(self, query: str, name: str) -> None:
        self.query = query
        self.name = name
        self.columns: list[str] = []
        self.rows: dict[int, Row] = {}
        self.tables: frozenset[str] | None = None
        self.number = 0  # of the last change
        self.unused = 1  # the next row's number
        self.ended: HawkerError | None = None
        self.listeners = 0
        self.dirty = asyncio.Event()
        self.news = asyncio.Event()  # set when there is more to tell, and replaced by another
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.idle: asyncio.TimerHandle | None = None
        self._kept: list[bytes] = []  # the last changes, as events
        self._kept_bytes = 0

    def add(self, told: list[RowChange]) -> None:
        """Number changes and keep them; the latest ones are always kept."""
        for change in told:
            self.number += 1
            self._kept.append(event("change", change, self.id(self.number)))
            self._kept_bytes += len(self._kept[-1])
        drop = 0
        while len(self._kept) - drop > len(told) and (
            len(self._kept) - drop > KEPT_MOST or self._kept_bytes > KEPT_BYTES
        ):
            self._kept_bytes -= len(self._kept[drop])
            drop += 1
        del self._kept[:drop]

    def after(self, number: int) -> list[bytes] | None:
        """The changes after a number, as events; None when some of them are not kept any more, or not there yet."""
        missing = self.number - number
        return self._kept[len(self._kept) - missing :] if 0 <= missing <= len(self._kept) else None

    def id(self, number: int) -> str:
        return f"{self.name}/{number}"

    def place(self, since: str) -> int | None:
        """The number in an event's id, None when it is not one of this subscription's."""
        found = re.fullmatch(r"(\w+)/([0-9]{1,15})", since, re.ASCII)
        return int(found[2]) if found and found[1] == self.name else None

    def tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


class Subscriptions:
    """All subscriptions of one node."""

    def __init__(self, view: View, queries: Queries, host: Host) -> None:
        self._view = view
        self._queries = queries
        self._host = host
        self._all: dict[str, Subscription] = {}  # by query
        self._running = asyncio.Semaphore(RUNNING_MOST)
        self._closed = False
        view.on_applied.append(self._hint)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def listeners(self) -> int:
        return sum(each.listeners for each in self._all.values())

    async def subscribe(self, query: str) -> Subscription:
        """The subscription to a query, once its first result is there. Raises `Invalid`, `TooManyRequests`,
        `Unreachable`."""
        query = check(query)
        if self._closed:
            raise _stopping()
        if self.listeners >= LISTENERS_MOST:
            raise TooManyRequests(
                f"{LISTENERS_MOST} clients listen to subscriptions here", hint="ask another node, or try again later"
            )
        subscription = self._all.get(query)
        if subscription is None:
            self._make_room()
            subscription = self._all[query] = Subscription(query, self._host.ulid())
            loop = asyncio.get_running_loop()
            subscription.task = loop.create_task(self._follow(subscription), name="subscription")
            self._rest(subscription)
        await asyncio.wait([subscription.first])
        if subscription.ended:
            raise subscription.ended
        return subscription

    async def events(
        self, subscription: Subscription, since: str = "", for_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """What a listener is sent: what it missed since the event that it saw last, or everything, then changes as they
        come. The stream ends after `for_s`."""
        loop = asyncio.get_running_loop()
        until = None if for_s is None else loop.time() + for_s
        self._join(subscription)
        try:
            place = subscription.place(since)
            missed = None if place is None else subscription.after(place)
            yield event("columns", subscription.columns)
            if missed is not None:
                number = subscription.number
                for piece in _pieces(missed):
                    yield piece
            else:
                if since:
                    yield event("reset", {"why": "what came after that event is not kept here"}, "")
                number, rows = subscription.number, subscription.rows
                for piece in _pieces(event("row", {"row": n, "values": row}) for n, row in rows.items()):
                    yield piece
                    await asyncio.sleep(0)  # thousands of rows are encoded between others' turns
                yield event("end", {"rows": len(rows)}, subscription.id(number))
            while True:
                news = subscription.news
                more = subscription.after(number)
                if more is None:
                    slow = TooSlow("changes came faster than they were taken", hint="resume from the last event's id")
                    yield event("error", slow.body())
                    return
                for piece in _pieces(more):
                    yield piece
                number += len(more)
                if subscription.number > number:
                    continue
                if subscription.ended:
                    yield event("error", subscription.ended.body())
                    return
                left_s = KEEP_ALIVE_S if until is None else min(KEEP_ALIVE_S, until - loop.time())
                if left_s <= 0:
                    return
                try:
                    async with asyncio.timeout(left_s):
                        await news.wait()
                except TimeoutError:
                    if left_s == KEEP_ALIVE_S:
                        yield KEEP_ALIVE
        finally:
            self._leave(subscription)

    async def close(self) -> None:
        """End them all and tell the listeners. May be called again."""
        self._closed = True
        if self._hint in self._view.on_applied:
            self._view.on_applied.remove(self._hint)
        tasks = [each.task for each in self._all.values() if each.task]
        for each in list(self._all.values()):
            self._end(each, _stopping())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- keeping results up to date ----------------------------------------------------------------------------------

    def _hint(self, tables: tuple[str, ...]) -> None:
        for each in self._all.values():
            if each.tables is None or not each.tables.isdisjoint(tables):
                each.dirty.set()

    async def _follow(self, subscription: Subscription) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                subscription.dirty.clear()
                async with self._running:
                    began = loop.time()
                    found, rows, told = await self._queries.run(lambda: self._look(subscription))
                    took_s = loop.time() - began
                if not subscription.first.done():
                    subscription.columns = found.columns
                    subscription.rows, subscription.unused = rows, len(rows) + 1
                    subscription.first.set_result(None)
                elif found.columns != subscription.columns:
                    raise Invalid("query", subscription.query, "gives other columns than before; subscribe again")
                elif told:
                    subscription.rows = rows
                    subscription.unused += sum(change.kind == "insert" for change in told)
                    subscription.add(told)
                    subscription.tell()
                subscription.tables = tables_told_of(found)
                await asyncio.sleep(max(DEBOUNCE_S, SHARE * took_s))
                try:
                    async with asyncio.timeout(LOOK_S if subscription.tables is None else None):
                        await subscription.dirty.wait()
                except TimeoutError:
                    continue
        except HawkerError as error:
            self._end(subscription, error)
        except Exception as error:  # a fault of SQLite or of Hawker ends this subscription and nothing else
            self._end(subscription, HawkerError(f"internal error: {type(error).__name__}: {error}"))

    def _look(self, subscription: Subscription) -> tuple[Found, dict[int, Row], list[RowChange]]:
        """Run the query and compare, beside the event loop; nothing is changed here."""
        found = self._queries.read(subscription.query, TEXT_MOST)
        if not subscription.first.done():
            return found, results.numbered(found.rows), []
        told = results.changes(subscription.rows, found.rows, subscription.unused)
        return found, results.apply(subscription.rows, told), told

    # --- who listens -------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        if len(self._all) < SUBSCRIPTIONS_MOST:
            return
        unheard = next((each for each in self._all.values() if not each.listeners and each.first.done()), None)
        if unheard is None:
            raise TooManyRequests(
                f"{SUBSCRIPTIONS_MOST} different queries are subscribed to here",
                hint="subscribe to the same text as others do, or ask another node",
            )
        self._end(unheard, _dropped())

    def _join(self, subscription: Subscription) -> None:
        subscription.listeners += 1
        if subscription.idle:
            subscription.idle.cancel()
            subscription.idle = None

    def _leave(self, subscription: Subscription) -> None:
        subscription.listeners -= 1
        if not subscription.listeners and not subscription.ended:
            self._rest(subscription)

    def _rest(self, subscription: Subscription) -> None:
        """Nobody listens: drop the result after a while."""
        loop = asyncio.get_running_loop()
        subscription.idle = loop.call_later(IDLE_S, lambda: self._end(subscription, _dropped()))

    def _end(self, subscription: Subscription, error: HawkerError) -> None:
        if subscription.ended:
            return
        subscription.ended = error
        if self._all.get(subscription.query) is subscription:
            del self._all[subscription.query]
        if subscription.idle:
            subscription.idle.cancel()
        if subscription.task:
            subscription.task.cancel()
        if not subscription.first.done():
            subscription.first.set_result(None)
        subscription.tell()


def _pieces(events: Iterable[bytes]) -> Iterator[bytes]:
    """Events put together, so that ten thousand rows are a few dozen writes."""
    held: list[bytes] = []
    size = 0
    for each in events:
        held.append(each)
        size += len(each)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _stopping() -> HawkerError:
    return Unreachable("this agent stops", hint="subscribe at another node, or here again")


def _dropped() -> HawkerError:
    return Unreachable("nobody listened", hint="subscribe again")
