"""Describes what HAProxy is to serve, and the names that it is served under. `hawker.proxy.haproxy.config_text` writes
the configuration from this.

A *kind* is a public port and what a service says of it (`ServicePort`): HAProxy treats requests and answers of all apps
of a kind alike. Each kind has a number of backends, which are given to apps at run time, since HAProxy 2.6 cannot make
new ones then.
"""

from __future__ import annotations

import re

import msgspec

from hawker.proxy.base import ServicePort
from hawker.proxy.embedded.settings import Settings
from hawker.proxy.haproxy import tls_config

ACTIVATOR = "act"
PLAIN = ServicePort(handlers=("http",))
USUAL = ServicePort(handlers=("tls", "http"))
"""The usual service over TLS."""
TIME_MOST_S = 24 * 86_400.0
"""HAProxy refuses a configuration with a longer time: its clock goes so far."""
_SAFE_NAME = re.compile(rb"[a-z0-9-]{1,64}")
_SAFE_VALUE = re.compile(rb"[A-Za-z0-9 .,;:/=+*()@?!<>_-]{0,512}")


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A machine in a backend. `slots`: how many requests it may be given at a time."""

    machine: str
    host: str
    port: int
    slots: int


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind with `count` backends, `k<number>b0` and so on."""

    number: int
    public: int
    service: ServicePort
    count: int


class Frontend(msgspec.Struct, frozen=True, kw_only=True):
    """A public port, and where it is served. `tls`: it is one with TLS."""

    public: int
    host: str
    port: int
    tls: bool = False


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All that one configuration has. `root`: HAProxy is started as root, changes to `user`, and sees nothing but
    `directory`. `prefix` begins the ids of requests. `servers` are those of backends at the time of writing."""

    directory: str
    root: bool
    user: str
    threads: int
    connections: int
    region: str
    prefix: str
    frontends: tuple[Frontend, ...]
    kinds: tuple[Kind, ...]
    servers: dict[str, tuple[Server, ...]]
    times: Settings
    sockets: dict[str, int]
    """The activator's sockets by name: their numbers in HAProxy's master. They are no part of the text."""
    logged: bool = False
    """Whether HAProxy tells which requests it forwarded, for the access log."""
    joined: bool = False
    """Fields are added as one that has several lines: each rule costs HAProxy more than what it adds. With versions
    that are not known to write this as it is, each field has a rule."""

    def inside(self, path: str) -> str:
        """A path in the directory as HAProxy sees it once it serves."""
        return f"/{path}" if self.root else f"{self.directory}/{path}"


def carries(service: ServicePort, *, tls: bool = False) -> bool:
    """Whether HAProxy can do all that a service's public port asks for, on a port without TLS or with it."""
    return (
        (tls_config.ends(service) if tls else "http" in service.handlers and "tls" not in service.handlers)
        and not (service.force_https and not tls)
        and 0 < service.idle_timeout_s <= TIME_MOST_S
        and not (service.h2_backend or service.compress or service.replay_cache)
        and all(_SAFE_NAME.fullmatch(name) for name in service.removed_headers)
        and all(_SAFE_NAME.fullmatch(name) and _SAFE_VALUE.fullmatch(value) for name, value in service.set_headers)
    )


def socket_of(name: int | str) -> str:
    """Where the activator listens, below the directory: for requests of a public port, or for its connections."""
    return f"act/{name}.sock"


def map_of(directory: str, public: int, *, writing: bool = False) -> str:
    """The map from hosts to backends, whose path is also its name at run time. Methods that change something have a map
    of their own."""
    return f"{directory}/maps/{public}{'w' if writing else ''}.map"


def server_words(server: Server) -> str:
    """A server's address and options, in a configuration and at run time alike. One refused connection marks the server
    down until HAProxy is told that it is up: the check that this needs is never really made."""
    host = f"[{server.host}]" if ":" in server.host else server.host
    return (
        f"{host}:{server.port} maxconn {server.slots} pool-max-conn 1000 pool-purge-delay 4s "
        "check inter 24d fall 1000 observe layer4 error-limit 1 on-error mark-down"
    )


def backend_ids(kind: Kind) -> list[str]:
    return [f"k{kind.number}b{number}" for number in range(kind.count)]


def is_tls(kind: Kind) -> bool:
    """Whether this kind is one of a port with TLS."""
    return "tls" in kind.service.handlers


def request_id(config: Config) -> str:
    """The format of a request's id: the same in all that is said of it, and cheaper than HAProxy's own, which it
    keeps."""
    return f"{config.prefix}-%pid-%rt" + (f"-{config.region}" if config.region else "")
