"""A configuration's health checks. Those of its services decide whether a proxy sends requests to the machine; the
named ones beside them show how the machine is.

    "services": [{"internal_port": 8080, "checks": [{"type": "http", "path": "/up", "interval": "10s"}]}]
    "checks": {"disk": {"type": "tcp", "port": 9100}, "warm": {"type": "http", "port": 8080, "kind": "readiness"}}

Fields and words are those of the Machines API. That API documents no defaults, so `INTERVAL_S`, `TIMEOUT_S` and
`GRACE_S` are the values of its examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from hawker.errors import Invalid
from hawker.model.json_fields import check_choice, check_flag, check_port, objects
from hawker.model.services import Service
from hawker.model.values import format_duration, parse_duration_s

INTERVAL_S = 15.0
TIMEOUT_S = 2.0
GRACE_S = 1.0
INTERVAL_S_LEAST, INTERVAL_S_MOST = 0.1, 3600.0
TIMEOUT_S_LEAST, TIMEOUT_S_MOST = 0.01, 300.0
GRACE_S_MOST = 3600.0
CHECKS_MOST = 32
"""The most checks that one machine may have, because each is a row of the catalog."""
NAME_MOST = 200
PATH_MOST = 2048
SERVICE_PREFIX = "servicecheck-"
"""Clients tell services' checks from a machine's own by this (fly-go, `TopLevelChecks`)."""

Kind = Literal["service", "readiness", "informational"]
"""`service` and `readiness` take a machine out of traffic while they do not pass, `informational` does nothing."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_PATH = re.compile(r"/[!-~]*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_BREAKS_VALUE = re.compile(r"[\r\n\0]")
_DURATIONS = {
    "interval": (INTERVAL_S_LEAST, INTERVAL_S_MOST),
    "timeout": (TIMEOUT_S_LEAST, TIMEOUT_S_MOST),
    "grace_period": (0.0, GRACE_S_MOST),
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a machine. `service` is "tcp/8080" for the check of a service, else "". Times are in seconds. An
    `http` check passes with an answer of 200 to 299; its `headers` replace ours of the same name."""

    name: str
    kind: Kind
    type: Literal["http", "tcp"]
    port: int
    service: str = ""
    interval_s: float = INTERVAL_S
    timeout_s: float = TIMEOUT_S
    grace_s: float = GRACE_S
    method: str = "GET"
    path: str = "/"
    tls: bool = False
    tls_verify: bool = True
    tls_server_name: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def gates(self) -> bool:
        """Whether a machine gets no requests while this check does not pass."""
        return self.kind != "informational"


def has_checks(raw: Mapping[str, Any]) -> bool:
    """Whether a stored configuration has any checks. Most have none, and this is cheaper than reading them."""
    return bool(raw.get("checks")) or any(service.get("checks") for service in raw.get("services") or ())


def check_checks(raw: Mapping[str, Any], services: Sequence[Service], at: str) -> tuple[Check, ...]:
    """All checks of a configuration from decoded JSON, those of its services first; these are numbered through, as the
    API names them: `servicecheck-00-http-8080`. `services` are its services as they were read. Raises `Invalid`, naming
    the field, the value and the remedy."""
    found: list[Check] = []
    for n, service in enumerate(services):
        where = f"{at}.services[{n}].checks"
        for m, given in enumerate(objects(where, raw["services"][n].get("checks"))):
            of = f"{service.protocol}/{service.internal_port}"
            check = _check(given, f"{where}[{m}]", kind="service", service=of, port=service.internal_port)
            name = f"{SERVICE_PREFIX}{len(found):02}-{check.type}-{check.port}"
            found.append(msgspec.structs.replace(check, name=name))
    found += _named(raw.get("checks"), f"{at}.checks")
    if len(found) > CHECKS_MOST:
        raise Invalid(
            f"{at}.checks", f"{len(found)} in all", f"a machine has at most {CHECKS_MOST}, services' included"
        )
    return tuple(found)


def with_written_durations(raw: dict[str, Any]) -> dict[str, Any]:
    """The checked configuration with its checks' durations as strings. The API also accepts integer nanoseconds, but
    always returns strings."""
    filled = dict(raw)
    if services := raw.get("services"):
        filled["services"] = [
            {**service, "checks": [_written(check) for check in service["checks"]]}
            if service.get("checks")
            else service
            for service in services
        ]
    if named := raw.get("checks"):
        filled["checks"] = {name: _written(check) for name, check in named.items()}
    return filled


def _named(value: Any, at: str) -> list[Check]:
    if not value:
        return []
    if not isinstance(value, dict):
        raise Invalid(at, value, 'give an object of checks by name: {"up": {"type": "tcp", "port": 8080}}')
    found = []
    for name, given in value.items():
        if not 0 < len(name) <= NAME_MOST or not name.isprintable() or name.startswith(SERVICE_PREFIX):
            remedy = f"name a check in 1 to {NAME_MOST} printable characters, not beginning with {SERVICE_PREFIX}"
            raise Invalid(at, name, remedy)
        if not isinstance(given, dict):
            raise Invalid(f"{at}.{name}", given, 'give an object such as {"type": "tcp", "port": 8080}')
        kind = check_choice(f"{at}.{name}.kind", given.get("kind") or "informational", "informational", "readiness")
        check = _check(given, f"{at}.{name}", kind=kind, service="", port=None)
        found.append(msgspec.structs.replace(check, name=name))
    return found


def _check(raw: dict[str, Any], at: str, *, kind: Kind, service: str, port: int | None) -> Check:
    """A check without its name. `port` is the default."""
    found = check_choice(f"{at}.type", raw.get("type"), "http", "tcp")
    http = _http(raw, at) if found == "http" else {}
    return Check(
        name="",
        kind=kind,
        type=found,
        port=check_port(f"{at}.port", raw.get("port") or port),
        service=service,
        interval_s=_duration(raw, "interval", INTERVAL_S, at),
        timeout_s=_duration(raw, "timeout", TIMEOUT_S, at),
        grace_s=_duration(raw, "grace_period", GRACE_S, at),
        **http,
    )


def _http(raw: dict[str, Any], at: str) -> dict[str, Any]:
    method = raw.get("method") or "GET"
    if not isinstance(method, str) or not _TOKEN.fullmatch(method) or method.upper() == "CONNECT":
        raise Invalid(f"{at}.method", method, "use a method such as GET or HEAD")
    path = raw.get("path") or "/"
    if not isinstance(path, str) or not _PATH.fullmatch(path) or len(path) > PATH_MOST:
        remedy = f"begin it with /, without spaces or letters beyond ASCII, at most {PATH_MOST} characters"
        raise Invalid(f"{at}.path", path, remedy)
    protocol = check_choice(f"{at}.protocol", raw.get("protocol") or "http", "http", "https")
    name = raw.get("tls_server_name") or ""
    if name and not (isinstance(name, str) and _HOST.fullmatch(name)):
        raise Invalid(f"{at}.tls_server_name", name, "give the name that the certificate is for")
    return {
        "method": method.upper(),
        "path": path,
        "tls": protocol == "https",
        "tls_verify": not check_flag(f"{at}.tls_skip_verify", raw.get("tls_skip_verify")),
        "tls_server_name": name,
        "headers": _headers(raw.get("headers"), f"{at}.headers"),
    }


def _headers(value: Any, at: str) -> tuple[tuple[str, str], ...]:
    found = []
    for n, given in enumerate(objects(at, value)):
        name, values = given.get("name"), given.get("values") or []
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise Invalid(f"{at}[{n}].name", name, "give the name of a header, such as X-Forwarded-Proto")
        if not isinstance(values, list) or not all(_is_value(text) for text in values):
            raise Invalid(f"{at}[{n}].values", values, "give a list of strings of one line each")
        found += [(name, text) for text in values]
    return tuple(found)


def _is_value(text: Any) -> bool:
    return isinstance(text, str) and not _BREAKS_VALUE.search(text) and text.isprintable()


def _duration(raw: dict[str, Any], field: str, default: float, at: str) -> float:
    value = raw.get(field)
    if value is None or value == "":
        return default
    seconds = parse_duration_s(f"{at}.{field}", value)
    least, most = _DURATIONS[field]
    if not least <= seconds <= most:
        raise Invalid(f"{at}.{field}", value, f"from {format_duration(least)} to {format_duration(most)}")
    return seconds


def _written(check: dict[str, Any]) -> dict[str, Any]:
    given = {field: check[field] for field in _DURATIONS if isinstance(check.get(field), int)}
    return {**check, **{field: format_duration(parse_duration_s(field, value)) for field, value in given.items()}}
