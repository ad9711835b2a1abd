"""Follows requests that a machine hands on to another one (`fly-replay`), and remembers where such requests go."""

from __future__ import annotations

from hawker.core.replay import Reason, Replay, Transform, failed_field, source_field
from hawker.core.replay_cache import Key, bypasses, keys_of, prefix_key, session_key, status_field
from hawker.proxy.base import Refused, Route
from hawker.proxy.embedded.context import PlaneContext
from hawker.proxy.embedded.heads import RequestHead, host_of
from hawker.proxy.embedded.retry_state import RetryState


class Replaying:
    """The replays of one request. `follow` says how it goes on, `back` how it goes on when that failed."""

    __slots__ = ("_begun", "_context", "_count", "_last", "_request", "_returned", "_route", "_source")

    def __init__(self, context: PlaneContext) -> None:
        self._context = context
        self._count = 0
        self._returned = False
        self._last: Replay | None = None
        self._source = ""
        self._request: RequestHead
        self._route: Route
        self._begun = 0.0

    def follow(
        self, replay: Replay, request: RequestHead, route: Route, source: str, region: str, timed: bool
    ) -> tuple[RequestHead, RetryState]:
        """The machine `source` said `replay`. Raises `Refused`."""
        context = self._context
        if self._returned:
            raise Refused(502, "PA03", "the app hands on what came back to it because that had failed before")
        self._count += 1
        if self._count > context.settings.replays:
            raise Refused(508, "PA02", f"this request was handed on {self._count - 1} times already")
        context.counters.replays += 1
        now = context.now()
        self._last, self._request, self._route, self._source, self._begun = replay, request, route, source, now
        retry = RetryState(
            now + (replay.timeout_s or context.settings.wait_s),
            replay.wishes(source),
            app=_other(replay, route),
            timed=timed,
        )
        retry.added.append(source_field(replay, source, region, context.now_us()))
        self._remember(replay, request, route)
        retry.added.append(status_field("bypass" if bypasses(request.headers) else "miss"))
        changed = request.changed(*replay.transform.apply(request.target, request.headers))
        for name, value in () if changed.host else changed.headers:  # a request of HTTP/1.0 may have had none
            if name == b"host":
                changed.host = host_of(value)
        return changed, retry

    def back(self, retry: RetryState) -> tuple[RequestHead, Route, RetryState] | None:
        """Nobody took the request where the replay sent it. Returns how it goes on all the same, if the replay says
        so."""
        replay, self._last = self._last, None
        wishes = None if replay is None else replay.fallback_wishes(self._source)
        if replay is None or wishes is None:
            return None
        self._returned = True
        now = self._context.now()
        reason: Reason = "retries_exhausted" if retry.tries else "no_candidate"
        if now >= retry.deadline:
            reason = "timeout"
        again = RetryState(now + self._context.settings.wait_s, wishes, timed=retry.timed)
        again.added.append(failed_field(replay, self._source, reason, round((now - self._begun) * 1000)))
        return self._request, self._route, again

    def _remember(self, replay: Replay, request: RequestHead, route: Route) -> None:
        """Remember the replay, if the app wants that, and if the replay says the same for all such requests."""
        cache, now = self._context.replays, self._context.now()
        remember, sessions = replay.remember, route.port.replay_cache
        if remember is None and not sessions:
            return
        path = _path(request)
        self._context.remembers = True
        if remember is not None and remember.invalidate:
            cache.forget(keys_of(route.app, request.host, path, request.headers, sessions))
            return
        if remember is not None:
            key = prefix_key(route.app, request.host, path, remember)
            if key is not None:
                cache.keep(key, replay, ttl_s=remember.ttl_s, allow_bypass=remember.allow_bypass, now=now)
        if not replay.state and replay.transform == Transform():
            for entry in sessions:
                key = session_key(route.app, request.host, path, request.headers, entry)
                if key is not None:
                    cache.keep(key, replay, ttl_s=entry.ttl_s, allow_bypass=entry.allow_bypass, now=now)


def remembered(context: PlaneContext, request: RequestHead, route: Route, retry: RetryState) -> None:
    """Send `retry` where requests like this one were sent before."""
    keys: list[Key] = keys_of(route.app, request.host, _path(request), request.headers, route.port.replay_cache)
    found = context.replays.find(keys, context.now())
    if found is None:
        return
    if found.allow_bypass and bypasses(request.headers):
        retry.added.append(status_field("bypass"))
        return
    retry.wishes = found.replay.wishes("")
    retry.app = _other(found.replay, route)
    retry.added.append(status_field("hit"))
    retry.remembered = keys


def _other(replay: Replay, route: Route) -> str:
    return replay.app if replay.app != route.app else ""


def _path(request: RequestHead) -> str:
    return request.target.partition(b"?")[0].decode("latin-1")
