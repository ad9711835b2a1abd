"""An app's wish that its request goes to another machine: `fly-replay`, as a header field of its answer or as JSON.

    replay = replay_of(answer_fields) or read_json(body)
    wishes = replay.wishes(source)                       # of the machine that answered so
    target, fields = replay.transform.apply(target, fields)
    fields += source_field(replay, source, region, now_us)

Forms and words are those of the public documentation of dynamic request routing. A replay that says something else is
`BadReplay`, the documented error PA03: to leave out what is not understood would send the request somewhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, cast, get_args

import msgspec

from hawker.core.forwarding import HOP_BY_HOP, Field, regions_of
from hawker.core.routing import Wishes
from hawker.errors import Invalid
from hawker.model.values import parse_duration_s

JSON_TYPE = b"application/vnd.fly.replay+json"
TTL_S_LEAST = 10

Fallback = Literal["", "force_self", "prefer_self"]
Reason = Literal["timeout", "retries_exhausted", "no_candidate"]

_PART = re.compile(r"\s*([A-Za-z_]+)\s*=\s*(\"[^\"]*\"|[^;]*?)\s*(?:;|$)")
_TARGET = re.compile(r"/[!-\"$-~]*")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{1,255})(?::[0-9]{0,5})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATTERN = re.compile(r"([A-Za-z0-9.-]*)(/[!-\"$-~]*)")
_FRAMING = HOP_BY_HOP | {b"content-length"}


class BadReplay(Exception):
    """A replay that cannot be followed, and why."""


class Transform(msgspec.Struct, frozen=True, kw_only=True):
    """What the request is changed to first. `path` "": as it is; else path and query."""

    path: bytes = b""
    deleted: frozenset[bytes] = frozenset()
    given: tuple[Field, ...] = ()

    def apply(self, target: bytes, fields: list[Field]) -> tuple[bytes, list[Field]]:
        """What a replay changes in a request's own fields. What proxies add comes after it, and an app never changes
        that."""
        if self.deleted or self.given:
            out = self.deleted | {name for name, _ in self.given}
            fields = [*(field for field in fields if field[0] not in out), *self.given]
        return self.path or target, fields


class Remember(msgspec.Struct, frozen=True, kw_only=True):
    """The app says that requests below `prefix` ("/a/b", or "" for all) go the same way for `ttl_s` seconds. `domain`
    "": that of the request. `invalidate`: what is remembered of this request's path is forgotten."""

    prefix: str = ""
    domain: str = ""
    ttl_s: int = 0
    allow_bypass: bool = False
    invalidate: bool = False


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """`regions` in order of preference, codes or aliases. `app` "": the same. `timeout_s` 0: the proxy's own."""

    regions: tuple[str, ...] = ()
    instance: str = ""
    prefer_instance: str = ""
    app: str = ""
    state: str = ""
    elsewhere: bool = False
    timeout_s: float = 0.0
    fallback: Fallback = ""
    transform: Transform = Transform()
    remember: Remember | None = None

    def wishes(self, source: str) -> Wishes:
        """Who is to take it; `source` is the machine that said so."""
        return Wishes(
            force_machine=self.instance,
            prefer_machine=self.prefer_instance,
            force_regions=self.regions,
            not_machine=source if self.elsewhere else "",
        )

    def fallback_wishes(self, source: str) -> Wishes | None:
        """Who takes it when the replay fails; None: its failure is the answer."""
        if self.fallback == "force_self":
            return Wishes(force_machine=source)
        return Wishes(prefer_machine=source) if self.fallback == "prefer_self" else None


def replay_of(fields: Iterable[Field]) -> Replay | None:
    """Read a replay from an answer's fields; None when they ask for none. Raises `BadReplay`."""
    said: bytes | None = None
    cache: dict[bytes, bytes] = {}
    for name, value in fields:
        if name == b"fly-replay":
            if said is not None:
                raise BadReplay("fly-replay is given twice; put all fields into one")
            said = value
        elif name.startswith(b"fly-replay-cache"):
            cache[name] = value
    if said is None:
        return None
    words = _parts(_text(said, "fly-replay"))
    pattern = _text(cache.get(b"fly-replay-cache", b""), "fly-replay-cache").strip()
    remember = None
    if pattern:
        seconds = _text(cache.get(b"fly-replay-cache-ttl-secs", b""), "fly-replay-cache-ttl-secs").strip()
        bypass = cache.get(b"fly-replay-cache-allow-bypass", b"").strip().lower() == b"yes"
        if pattern.lower() == "invalidate":
            remember = Remember(invalidate=True)
        else:
            remember = _remember(pattern, int(seconds) if seconds.isdecimal() else 0, bypass)
    return _replay(_Said(**words), remember, Transform())  # type: ignore[arg-type]  # of the right types, by `_parts`


def read_json(body: bytes) -> Replay:
    """Read a replay from the body of an answer of `JSON_TYPE`. Raises `BadReplay`."""
    try:
        said = msgspec.json.decode(body, type=_Json)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadReplay(f"the JSON of the replay: {error}") from None
    remember = None
    cache = said.cache
    if cache is not None:
        bypass = cache.allow_bypass or said.allow_bypass
        remember = Remember(invalidate=True) if cache.invalidate else _remember(cache.prefix, cache.ttl, bypass)
    return _replay(said, remember, _transform(said.transform))


def source_field(replay: Replay, source: str, region: str, now_us: int) -> Field:
    """What tells the target where a request was replayed from; not of one that was remembered."""
    state = f";state={replay.state}" if replay.state else ""
    return b"fly-replay-src", f"instance={source};region={region};t={now_us}{state}".encode()


def failed_field(replay: Replay, source: str, reason: Reason, elapsed_ms: int) -> Field:
    """What tells the machine that takes a request back why the replay it asked for failed."""
    regions = ",".join(replay.regions)
    regions = f'"{regions}"' if len(replay.regions) > 1 else regions
    wanted = f"instance={replay.instance or replay.prefer_instance};app={replay.app};region={regions}"
    text = f"{wanted};replay_source={source};reason={reason};elapsed_ms={elapsed_ms}"
    return b"fly-replay-failed", text.encode()


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str


class _JsonTransform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""
    delete_headers: tuple[str, ...] = ()
    set_headers: tuple[_Header, ...] = ()


class _JsonCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prefix: str = ""
    ttl: int = 0
    invalidate: bool = False
    allow_bypass: bool = False


class _Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both forms have. None is as good as not given."""

    region: str | None = None
    instance: str | None = None
    prefer_instance: str | None = None
    app: str | None = None
    state: str | None = None
    elsewhere: bool | None = None
    timeout: str | None = None
    fallback: str | None = None


class _Json(_Said, frozen=True, kw_only=True, forbid_unknown_fields=True):
    transform: _JsonTransform | None = None
    cache: _JsonCache | None = None
    allow_bypass: bool = False


_WORDS = tuple(field.name for field in msgspec.structs.fields(_Said))


def _parts(text: str) -> dict[str, str | bool]:
    """`key=value;key="value"` taken apart."""
    found: dict[str, str | bool] = {}
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or part.end() == at:
            if not text[at:].strip(" ;"):
                break
            raise BadReplay(f"fly-replay: {text!r} is not of the form key=value;key=value")
        name, value = part[1].lower(), part[2].strip('"')
        if name not in _WORDS:
            raise BadReplay(f"fly-replay: {name} is not known; use {', '.join(_WORDS)}")
        if name in found:
            raise BadReplay(f"fly-replay: {name} is given twice")
        found[name] = value.lower() == "true" if name == "elsewhere" else value
        at = part.end()
    return found


def _replay(said: _Said, remember: Remember | None, transform: Transform) -> Replay:
    for name in _WORDS:
        value = getattr(said, name)
        if isinstance(value, str) and _CONTROL.search(value):
            raise BadReplay(f"{name}: {value!r} has control characters")
    replay = Replay(
        regions=regions_of(said.region or ""),
        instance=(said.instance or "").strip(),
        prefer_instance=(said.prefer_instance or "").strip(),
        app=(said.app or "").strip(),
        state=said.state or "",
        elsewhere=bool(said.elsewhere),
        timeout_s=_timeout_s(said.timeout or ""),
        fallback=_fallback(said.fallback or ""),
        transform=transform,
        remember=remember,
    )
    wanted = (replay.regions, replay.instance, replay.prefer_instance, replay.app, replay.elsewhere)
    if not any(wanted) and transform == Transform() and not (remember and remember.invalidate):
        raise BadReplay("the replay does not say where to; give a region, an instance, an app or elsewhere=true")
    if remember and not remember.invalidate and (replay.state or transform != Transform()):
        raise BadReplay("a replay that is to be remembered has neither a state nor a transform")
    return replay


def _timeout_s(text: str) -> float:
    try:
        return parse_duration_s("timeout", text) if text else 0.0
    except Invalid as error:
        raise BadReplay(error.message) from None


def _fallback(text: str) -> Fallback:
    for known in get_args(Fallback):
        if text == known:
            return cast(Fallback, known)
    raise BadReplay(f"fallback: {text!r} is not known; use force_self or prefer_self")


def _remember(pattern: str, ttl_s: int, allow_bypass: bool) -> Remember:
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise BadReplay(f"the cache's prefix {pattern!r} is no path, such as /some/path/*")
    if ttl_s < TTL_S_LEAST:
        raise BadReplay(f"the cache's ttl is {ttl_s} seconds; give {TTL_S_LEAST} or more")
    prefix = match[2].removesuffix("/*").rstrip("/")  # which it ends with in any case
    return Remember(prefix=prefix, domain=match[1].lower(), ttl_s=ttl_s, allow_bypass=allow_bypass)


def _transform(said: _JsonTransform | None) -> Transform:
    if said is None:
        return Transform()
    if said.path and not _TARGET.fullmatch(said.path):
        raise BadReplay(f"transform.path: {said.path!r} is no path with a query, such as /new/path?a=b")
    for name in (*said.delete_headers, *(header.name for header in said.set_headers)):
        if not _NAME.fullmatch(name) or name.lower().replace("_", "-").encode() in _FRAMING:
            raise BadReplay(f"transform: {name!r} is no header that an app may set or delete")
    for header in said.set_headers:
        if _CONTROL.search(header.value):
            raise BadReplay(f"transform.set_headers: the value of {header.name} has control characters")
    hosts = [header.value.strip() for header in said.set_headers if header.name.lower() == "host"]
    if len(hosts) > 1 or not all(map(_HOST.fullmatch, hosts)):
        raise BadReplay("transform.set_headers: a request has one Host, which is a name or an address with a port")
    deleted = frozenset(name.lower().encode() for name in said.delete_headers) - {b"host"}
    given = tuple((header.name.lower().encode(), header.value.strip().encode()) for header in said.set_headers)
    return Transform(path=said.path.encode(), deleted=deleted, given=given)


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadReplay(f"{name}: its value is not UTF-8") from None
