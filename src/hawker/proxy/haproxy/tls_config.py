"""Writes what HAProxy's configuration has for a public port with TLS. Pure.

    user --> t443: the name in the hello --> p443: TLS ends, and requests are as on any port
                                         --> g443: the embedded plane gets the connection, with every byte of it

The names that TLS ends for are in a map, and the certificates in a list: both change while HAProxy runs. The embedded
plane looks at connections without TLS, without a name, or with another name; the PROXY protocol tells it whose
connection it is.
"""

from __future__ import annotations

from hawker.proxy.base import ServicePort
from hawker.proxy.certificates import TLS12_CIPHERS
from hawker.proxy.embedded.settings import Settings

ALPN = "h2,http/1.1"
CURVES = "X25519:P-256:P-384"
LONG = "24d"
"""The longest time of HAProxy's clock: whoever carries the connection behind it ends it."""


def socket_of(public: int) -> str:
    """The socket, below the directory, for connections whose TLS HAProxy itself ends."""
    return f"tls/{public}.sock"


def sniffer_of(public: int) -> str:
    """The name of the embedded plane's socket for the other connections."""
    return f"{public}g"


def names_of(directory: str, public: int) -> str:
    """The map of names that TLS ends for, each to itself."""
    return f"{directory}/maps/{public}n.map"


def list_of(directory: str) -> str:
    """The list of certificates, of all ports."""
    return f"{directory}/certs/all.list"


def bytes_only(times: Settings) -> list[str]:
    """What the backends of bytes have in common."""
    ending = f"{round(times.idle_timeout_s * 1000)}ms"
    return [
        "defaults bytes",
        "mode tcp",
        f"timeout connect {round(times.connect_timeout_s * 1000)}ms",
        *(f"timeout {which} {LONG}" for which in ("client", "server", "tunnel")),
        *(f"timeout {which}-fin {ending}" for which in ("client", "server")),
    ]


def first(public: int, bind: str, directory: str, most: int, times: Settings, before: list[str]) -> list[str]:
    """The frontend where users come. `before`: the rules for a new connection."""
    return [
        f"frontend t{public} from bytes",
        bind,
        f"maxconn {most}",  # each comes a second time, and must find room behind
        *before,
        f"tcp-request inspect-delay {round(times.head_timeout_s * 1000)}ms",
        "tcp-request content accept if !{ req.payload(0,1) -m bin 16 }",  # no handshake
        "tcp-request content accept if { req.ssl_hello_type 1 }",
        "tcp-request content reject if { req.len lt 1 }",  # the client has said nothing in all that time
        f"use_backend l{public} if {{ req.ssl_sni,lower,map_str({names_of(directory, public)}) -m found }}",
        f"default_backend g{public}",
    ]


def backends(public: int, own: str, sniffer: str) -> list[list[str]]:
    """The backends of that frontend: this HAProxy again, and the embedded plane, which is waited for."""
    return [
        [f"backend l{public} from bytes", f"server us unix@{own} send-proxy-v2"],
        [
            f"backend g{public} from bytes",
            "timeout connect 1s",
            "retries 60",
            f"server act unix@{sniffer} send-proxy-v2",
        ],
    ]


def bind(public: int, directory: str, owner: str) -> str:
    """The bind line where TLS ends. `owner`: the user that HAProxy serves as, "" for who starts it."""
    return (
        f"bind unix@{directory}/{socket_of(public)} mode 600{f' user {owner}' if owner else ''} backlog 4096 "
        f"accept-proxy ssl crt-list {list_of(directory)} strict-sni alpn {ALPN} "
        f"ssl-min-ver TLSv1.2 ciphers {TLS12_CIPHERS} curves {CURVES}"
    )


def session(public: int, directory: str) -> list[str]:
    """Rules that note what is known of a connection once TLS has begun. The name is as the map has it, so that in a
    field nobody can read it as something else."""
    return [
        f"tcp-request session set-var(sess.name) ssl_fc_sni,lower,map_str({names_of(directory, public)})",
        "tcp-request session reject unless { var(sess.name) -m found }",
        "tcp-request session set-var(sess.http) str(1.1)",
        "tcp-request session set-var(sess.http) str(2) if { ssl_fc_alpn h2 }",
        'tcp-request session set-var(sess.client) src,regsub(^::ffff:,"")',
        'tcp-request session set-var(sess.said) var(sess.client),concat(" ",sess.http," "),concat(,sess.name)',
    ]


def choosing(public: int) -> list[str]:
    """Conditions of a request beside those on any port. Targets of HTTP/2 are whole URLs to HAProxy, and those of
    unknown schemes are so to machines, too."""
    return [
        "acl two var(sess.http) -m str 2",
        f"use_backend a{public} unless {{ url_beg / }} !two or {{ url_beg https:// http:// }} two",
        "acl current req.ver 1.1 2.0",
        "acl current_name req.fhdr(host),host_only,lower,strcmp(sess.name) eq 0",
    ]


def of_kind(idle: str) -> list[str]:
    """Rules for requests. Over HTTP/2 no field says that there is a body, if the body says nothing of its length."""
    return [f"http-request wait-for-body time {idle} at-least 1 if {{ var(sess.http) -m str 2 }}"]


def of_backend() -> list[str]:
    """The rule that a body of unknown length goes to no machine."""
    return ["use-server act if { req.body_size gt 0 } !{ req.fhdr(content-length) -m found }"]


def ends(service: ServicePort) -> bool:
    """Whether HAProxy can end TLS as a service wants it, with all of its port's certificates and versions."""
    plain = ServicePort()
    return {"tls", "http"} <= set(service.handlers) and (service.alpn, service.tls_versions) == (
        plain.alpn,
        plain.tls_versions,
    )
