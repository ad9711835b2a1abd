"""Plain values and how they are written: ids, durations, times.

Everything here is a pure function of its arguments; clocks and randomness come in from `hawker.host`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NewType

from hawker.errors import Invalid

MachineId = NewType("MachineId", str)  # 14 lower-case hex digits
Ulid = NewType("Ulid", str)  # 26 characters, sorts by time
WorkerName = NewType("WorkerName", str)
Region = NewType("Region", str)  # a code such as "ord"

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_MACHINE_ID = re.compile(r"[0-9a-f]{14}")
_APP_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def ulid(at_ms: int, random_80_bits: int) -> Ulid:
    """A ULID: 48 bits of time in milliseconds, then 80 random bits, in Crockford's base 32 (github.com/ulid/spec)."""
    value = (at_ms << 80) | random_80_bits
    return Ulid("".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5)))


def is_machine_id(text: str) -> bool:
    return _MACHINE_ID.fullmatch(text) is not None


def check_app_name(name: str) -> str:
    """Lower-case letters, digits and dashes, at most 63; never of the form of a machine id.

    The original six paths put apps and machine ids in the same place (`/v1/apps/{machineid}`), so the two must be told
    apart.
    """
    if not _APP_NAME.fullmatch(name):
        raise Invalid("name", name, "use lower-case letters, digits and dashes, at most 63, not starting with a dash")
    if is_machine_id(name):
        raise Invalid("name", name, "14 hexadecimal digits would read as a machine id; add a letter past f or a dash")
    return name


def parse_duration_s(field: str, value: Any) -> float:
    """Seconds from a duration as the API writes it: "15s", "1m0s", or an integer count of nanoseconds."""
    remedy = 'write a duration such as "15s" or "1m30s"'
    if isinstance(value, bool):
        raise Invalid(field, value, remedy)
    if isinstance(value, int):
        if value < 0:
            raise Invalid(field, value, remedy)
        return value / 1e9
    if not isinstance(value, str) or not value:
        raise Invalid(field, value, remedy)
    if value == "0":
        return 0.0
    total, at = 0.0, 0
    for part in _DURATION_PART.finditer(value):
        if part.start() != at:
            break
        total += float(part[1]) * _UNIT_S[part[2]]
        at = part.end()
    if at != len(value):
        raise Invalid(field, value, remedy)
    return total


def format_duration(seconds: float) -> str:
    """The way Go prints a duration, which is what clients of this API parse: "1m0s", "500ms", "0s"."""
    if seconds == 0:
        return "0s"
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:g}s"
    if minutes or hours:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def rfc3339(at_ms: int) -> str:
    """UTC time of a Unix time in milliseconds, as RFC 3339 with a `Z`."""
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class ImageRef:
    """An image reference taken apart: `registry/repository:tag@digest`, with Docker's defaults."""

    __slots__ = ("digest", "registry", "repository", "tag")

    def __init__(self, text: str) -> None:
        rest, _, self.digest = text.partition("@")
        head, slash, tail = rest.partition("/")
        if slash and ("." in head or ":" in head or head == "localhost"):
            self.registry, path = head, tail
        else:
            self.registry, path = "registry-1.docker.io", rest
        self.repository, _, tag = path.partition(":")
        self.tag = tag or ("" if self.digest else "latest")
        if self.registry == "registry-1.docker.io" and "/" not in self.repository:
            self.repository = f"library/{self.repository}"

    def as_json(self, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {
            "registry": self.registry,
            "repository": self.repository,
            "tag": self.tag,
            "digest": self.digest,
            "labels": dict(labels or {}),
        }


HOST_IMAGE = "host"


def is_host_image(image: str) -> bool:
    """The image named `host` stands for the host's own programs: the process driver runs it, no registry is asked."""
    return image == HOST_IMAGE
