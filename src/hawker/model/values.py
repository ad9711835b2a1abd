"""Plain values and how they are written: ids, addresses, durations, times.

Everything here is a pure function of its arguments; clocks and randomness come in from `hawker.host`.
"""

from __future__ import annotations

import re
import signal as signals
from datetime import UTC, datetime
from typing import Any, NewType

from hawker.errors import Invalid

MachineId = NewType("MachineId", str)  # 14 lower-case hex digits
Ulid = NewType("Ulid", str)  # 26 characters, sorts by time
Region = NewType("Region", str)  # a code such as "ord"

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_CROCKFORD_PAIRS = [a + b for a in _CROCKFORD for b in _CROCKFORD]  # ten bits each
_MACHINE_ID = re.compile(r"[0-9a-f]{14}")
_APP_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_DURATION_PART = re.compile(r"(?=[0-9.])([0-9]*)\.?([0-9]*)(ns|us|\u00b5s|\u03bcs|ms|s|m|h)")
_UNIT_NS = {
    "ns": 1,
    "us": 10**3,
    "\u00b5s": 10**3,  # Unicode has two mu; Go reads both and writes this one
    "\u03bcs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_DURATION_NS_MOST = 2**63 - 1  # what Go can hold: 292 years


def ulid(at_ms: int, random_80_bits: int) -> Ulid:
    """A ULID: 48 bits of time in milliseconds, then 80 random bits, in Crockford's base 32 (github.com/ulid/spec)."""
    value = (at_ms << 80) | random_80_bits
    return Ulid("".join([_CROCKFORD_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)]))


def read_ulid(text: str) -> tuple[int, int]:
    """The milliseconds and the random bits of a ULID. Raises `ValueError`."""
    value = 0
    for character in text:
        value = value << 5 | _CROCKFORD.index(character)
    return value >> 80, value & ((1 << 80) - 1)


def is_machine_id(text: str) -> bool:
    return _MACHINE_ID.fullmatch(text) is not None


def check_app_name(name: str) -> str:
    """Lower-case letters, digits and dashes, at most 63; never of the form of a machine id.

    Six paths of the public API have either an app or a machine id in the same place (`/v1/apps/{machineid}`), so no app
    may be named like a machine.
    """
    if not _APP_NAME.fullmatch(name):
        raise Invalid("name", name, "use lower-case letters, digits and dashes, at most 63, not starting with a dash")
    if is_machine_id(name):
        raise Invalid("name", name, "14 hexadecimal digits would read as a machine id; add a letter past f or a dash")
    return name


def check_label(field: str, text: str) -> str:
    """A name that people give to a machine, an organization or a network. Raises `Invalid`."""
    if not 0 < len(text) <= 63 or not text.isprintable():
        raise Invalid(field, text[:100], "use 1 to 63 characters, none of them a control character or a line end")
    return text


def host_port(field: str, text: str, *, named: bool = False) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address may stand in brackets. An empty host means all addresses, and is refused if
    the host has to be `named`. Raises `Invalid`."""
    host, _, port = text.rpartition(":")
    if (named and not host) or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise Invalid(field, text, "write host:port")
    return host.strip("[]"), int(port)


def parse_duration_s(field: str, value: Any) -> float:
    """Seconds from a duration as the API writes it: "15s", "1m0s", or an integer count of nanoseconds."""
    ns = _parse_ns(value) if isinstance(value, str) else value
    if isinstance(ns, bool) or not isinstance(ns, int) or not 0 <= ns <= _DURATION_NS_MOST:
        raise Invalid(field, value, 'write a duration such as "15s" or "1m30s"')
    return ns / 10**9


def _parse_ns(text: str) -> int | None:
    """Go's `time.ParseDuration`, without signs. None when it is no duration. A part of a nanosecond is cut off."""
    if text == "0":
        return 0
    total, at = 0, 0
    while at < len(text):
        part = _DURATION_PART.match(text, at)
        if part is None or not (part[1] or part[2]) or len(part[0]) > 64:
            return None
        unit = _UNIT_NS[part[3]]
        total += int(part[1] or "0") * unit + int(part[2] or "0") * unit // 10 ** len(part[2])
        at = part.end()
    return total if text else None


def format_duration(seconds: float) -> str:
    """The way Go prints a duration, which is what clients of this API parse: "1m0s", "500ms", "0s".

    To the nanosecond, so that parsing it gives the same seconds.
    """
    if seconds < 0:
        return "-" + format_duration(-seconds)
    ns = round(seconds * 10**9)
    if 0 < ns < 10**9:
        unit = next(unit for unit in ("ms", "\u00b5s", "ns") if ns >= _UNIT_NS[unit])
        return _decimal(ns, _UNIT_NS[unit]) + unit
    minutes, ns = divmod(ns, _UNIT_NS["m"])
    hours, minutes = divmod(minutes, 60)
    text = _decimal(ns, 10**9) + "s"
    if minutes or hours:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def _decimal(count: int, unit: int) -> str:
    """`count / unit`, exactly; `unit` is a power of ten."""
    whole, part = divmod(count, unit)
    digits = f"{part:0{len(str(unit)) - 1}d}".rstrip("0") if part else ""
    return f"{whole}.{digits}" if digits else str(whole)


def parse_signal(field: str, value: Any) -> int:
    """A signal number from its name ("SIGTERM") or number (9). Only the documented ones."""
    name = value
    if isinstance(value, int) and not isinstance(value, bool):
        name = next((s for s in _SIGNALS if int(getattr(signals, s)) == value), None)
    elif isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
    if name not in _SIGNALS:
        raise Invalid(field, value, f"use one of {', '.join(_SIGNALS)}")
    return int(getattr(signals, name))


_SIGNALS = (
    *("SIGABRT", "SIGALRM", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT", "SIGKILL"),
    *("SIGPIPE", "SIGQUIT", "SIGSEGV", "SIGTERM", "SIGTRAP", "SIGUSR1", "SIGUSR2"),
)


def rfc3339(at_ms: int) -> str:
    """UTC time of a Unix time in milliseconds, as RFC 3339 with a `Z`."""
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_DOCKER = "registry-1.docker.io"
_DOCKER_ALIASES = ("docker.io", "index.docker.io")

# The grammar of image names: github.com/distribution/reference, which Docker and containerd read them with.
_DOMAIN = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])"
    r"(?::[0-9]{1,5})?"
)
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REPOSITORY_MOST = 255
_REFERENCE_MOST = 512


def is_digest(text: str) -> bool:
    """`sha256:` and 64 lower-case hexadecimal digits: the one algorithm that registries use."""
    return _DIGEST.fullmatch(text) is not None


class ImageRef:
    """An image reference taken apart: `registry/repository:tag@digest`, with Docker's defaults.

    The constructor takes any text, since old records may hold anything; `checked` is for input. `str` gives the
    complete reference, which reads as the same one again."""

    __slots__ = ("digest", "registry", "repository", "tag")

    def __init__(self, text: str) -> None:
        if is_host_image(text):
            self.registry, self.repository, self.tag, self.digest = "", text, "", ""
            return
        if _DIGEST.fullmatch(text):
            self.registry, self.repository, self.tag, self.digest = "", "", "", text
            return
        rest, _, self.digest = text.partition("@")
        head, slash, tail = rest.partition("/")
        if slash and ("." in head or ":" in head or head == "localhost"):
            self.registry, path = (_DOCKER if head in _DOCKER_ALIASES else head), tail
        else:
            self.registry, path = _DOCKER, rest
        self.repository, _, tag = path.partition(":")
        self.tag = tag or ("" if self.digest else "latest")
        if self.registry == _DOCKER and "/" not in self.repository:
            self.repository = f"library/{self.repository}"

    @classmethod
    def checked(cls, text: str, field: str = "image") -> ImageRef:
        """Raises `Invalid` unless it names an image of a registry: `host` does not, nor does a digest alone."""
        if not text or len(text) > _REFERENCE_MOST:
            raise Invalid(field, text, f"name an image in at most {_REFERENCE_MOST} characters, such as nginx:1.27")
        ref = cls(text)
        if not ref.registry:
            raise Invalid(field, text, "this stands for the host's own programs; name an image such as nginx:1.27")
        if not _DOMAIN.fullmatch(ref.registry):
            raise Invalid(field, text, f'"{ref.registry}" is no host of a registry; write host:port/repository:tag')
        if not _REPOSITORY.fullmatch(ref.repository) or len(ref.repository) > _REPOSITORY_MOST:
            remedy = "write a repository of lower-case letters and digits, parted by one of / . _ -"
            raise Invalid(field, text, f"{remedy}, at most {_REPOSITORY_MOST} characters")
        if text.partition("@")[0].endswith(":") or (ref.tag and not _TAG.fullmatch(ref.tag)):
            raise Invalid(field, text, "write a tag of letters, digits, _ . -, at most 128, not starting with . or -")
        if "@" in text and not is_digest(ref.digest):
            raise Invalid(field, text, "write the digest as sha256: and 64 lower-case hexadecimal digits")
        return ref

    def __str__(self) -> str:
        name = f"{self.registry}/{self.repository}" if self.registry else self.repository
        return name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    def as_json(self) -> dict[str, Any]:
        return {
            "registry": self.registry,
            "repository": self.repository,
            "tag": self.tag,
            "digest": self.digest,
            "labels": {},
        }


def check_image(field: str, value: Any) -> str:
    """A reference to an image of a registry, or `host`. Raises `Invalid`."""
    if not isinstance(value, str) or not value or any(c.isspace() or c == "\0" for c in value):
        raise Invalid(field, value, 'name an image, or "host" for a program of the host itself')
    if not is_host_image(value):
        ImageRef.checked(value, field)
    return value


def pinned(image: str, digest: str) -> str:
    """The reference that names these bytes and no others, even if the tag moves."""
    if not digest or is_host_image(image):
        return image
    return f"{image.partition('@')[0]}@{digest}"


HOST_IMAGE = "host"


def is_host_image(image: str) -> bool:
    """The image named `host` stands for the host's own programs: the process driver runs it, no registry is asked."""
    return image == HOST_IMAGE
