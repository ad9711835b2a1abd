"""A configuration's `services`: the ports of a machine that others reach, and what a proxy is to do with them.

The worker publishes every `internal_port` on a port of its host, and tells the catalog what proxies need to know.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hawker.errors import Invalid
from hawker.model.json_fields import check_choice, check_flag, check_int, check_object, check_port, objects

Protocol = Literal["tcp", "udp"]
Autostop = Literal["off", "stop", "suspend"]
ProxyProtocol = Literal["", "v1", "v2"]

SOFT_LIMIT = 20
"""The documented soft limit of a service that names none; such a service has no hard limit."""
HANDLERS = ("http", "tls", "pg_tls", "proxy_proto", "edge_http")
ALPN = ("h2", "http/1.1")
TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")
PUBLISHED_MOST = 4096
"""The most characters that a service's ports may take as JSON, because a column of the catalog holds no more."""
SECONDS_MOST = 86_400
REPLAY_TTL_S_LEAST = 10

LEAST_AGGRESSIVE: tuple[Autostop, ...] = ("off", "suspend", "stop")
"""A machine with several services is stopped in the first of these ways that one of its services names."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_PREFIX = re.compile(r"[A-Za-z0-9.-]*/")
_BAD_IN_VALUE = re.compile(r"[\0\r\n]")
_ALPN_KNOWN = ("h2", "http/1.1", "http/1.0")
_OF_PROXIES = frozenset(
    {"connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Concurrency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many connections, or requests in flight, a machine takes at once. `hard_limit` 0 sets no limit."""

    type: Literal["connections", "requests"] = "connections"
    soft_limit: Annotated[int, Meta(ge=1)] = SOFT_LIMIT
    hard_limit: Annotated[int, Meta(ge=0)] = 0


class Tls(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tls_options`. `versions` has at least one of `TLS_VERSIONS`."""

    alpn: tuple[str, ...] = ALPN
    versions: tuple[str, ...] = TLS_VERSIONS
    default_self_signed: bool = False


class ReplayCache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of `replay_cache`. For `ttl_s` seconds the proxy remembers where a replay went, and sends later requests
    there that are below `path_prefix` (which may begin with a host) and have the same value in the cookie or header
    `name`."""

    path_prefix: str
    ttl_s: int
    type: Literal["cookie", "header"]
    name: str
    allow_bypass: bool = False


class Http(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`http_options`. Times are in seconds; 0 leaves the proxy's own. `set_headers` has lower-case names and values."""

    compress: bool = False
    h2_backend: bool = False
    pristine: bool = False
    idle_timeout_s: int = 0
    headers_read_timeout_s: int = 0
    set_headers: tuple[tuple[str, str], ...] = ()
    removed_headers: tuple[str, ...] = ()
    replay_cache: tuple[ReplayCache, ...] = ()


class PublicPort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A range of public ports, from `first` to `last` inclusive. Without handlers, the proxy passes bytes unchanged."""

    first: Annotated[int, Meta(ge=1, le=65535)]
    last: Annotated[int, Meta(ge=1, le=65535)]
    handlers: tuple[str, ...] = ()
    force_https: bool = False
    tls: Tls = Tls()
    http: Http = Http()
    proxy_protocol: ProxyProtocol = ""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `min_machines_running` counts the machines of one region."""

    protocol: Protocol
    internal_port: int
    ports: tuple[PublicPort, ...] = ()
    concurrency: Concurrency = Concurrency()
    autostart: bool = True
    autostop: Autostop = "off"
    min_machines_running: int = 0


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a machine as its worker publishes it."""

    protocol: Protocol
    internal_port: int
    host_port: int


def check_services(value: Any, at: str) -> tuple[Service, ...]:
    """From decoded JSON. Raises `Invalid`, naming the field, the value and the remedy."""
    services = tuple(_service(raw, f"{at}[{n}]") for n, raw in enumerate(objects(at, value)))
    for service in merged(services).values():
        if len(catalog_json(service.ports)) > PUBLISHED_MOST:
            remedy = (
                f"the ports of one internal port fill at most {PUBLISHED_MOST} characters as JSON: set fewer headers"
            )
            raise Invalid(at, f"internal_port {service.internal_port}", remedy)
    return services


def published(services: tuple[Service, ...]) -> tuple[tuple[Protocol, int], ...]:
    """The protocols and ports that must be reachable, each once, in the order given."""
    return tuple(dict.fromkeys((service.protocol, service.internal_port) for service in services))


def merged(services: Iterable[Service]) -> dict[tuple[Protocol, int], Service]:
    """One service for each internal port. If several services lead to one port, its program has to bear them all. So
    they share the smallest limits that any of them has, and if one keeps the machine running, the machine runs."""
    found: dict[tuple[Protocol, int], Service] = {}
    for service in services:
        key = (service.protocol, service.internal_port)
        found[key] = _both(found[key], service) if key in found else service
    return found


def _both(one: Service, other: Service) -> Service:
    a, b = one.concurrency, other.concurrency
    hard = min(filter(None, (a.hard_limit, b.hard_limit)), default=0)
    return Service(
        protocol=one.protocol,
        internal_port=one.internal_port,
        ports=one.ports + other.ports,
        concurrency=Concurrency(type=a.type, soft_limit=min(a.soft_limit, b.soft_limit), hard_limit=hard),
        autostart=one.autostart or other.autostart,
        autostop=least_aggressive((one.autostop, other.autostop)),
        min_machines_running=max(one.min_machines_running, other.min_machines_running),
    )


def least_aggressive(autostops: Collection[Autostop]) -> Autostop:
    return min(autostops, key=LEAST_AGGRESSIVE.index, default="off")


def catalog_json(part: tuple[PublicPort, ...] | Concurrency) -> str:
    """Encode a service's ports or its limits for the catalog."""
    return _encode(part).decode()


_encode = msgspec.json.Encoder().encode
read_ports = msgspec.json.Decoder(tuple[PublicPort, ...]).decode
read_concurrency = msgspec.json.Decoder(Concurrency).decode
"""Both decode what `catalog_json` encoded, and ignore unknown fields. They raise `ValueError`."""


def _service(raw: dict[str, Any], at: str) -> Service:
    protocol = check_choice(f"{at}.protocol", raw.get("protocol") or "tcp", "tcp", "udp")
    ports = tuple(
        _public_port(entry, f"{at}.ports[{n}]") for n, entry in enumerate(objects(f"{at}.ports", raw.get("ports")))
    )
    return Service(
        protocol=protocol,
        internal_port=check_port(f"{at}.internal_port", raw.get("internal_port")),
        ports=ports,
        concurrency=_concurrency(raw.get("concurrency"), f"{at}.concurrency"),
        autostart=check_flag(f"{at}.autostart", raw.get("autostart"), True),
        autostop=_autostop(raw.get("autostop"), f"{at}.autostop"),
        min_machines_running=_count(f"{at}.min_machines_running", raw.get("min_machines_running")),
    )


def _autostop(value: Any, at: str) -> Autostop:
    """Older clients send true and false."""
    if isinstance(value, bool):
        return "stop" if value else "off"
    autostop: Autostop = "off" if value in (None, "") else check_choice(at, value, "off", "stop", "suspend")
    return autostop


def _concurrency(value: Any, at: str) -> Concurrency:
    raw = check_object(at, value, '{"type": "requests", "soft_limit": 20, "hard_limit": 25}')
    kind = check_choice(f"{at}.type", raw.get("type") or "connections", "connections", "requests")
    soft, hard = (_count(f"{at}.{field}", raw.get(field)) for field in ("soft_limit", "hard_limit"))
    if hard and soft > hard:
        raise Invalid(f"{at}.soft_limit", soft, f"at most the hard limit, {hard}")
    return Concurrency(type=kind, soft_limit=soft or min(SOFT_LIMIT, hard or SOFT_LIMIT), hard_limit=hard)


def _public_port(raw: dict[str, Any], at: str) -> PublicPort:
    handlers = _words(raw.get("handlers"), f"{at}.handlers", HANDLERS)
    if raw.get("port"):
        first = last = check_port(f"{at}.port", raw["port"])
    else:
        first = check_port(f"{at}.start_port", raw.get("start_port"))
        last = check_port(f"{at}.end_port", raw.get("end_port"))
    if first > last:
        raise Invalid(f"{at}.end_port", last, f"a range ends at its start or after it: {first} or more")
    force = check_flag(f"{at}.force_https", raw.get("force_https"))
    if force and "http" not in handlers:
        raise Invalid(f"{at}.force_https", force, "only a port with the handler http can redirect")
    return PublicPort(
        first=first,
        last=last,
        handlers=handlers,
        force_https=force,
        tls=_tls(raw.get("tls_options"), f"{at}.tls_options"),
        http=_http(raw.get("http_options"), f"{at}.http_options"),
        proxy_protocol=_proxy_protocol(raw.get("proxy_proto_options"), f"{at}.proxy_proto_options", handlers),
    )


def _tls(value: Any, at: str) -> Tls:
    raw = check_object(at, value, '{"alpn": ["h2", "http/1.1"]}')
    return Tls(
        alpn=_words(raw.get("alpn"), f"{at}.alpn", _ALPN_KNOWN) or ALPN,
        versions=_words(raw.get("versions"), f"{at}.versions", TLS_VERSIONS) or TLS_VERSIONS,
        default_self_signed=check_flag(f"{at}.default_self_signed", raw.get("default_self_signed")),
    )


def _http(value: Any, at: str) -> Http:
    raw = check_object(at, value, '{"compress": true}')
    response = check_object(f"{at}.response", raw.get("response"), '{"pristine": true}')
    given, removed = _headers(response.get("headers"), f"{at}.response.headers")
    entries = objects(f"{at}.replay_cache", raw.get("replay_cache"))
    return Http(
        compress=check_flag(f"{at}.compress", raw.get("compress")),
        h2_backend=check_flag(f"{at}.h2_backend", raw.get("h2_backend")),
        pristine=check_flag(f"{at}.response.pristine", response.get("pristine")),
        idle_timeout_s=_count(f"{at}.idle_timeout", raw.get("idle_timeout"), SECONDS_MOST),
        headers_read_timeout_s=_count(f"{at}.headers_read_timeout", raw.get("headers_read_timeout"), SECONDS_MOST),
        set_headers=given,
        removed_headers=removed,
        replay_cache=tuple(_replay_cache(entry, f"{at}.replay_cache[{n}]") for n, entry in enumerate(entries)),
    )


def _headers(value: Any, at: str) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The headers to set, and the names of those to remove (`false`). A list sets a header several times."""
    given: list[tuple[str, str]] = []
    removed: list[str] = []
    for name, wanted in check_object(at, value, '{"x-frame-options": "DENY", "x-powered-by": false}').items():
        here, low = f"{at}.{name}", name.lower()
        if not _TOKEN.fullmatch(name):
            raise Invalid(here, name, "the name of a header has letters, digits and dashes")
        if low in _OF_PROXIES:
            raise Invalid(here, wanted, "the proxy itself sets this header, to say where a message ends; leave it out")
        if wanted is False:
            removed.append(low)
            continue
        for text in wanted if isinstance(wanted, list) else [wanted]:
            if not isinstance(text, str) or _BAD_IN_VALUE.search(text) or not _latin(text):
                raise Invalid(here, wanted, "give a text of one line in Latin-1, a list of them, or false to remove it")
            given.append((low, text.strip()))
    return tuple(given), tuple(removed)


def _latin(text: str) -> bool:
    """Whether a text fits into a header, whose bytes are Latin-1 (RFC 9110, section 5.5)."""
    return all(ord(character) < 256 for character in text)


def _replay_cache(raw: dict[str, Any], at: str) -> ReplayCache:
    prefix, name = raw.get("path_prefix"), raw.get("name")
    if not isinstance(prefix, str) or not _PREFIX.match(prefix):
        raise Invalid(f"{at}.path_prefix", prefix, "give the start of a path, such as / or example.com/api")
    kind = check_choice(f"{at}.type", raw.get("type"), "cookie", "header")
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise Invalid(f"{at}.name", name, f"give the name of a {kind}")
    ttl = _count(f"{at}.ttl_seconds", raw.get("ttl_seconds"), SECONDS_MOST)
    if ttl < REPLAY_TTL_S_LEAST:
        raise Invalid(f"{at}.ttl_seconds", ttl, f"give seconds, at least {REPLAY_TTL_S_LEAST}")
    bypass = check_flag(f"{at}.allow_bypass", raw.get("allow_bypass"))
    name = name.lower() if kind == "header" else name
    host, slash, path = prefix.partition("/")
    prefix = f"{host.lower()}{slash}{path}"
    return ReplayCache(path_prefix=prefix, ttl_s=ttl, type=kind, name=name, allow_bypass=bypass)


def _proxy_protocol(value: Any, at: str, handlers: tuple[str, ...]) -> ProxyProtocol:
    """The version that the handler `proxy_proto` writes, version 1 if the options name none; "" without that
    handler."""
    given = check_object(at, value, '{"version": "v2"}').get("version")
    version: ProxyProtocol = check_choice(f"{at}.version", given or "v1", "v1", "v2")
    return version if "proxy_proto" in handlers else ""


def _words(value: Any, at: str, known: tuple[str, ...]) -> tuple[str, ...]:
    given = value or []
    if not isinstance(given, list) or not all(isinstance(word, str) and word in known for word in given):
        raise Invalid(at, value, f"a list of {', '.join(known)}")
    return tuple(dict.fromkeys(given))


def _count(field: str, value: Any, most: int = 1 << 31) -> int:
    return 0 if value is None else check_int(field, value, 0, most, f"give a count, at most {most}")
