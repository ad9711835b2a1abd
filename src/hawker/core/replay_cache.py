"""Where replays went, for requests that would be replayed the same way: documented as the replay cache.

    keys = keys_of("web", "example.com", "/a/b", fields, port.http.replay_cache)
    found = cache.find(keys, now)                       # before the app is asked
    cache.keep(key_to_keep(...), replay, ttl_s, ...)    # after it answered with a replay

It is no more than a shortcut: the least recently used goes when there are too many, and everything is gone when the
proxy starts anew. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from hawker.core.forwarding import Field
from hawker.core.replay import Remember, Replay
from hawker.model.services import ReplayCache

KEPT_MOST = 10_000
DEPTH_MOST = 32
"""Parts of a path that are looked at, from its start."""
VALUE_MOST = 4096
"""Bytes of a cookie or header that tells sessions apart; longer ones are not remembered."""

CONTROL = b"fly-replay-cache-control"
STATUS = b"fly-replay-cache-status"
Status = Literal["miss", "hit", "bypass"]

Key = tuple[str, str, str, bytes]
"""App, domain, prefix of the path, and "name=value" of a session (b"" for everybody)."""


class Found(msgspec.Struct, frozen=True):
    replay: Replay
    allow_bypass: bool
    until: float


class Cache:
    """Replays by key."""

    def __init__(self, most: int = KEPT_MOST) -> None:
        self._most = most
        self._kept: OrderedDict[Key, Found] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Iterable[Key], now: float) -> Found | None:
        """The first that is kept and still counts."""
        for key in keys:
            found = self._kept.get(key)
            if found is not None:
                if now < found.until:
                    self._kept.move_to_end(key)
                    return found
                del self._kept[key]
        return None

    def keep(self, key: Key, replay: Replay, *, ttl_s: int, allow_bypass: bool, now: float) -> None:
        self._kept[key] = Found(replay, allow_bypass, now + ttl_s)
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._kept.pop(key, None)


def keys_of(
    app: str, host: str, path: str, fields: Sequence[Field] = (), sessions: Sequence[ReplayCache] = ()
) -> list[Key]:
    """Under what a request may be remembered, the most special first: its session, then paths; of each longer prefixes
    before shorter ones. `path` without its query, `host` without its port."""
    found = [key for entry in sessions if (key := session_key(app, host, path, fields, entry))]
    found.sort(key=lambda key: len(key[2]), reverse=True)
    end = len(path.rstrip("/"))
    ends = [end, *(n for n in range(end - 1, -1, -1) if path[n] == "/")]
    return [*found, *((app, host, path[:n], b"") for n in ends[-DEPTH_MOST:])]


def prefix_key(app: str, host: str, path: str, remember: Remember) -> Key | None:
    """Under what a replay is kept that says so itself. None: its pattern does not match the request that it answers,
    which would let an app decide about others' requests."""
    if remember.domain not in ("", host) or not (path == remember.prefix or path.startswith(f"{remember.prefix}/")):
        return None
    return app, host, remember.prefix, b""


def session_key(app: str, host: str, path: str, fields: Sequence[Field], entry: ReplayCache) -> Key | None:
    """Under what the replay of a request of a session is kept; None when it has none, or is for another path."""
    domain, _, prefix = entry.path_prefix.partition("/")
    prefix = f"/{prefix}".rstrip("/")
    if domain not in ("", host) or not (path == prefix or path.startswith(f"{prefix}/")):
        return None
    name = entry.name.encode("latin-1")
    value = _cookie(fields, name) if entry.type == "cookie" else _header(fields, name)
    if not value or len(value) > VALUE_MOST:
        return None
    return app, host, prefix, b"%b %b=%b" % (entry.type.encode(), name, value)


def bypasses(fields: Iterable[Field]) -> bool:
    """Whether a request asks to be taken to the app itself, which counts where the app allows it."""
    return any(name == CONTROL and value.strip().lower() == b"skip" for name, value in fields)


def status_field(status: Status) -> Field:
    """What tells the target of a replay how it came to it."""
    return STATUS, status.encode()


def _header(fields: Iterable[Field], name: bytes) -> bytes:
    return next((value for field, value in fields if field == name), b"")


def _cookie(fields: Iterable[Field], name: bytes) -> bytes:
    for field, value in fields:
        if field == b"cookie":
            for pair in value.split(b";"):
                key, _, text = pair.strip().partition(b"=")
                if key == name:
                    return text
    return b""
