"""The rows of the catalog's `services` as values: what a machine serves, and what a data plane makes of a public port.

A row may come from a newer Hawker, or be bad: `served` raises `ValueError` then, and the caller goes on without it.
Thousands of machines have the same ports, so what they are read to is kept and shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from sys import intern
from typing import Any

import msgspec

from hawker.model.services import (
    LEAST_AGGRESSIVE,
    Autostop,
    Concurrency,
    Protocol,
    PublicPort,
    read_concurrency,
    read_ports,
)
from hawker.proxy.base import ServicePort

KEPT = 4096
"""How many different texts of ports are kept as values; an app has one or two."""


class Served(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A port inside a machine. `host_port` is where its worker's host takes connections for it, 0: nowhere."""

    machine: str
    app: str
    protocol: Protocol
    internal_port: int
    host_port: int
    ports: tuple[PublicPort, ...]
    concurrency: Concurrency
    autostart: bool
    autostop: Autostop
    min_machines_running: int

    def at(self, port: int) -> PublicPort | None:
        """The public port of the service with this number, if it has it."""
        return next((each for each in self.ports if each.first <= port <= each.last), None)


def served(row: Mapping[str, Any]) -> Served:
    """Read the columns of a row of `services`, by name. Raises `ValueError`."""
    autostop: Any = intern(row["autostop"] or "off")
    protocol: Any = intern(row["protocol"] or "tcp")
    if autostop not in LEAST_AGGRESSIVE:
        autostop = "off"  # a newer Hawker wrote it: whatever it is, a machine that runs does no harm
    if protocol not in ("tcp", "udp"):
        raise ValueError(f"protocol {protocol!r} is not known here")
    ports = _ports(row["ports"] or "[]")
    try:
        for port in ports:
            service_port(port)
    except OverflowError as error:
        raise ValueError(f"a number is too large: {error}") from error
    return Served(
        machine=intern(row["machine"]),
        app=intern(row["app"]),
        protocol=protocol,
        internal_port=row["internal_port"],
        host_port=row["host_port"],
        ports=ports,
        concurrency=_concurrency(row["concurrency"] or "{}"),
        autostart=bool(row["autostart"]),
        autostop=autostop,
        min_machines_running=row["min_machines_running"],
    )


@lru_cache(KEPT)
def service_port(port: PublicPort) -> ServicePort:
    """The public port as data planes take it; what a configuration leaves open is as `ServicePort` has it."""
    http = port.http
    times = {"idle_timeout_s": http.idle_timeout_s, "headers_read_timeout_s": http.headers_read_timeout_s}
    return ServicePort(
        handlers=port.handlers,
        force_https=port.force_https,
        h2_backend=http.h2_backend,
        proxy_protocol=port.proxy_protocol,
        pristine=http.pristine,
        compress=http.compress,
        set_headers=tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in http.set_headers),
        removed_headers=frozenset(name.encode("latin-1") for name in http.removed_headers),
        alpn=port.tls.alpn,
        tls_versions=port.tls.versions,
        self_signed=port.tls.default_self_signed,
        replay_cache=http.replay_cache,
        **{name: float(seconds) for name, seconds in times.items() if seconds > 0},
    )


_ports = lru_cache(KEPT)(read_ports)
_concurrency = lru_cache(KEPT)(read_concurrency)
