"""Writes HAProxy's configuration file, as a pure function of what it is to serve."""

from __future__ import annotations

from collections.abc import Sequence

from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy import tls_config
from hawker.proxy.haproxy.access_records import RECORD_MOST, RING_BYTES, SOCKET, TEXT_MOST, record
from hawker.proxy.haproxy.config import (
    ACTIVATOR,
    Config,
    Frontend,
    Kind,
    backend_ids,
    is_tls,
    map_of,
    request_id,
    server_words,
    socket_of,
)

READING = "GET HEAD OPTIONS TRACE"
"""Methods that change nothing (RFC 9110, section 9.2.1)."""
REPEATABLE = f"{READING} PUT DELETE"
TARGET_MOST = 8000
PLAIN_TARGET = rf"^/(?!\.well-known/acme-challenge/)[\x21-\x7e]{{0,{TARGET_MOST}}}+$"
"""What a target may be that HAProxy forwards by itself. HAProxy lets some more bytes pass, which the activator refuses.
The activator also knows the answer to an ACME server's challenge (RFC 8555, section 8.3). A target that is longer than
what HAProxy keeps of it does not match either."""
BODY_MOST = 8192
HEAD_MOST = 5000
"""The most bytes of a body, and of such a request's fields, that HAProxy forwards by itself: both fit its buffer of 16
KiB."""

_ODD = (
    r"fly-|hawker-|x-forwarded-|proxy-|via:|te:|expect:|upgrade:|connection:|keep-alive:|trailer:|"
    r"transfer-encoding:|accept:[^\r\n]*(?i:text/event-stream)|host:(?! [A-Za-z0-9.-]++(?::[0-9]*)?\r)"
)
_REST = r"[^_:\r\n]++:[^\x00-\x1f\x7f]*+\r\n"
PLAIN_FIELDS = rf"^(?:(?!{_ODD}){_REST})++\r\n$"
"""Matches all fields of a request that needs no decision, as lines with names in lower case. None has a name that means
something to proxies, or one with `_`; no value has a character that the activator refuses, and the host is one. A
request that does not match passes unchanged to the activator. The pattern says what is right: one that looks everywhere
for what is wrong takes HAProxy a quarter of a small request's time."""
PLAIN_READING = rf"^(?:(?!content-length:|{_ODD}){_REST})++\r\n$"
"""The same pattern for a request without a body."""
OURS = r"(^|\ )(fly-|hawker-|proxy-|(te|upgrade|keep-alive)(\ |$)|content-type\ (.*\ )?content-type(\ |$))"
"""Names of an answer's fields that are not for users, or make it hard to tell what the answer is."""
JSON_REPLAY = "res.fhdr(content-type) -m beg -i application/vnd.fly.replay+json"
JSON_LAST = JSON_REPLAY.replace("(content-type)", "(content-type,-1)")
"""The same pattern where one such field is there for certain: it looks for no other one, which costs as much again."""


def text(config: Config) -> str:
    """The configuration file."""
    parts = [_global(config), *([_ring(config)] if config.logged else []), _base(config)]
    if any(frontend.tls for frontend in config.frontends):
        parts.append(_section(tls_config.bytes_only(config.times)))
    for frontend in config.frontends:
        parts += _first(config, frontend) if frontend.tls else []
        parts += [_frontend(config, frontend), _activator(config, frontend)]
    for kind in config.kinds:
        parts.append(_kind(config, kind))
        parts += [_backend(config, kind, name) for name in backend_ids(kind)]
    return "\n".join(parts)


def _global(config: Config) -> str:
    lines = [
        "global",
        f"nbthread {config.threads}",
        f"maxconn {config.connections}",
        f"stats socket {config.directory}/stats.sock mode 600 level admin",
        "stats timeout 1m",
        f"lua-load {config.directory}/replay.lua",
        f"hard-stop-after {_time(config.times.drain_s)}",
        f"tune.http.maxhdr {config.times.fields}",
        f"tune.http.logurilen {TARGET_MOST + 500}",  # the host of the first line, which has it over HTTP/2
    ]
    if config.root:
        lines += [f"chroot {config.directory}", f"user {config.user}", f"group {config.user}"]
    return _section(lines)


def _ring(config: Config) -> str:
    lines = [
        "ring told",
        "format raw",
        f"maxlen {RECORD_MOST}",
        f"size {RING_BYTES}",
        "timeout connect 1s",
        "timeout server 10s",
        f"server us unix@{config.inside(SOCKET)}",
    ]
    return _section(lines)


def _base(config: Config) -> str:
    times = config.times
    lines = [
        "defaults base",
        "mode http",
        f"timeout connect {_time(times.connect_timeout_s)}",
        f"timeout client {_time(times.idle_timeout_s)}",
        f"timeout http-request {_time(times.head_timeout_s)}",
        f"timeout http-keep-alive {_time(times.idle_timeout_s)}",
        f"timeout queue {_time(times.wait_s)}",
        f"timeout server {_time(times.wait_s + times.idle_timeout_s + 10)}",
        f"timeout tunnel {_time(times.wait_s + times.idle_timeout_s + 10)}",
        "option abortonclose",
        "option redispatch 1",
        "option http-ignore-probes",
        "option idle-close-on-response",
        "http-reuse always",
        *(f"errorfile {status} {config.directory}/errors/{status}.http" for status in ERRORS),
    ]
    return _section(lines)


def _frontend(config: Config, frontend: Frontend) -> str:
    public, tls = frontend.public, frontend.tls

    def backend(writing: bool) -> str:
        # All of the field but a port: of two names in it `req.hdr` would take the last.
        host = "var(sess.name)" if tls else "req.fhdr(host),host_only,lower"
        of_host = f"{host},map_str({map_of(config.directory, public, writing=writing)})"
        return f"use_backend %[{of_host}] if from_root current{' current_name' if tls else ''}"

    lines = [
        f"frontend p{public} from base",
        tls_config.bind(public, config.directory, config.user if config.root else "") if tls else _bind(frontend),
        *(_log(config) if config.logged else []),
        *([f"maxconn {most(config)}"] if not tls and any(each.tls for each in config.frontends) else []),
        *(tls_config.session(public, config.directory) if tls else _client(config.times, public)),
        "http-request set-var(txn.head) req.hdrs",
        f"acl from_root {'pathq' if tls else 'url'} -m reg '{PLAIN_TARGET}'",
        *(tls_config.choosing(public) if tls else ["acl current req.ver 1.1"]),
        f"acl reading method {READING}",
        f"{backend(False)} reading {{ var(txn.head) -m reg '{PLAIN_READING}' }}",
        f"{backend(True)} !reading {{ var(txn.head) -m reg '{PLAIN_FIELDS}' }} {{ req.body_size le {BODY_MOST} }} "
        f"{{ var(txn.head),length le {HEAD_MOST} }}",
        f"default_backend a{public}",
    ]
    return _section(lines)


def _bind(frontend: Frontend) -> str:
    host = f"[{frontend.host}]" if ":" in frontend.host else frontend.host
    return f"bind {host}:{frontend.port} backlog 4096"


def _first(config: Config, frontend: Frontend) -> list[str]:
    """The frontend and backends that stand before TLS."""
    public, directory = frontend.public, config.directory
    before = [line for line in _client(config.times, public) if "sess.client" not in line]
    ways = tls_config.backends(
        public, config.inside(tls_config.socket_of(public)), config.inside(socket_of(tls_config.sniffer_of(public)))
    )
    first = tls_config.first(public, _bind(frontend), directory, most(config), config.times, before)
    return [_section(lines) for lines in (first, *ways)]


def most(config: Config) -> int:
    """How many users' connections a port may have. Where some port has TLS, each of its connections counts twice, and
    those behind must find room whatever comes to other ports, or none of them moves."""
    return max(1, config.connections // sum(1 + frontend.tls for frontend in config.frontends))


def _client(settings: Settings, public: int) -> list[str]:
    """Rules that note where a connection comes from, once for each, since an address in letters costs more than all
    else that is added. What a load balancer tells of a connection is known only when its session begins."""
    kept = 'set-var(sess.client) src,regsub(^::ffff:,"")'
    if public not in settings.proxy_protocol:
        return [f"tcp-request connection {kept}"]
    return [
        # HAProxy allows 64 words in a line, and a CDN has hundreds of networks.
        *(
            f"acl of_trusted src {' '.join(settings.trusted[at : at + 16])}"
            for at in range(0, len(settings.trusted), 16)
        ),
        "tcp-request connection expect-proxy layer4 if of_trusted",
        f"tcp-request session {kept}",
    ]


def _log(config: Config) -> list[str]:
    return [
        f"log ring@told len {RECORD_MOST} format raw daemon",
        f'log-format "{record(request_id(config))}"',
        "option dontlognull",
        *(f"capture request header {name} len {TEXT_MOST}" for name in ("referer", "user-agent")),
        "http-request set-log-level silent",
    ]


def _activator(config: Config, frontend: Frontend) -> str:
    """The backend of the activator. A request is held until the activator answers: that may just restart."""
    public = frontend.public
    lines = [
        f"backend a{public} from base",
        # Send pieces of an answer as they come. At 1 MB that costs a fifth of the throughput, so only users who listen
        # for pieces get it.
        "option http-no-delay",
        "timeout connect 1s",
        "retries 60",
        "retry-on conn-failure empty-response",
        f"http-request disable-l7-retry unless {{ method {REPEATABLE} }}",
        "http-request del-header hawker-handed",
        f"http-request set-header hawker-client %[var(sess.{'said' if frontend.tls else 'client'})]",
        # A request that was read and refused ends the user's connection, as without HAProxy.
        "http-response set-header connection close if { res.fhdr(proxy-status) -m sub http_request_error }",
        f"server {ACTIVATOR} unix@{config.inside(socket_of(public))}",
    ]
    return _section(lines)


def _kind(config: Config, kind: Kind) -> str:
    service = kind.service
    idle = _time(service.idle_timeout_s)
    body = "{ req.body_size gt 0 }"
    tls = is_tls(kind)
    lines = [
        f"defaults k{kind.number} from base",
        "balance random(2)",
        f"timeout server {idle}",
        f"timeout tunnel {idle}",
        "retries 5",
        "retry-on conn-failure empty-response",
        # With one machine there is no other to try, and keeping a request for that costs a seventh of all.
        "http-request disable-l7-retry if { nbsrv lt 2 }",
        *(["http-request set-log-level info"] if config.logged else []),
        *_added("request", _of_request(config, kind.public, tls), config.joined),
        *(tls_config.of_kind(_time(config.times.idle_timeout_s)) if tls else []),
        f"http-request allow if {{ method {READING} }}",
        f"http-request disable-l7-retry unless {{ method {REPEATABLE} }}",
        # The answer may say that the request is for another machine.
        f"http-request wait-for-body time {_time(config.times.idle_timeout_s)} if {body}",
        f"http-request set-var(txn.body) req.body if {body}",
        *_answers(config, kind),
    ]
    return _section(lines)


def _of_request(config: Config, public: int, tls: bool) -> list[tuple[str, str]]:
    client = "%[var(sess.client)]"
    return [
        ("x-forwarded-proto", "https" if tls else "http"),
        ("x-forwarded-port", f"{public}"),
        ("x-forwarded-ssl", "on" if tls else "off"),
        ("fly-forwarded-port", f"{public}"),
        *([("fly-region", config.region)] if config.region else []),
        ("via", f"{'%[var(sess.http)]' if tls else '1.1'} hawker"),
        ("fly-client-ip", client),
        ("x-forwarded-for", client),
        ("fly-request-id", request_id(config)),
    ]


def _answers(config: Config, kind: Kind) -> list[str]:
    """Rules for answers. The activator's answers are ready; most of machines' get a few fields, and no more."""
    service = kind.service
    again = f"http-response lua.replay unix@{config.inside(socket_of(kind.public))}"
    removed = {name.decode() for name in service.removed_headers}
    given = [(name.decode(), value.decode()) for name, value in service.set_headers if name.decode() not in removed]
    cut = removed | {name for name, _ in given}
    ours = [("server", "hawker"), ("via", "1.1 hawker"), ("fly-request-id", request_id(config))]
    added = [] if service.pristine else [field for field in ours if field[0] not in cut]
    own: tuple[str, ...] = ("server",)
    if service.pristine:
        own = ("server", "via", "fly-request-id", "fly-cache-status")
    followed = [
        f"http-response wait-for-body time 10s if {{ {JSON_REPLAY} }}",
        f"{again} if {{ {JSON_REPLAY} }} or {{ res.fhdr(fly-replay) -m found }}",
    ]
    for_proxies = [
        "http-response del-header hawker- -m beg",
        "http-response del-header fly-replay-cache -m beg",
        "http-response del-header proxy- -m beg",
        *(f"http-response del-header {name}" for name in ("keep-alive", "te", "upgrade", "fly-request-id")),
    ]
    tls = is_tls(kind)
    joined = config.joined and not tls  # a user of HTTP/2 gets no fields as lines
    quick = not cut and (config.joined or service.pristine)
    if tls and quick and not service.pristine:
        own += ("fly-request-id",)  # before ours has that name
        for_proxies.remove("http-response del-header fly-request-id")
    taken_off = [f"http-response del-header {name}" for name in own]
    lines = ["http-response allow if { srv_id 1 }"]
    if config.logged:
        lines.insert(0, "http-response set-log-level silent if { srv_id 1 }")
    if quick:
        names = OURS.replace("fly-", r"fly-(?!request-id(\ |$))") if tls and not service.pristine else OURS
        ready = rf"http-response allow unless {{ res.hdr_names(\ ) -m reg {names} }} or {{ {JSON_LAST} }}"
        return [*lines, *taken_off, *_added("response", added, joined), ready, *followed, *for_proxies]
    lines += [*followed, *for_proxies, *taken_off, *_added("response", added, joined)]
    lines += [f"http-response del-header {name}" for name in sorted(removed)]
    lines += [f'http-response set-header {name} "{value}"' for name, value in given]
    return lines


def _added(to: str, fields: Sequence[tuple[str, str]], joined: bool) -> list[str]:
    """Rules that add fields. Joined fields are one field: its name has everything that is the same in each request,
    which HAProxy copies as it is; it reads a value anew each time. No other rule finds such fields by their names."""
    if not joined or not fields:
        return [f'http-{to} add-header {name} "{value}"' for name, value in fields]
    same = [field for field in fields if "%" not in field[1]]
    differing = [field for field in fields if "%" in field[1]] or [same.pop()]
    names, _, values = r"\r\n".join(f"{name}: {value}" for name, value in differing).partition(": ")
    name = "".join(rf"{name}: {value}\r\n" for name, value in same) + names
    return [f'http-{to} add-header "{name}" "{values}"']


def _backend(config: Config, kind: Kind, name: str) -> str:
    lines = [
        f"backend {name} from k{kind.number}",
        f"use-server {ACTIVATOR} if {{ be_conn_free lt 1 }}",
        *(tls_config.of_backend() if is_tls(kind) else []),
        f"server {ACTIVATOR} unix@{config.inside(socket_of(kind.public))} id 1 backup",
        *(f"server {server.machine} {server_words(server)}" for server in config.servers.get(name, ())),
    ]
    return _section(lines)


ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("Bad Request", "PH01: this is no request that is taken", "http_request_error"),
    408: ("Request Timeout", "PH03: the request did not come in time", "http_request_error"),
    500: ("Internal Server Error", "PR00: the proxy failed", "proxy_internal_error"),
    502: ("Bad Gateway", "PC02: no answer from a machine of this app", "connection_terminated"),
    503: ("Service Unavailable", "PR03: no machine took the request in time", "destination_unavailable"),
    504: ("Gateway Timeout", "PC05: no answer from a machine of this app in time", "connection_timeout"),
}
"""HAProxy's own answers: reason, text, error type of RFC 9209."""


def error_file(status: int, name: str) -> bytes:
    """The whole answer. `name` is the name of this proxy."""
    reason, said, error = ERRORS[status]
    fields = [
        f"content-length: {len(said) + 1}",
        "content-type: text/plain; charset=utf-8",
        "cache-control: no-store",
        f'proxy-status: {name}; error={error}; details="{said[:4]}"',
        *(["retry-after: 1"] if status == 503 else []),
        *(["connection: close"] if status in (400, 408) else []),
    ]
    return "\r\n".join((f"HTTP/1.1 {status} {reason}", *fields, "", f"{said}\n")).encode()


def _section(lines: Sequence[str]) -> str:
    return "\n  ".join(lines) + "\n"


def _time(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
