"""A configuration's `services`: the ports of a machine that others reach, and what a proxy is to do with them.

The worker publishes every `internal_port` on a port of its host. What only a proxy acts on (handlers, concurrency,
starting and stopping by load) is checked and kept.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hawker.errors import Invalid
from hawker.model.inside import objects

Protocol = Literal["tcp", "udp"]

_HANDLERS = ("http", "tls", "pg_tls", "proxy_proto", "edge_http")
_AUTOSTOP = (None, False, True, "", "off", "stop", "suspend")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """`ports` are ranges of public ports, first and last, with their handlers."""

    protocol: Protocol
    internal_port: int
    ports: tuple[tuple[int, int, tuple[str, ...]], ...] = ()


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a machine as its worker publishes it."""

    protocol: Protocol
    internal_port: int
    host_port: int


def check_services(value: Any, at: str) -> tuple[Service, ...]:
    """From decoded JSON. Raises `Invalid`, naming the field, the value and the remedy."""
    return tuple(_service(raw, f"{at}[{n}]") for n, raw in enumerate(objects(at, value)))


def published(services: tuple[Service, ...]) -> tuple[tuple[Protocol, int], ...]:
    """What must be reachable, each once, in the order given."""
    return tuple(dict.fromkeys((service.protocol, service.internal_port) for service in services))


def _service(raw: dict[str, Any], at: str) -> Service:
    protocol: Any = raw.get("protocol") or "tcp"
    if protocol not in ("tcp", "udp"):
        raise Invalid(f"{at}.protocol", protocol, "use tcp or udp")
    if not any(raw.get("autostop") is choice or raw.get("autostop") == choice != 0 for choice in _AUTOSTOP):
        raise Invalid(f"{at}.autostop", raw["autostop"], "use off, stop or suspend")
    autostart = raw.get("autostart")
    if autostart is not None and not isinstance(autostart, bool):
        raise Invalid(f"{at}.autostart", autostart, "give true or false")
    _count(raw.get("min_machines_running"), f"{at}.min_machines_running")
    _concurrency(raw.get("concurrency"), f"{at}.concurrency")
    ports = tuple(_ports(entry, f"{at}.ports[{n}]") for n, entry in enumerate(objects(f"{at}.ports", raw.get("ports"))))
    internal = _port(raw.get("internal_port"), f"{at}.internal_port")
    return Service(protocol=protocol, internal_port=internal, ports=ports)


def _ports(raw: dict[str, Any], at: str) -> tuple[int, int, tuple[str, ...]]:
    handlers = raw.get("handlers") or []
    if not isinstance(handlers, list) or not all(handler in _HANDLERS for handler in handlers):
        raise Invalid(f"{at}.handlers", handlers, f"a list of {', '.join(_HANDLERS)}")
    force = raw.get("force_https")
    if force is not None and not isinstance(force, bool):
        raise Invalid(f"{at}.force_https", force, "give true or false")
    if raw.get("port"):
        first = last = _port(raw["port"], f"{at}.port")
    else:
        first, last = _port(raw.get("start_port"), f"{at}.start_port"), _port(raw.get("end_port"), f"{at}.end_port")
    if first > last:
        raise Invalid(f"{at}.end_port", last, f"a range ends at its start or after it: {first} or more")
    return first, last, tuple(handlers)


def _concurrency(raw: Any, at: str) -> None:
    if raw is None:
        return
    if not isinstance(raw, dict):
        raise Invalid(at, raw, 'give an object such as {"type": "requests", "soft_limit": 20, "hard_limit": 25}')
    if raw.get("type") not in (None, "", "connections", "requests"):
        raise Invalid(f"{at}.type", raw["type"], "use connections or requests")
    for field in ("soft_limit", "hard_limit"):
        _count(raw.get(field), f"{at}.{field}")


def _count(value: Any, field: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise Invalid(field, value, "give a count")


def _port(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise Invalid(field, value, "give a port from 1 to 65535")
    return value
