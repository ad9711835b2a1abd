"""Reads the heads of HTTP/1.1 messages strictly, or refuses them. Pure; RFC 9112 and 9110.

A proxy and the server behind it must never disagree where a message ends. So this code refuses whatever leaves room for
two readings: both lengths, repeated ones, other codings, folded lines, bare CR or LF, spaces before a colon, names that
become another one's when `_` is read as `-`. It repairs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hawker.core.replay import JSON_TYPE
from hawker.proxy.base import Header, ServicePort

CHUNKED = -1
"""A length: the body itself says where it ends."""
UNTIL_CLOSE = -2
"""The length of an answer whose body ends with the connection."""
ABSENT = -3
"""A length: there is no body, and no field that says so."""

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}) ([\x21\x22\x24-\x7e]+) HTTP/(\d)\.(\d)")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{1,255})(?::\d{0,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)(.*)", re.IGNORECASE | re.DOTALL)
_BARE = re.compile(rb"(?<!\r)\n|\r[^\n]")
_ALLOWED = bytes(byte for byte in range(256) if byte in b"\t\r\n" or 0x20 <= byte != 0x7F)
_DIGITS = re.compile(rb"\d{1,18}")
_CODINGS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+[ \t]*,[ \t]*)+chunked", re.IGNORECASE)
_KNOWN_MAX = 4096
_MANAGED = (b"content-length", b"transfer-encoding", b"connection", b"host")
_MANAGED_PREFIXES = (b"fly-", b"hawker-", b"x-forwarded-")

known_names: dict[bytes, bytes] = {}
"""Valid names as they came -> in lower case. A look-up here is cheaper than checking a name again."""


class BadHead(Exception):
    """A head is refused. `status` is what a client is answered."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status = status


class RequestHead:
    """The head of a request. `headers` are as they came, names in lower case. `host` is without its port, in lower
    case; "" when an HTTP/1.0 request has none. `length`: bytes of the body, `CHUNKED` or `ABSENT`. `keep_alive`: the
    connection may serve another request. `upgrade`: the protocol that it wants to go on with, b"" when none. `wishes`:
    it has fields for routing. `passed`: what was made of it for a machine, before and after the request's id; kept for
    the next one like it."""

    __slots__ = (
        *("expects", "headers", "host", "keep_alive", "length", "method", "minor", "passed", "target", "upgrade"),
        "wishes",
    )

    def __init__(self, method: bytes, target: bytes, minor: int, headers: list[Header]) -> None:
        self.method = method
        self.target = target
        self.minor = minor
        self.headers = headers
        self.host = ""
        self.length = ABSENT
        self.keep_alive = minor > 0
        self.expects = False
        self.upgrade = b""
        self.wishes = False
        self.passed: tuple[bytes, bytes] | None = None

    def changed(self, target: bytes, headers: list[Header]) -> RequestHead:
        """The same request with another target and other fields."""
        head = RequestHead(self.method, target, self.minor, headers)
        head.host, head.length, head.keep_alive = self.host, self.length, self.keep_alive
        head.expects, head.upgrade = self.expects, self.upgrade
        return head


class AnswerHead:
    """The head of an answer. `length` is as in a request, or `UNTIL_CLOSE`; 0 or more is the body that follows.
    `declared` is what Content-Length says, which in an answer to HEAD is not what follows. `signals`: it has fields
    meant for the proxy. `passed`: what was made of its fields for a client, by which port's rules, before and after the
    request's id."""

    __slots__ = (
        *("declared", "headers", "keep_alive", "length", "minor", "passed", "reason", "signals", "status", "upgrade"),
    )

    def __init__(self, status: int, reason: bytes, minor: int, headers: list[Header]) -> None:
        self.status = status
        self.reason = reason
        self.minor = minor
        self.headers = headers
        self.length = UNTIL_CLOSE
        self.declared = -1
        self.keep_alive = minor > 0
        self.upgrade = b""
        self.signals = False
        self.passed: tuple[ServicePort, bytes, bytes] | None = None


_OF_REQUESTS = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"),
        *(b"fly-force-instance-id", b"fly-prefer-instance-id", b"fly-prefer-region", b"fly-force-region"),
        *(b"hawker-timing", b"hawker-handed"),
    )
)
_OF_ANSWERS = frozenset(
    (
        *(b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"content-type"),
        *(b"fly-replay", b"fly-replay-cache", b"hawker-elsewhere", b"hawker-load"),
    )
)


def never_a_head(data: bytes, seen: int) -> bool:
    """Whether the beginning of a head holds a bare CR or LF, so that waiting for its end is in vain. `seen` bytes of it
    were looked at before."""
    return _BARE.search(data, max(seen - 1, 0)) is not None


def read_request(data: bytes, fields_max: int) -> RequestHead:
    """`data` is a head from its first byte to its empty line. Raises `BadHead`."""
    lines = _lines(data, fields_max)
    match = _REQUEST.fullmatch(lines[0])
    if match is None:
        raise BadHead("the request line is not `method target HTTP/1.1`")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise BadHead(f"version {major.decode()}.{minor.decode()} of HTTP is not spoken here", 505)
    del lines[0]
    headers, noted = _fields(lines, _OF_REQUESTS)
    head = RequestHead(method, target, int(minor), headers)
    hosts = 0
    coding = connection = None
    upgrade = b""
    for name, value in noted:
        if name == b"host":
            hosts += 1
            head.host = host_of(value)
        elif name == b"connection":
            connection = value if connection is None else connection + b"," + value
        elif name == b"content-length":
            if head.length != ABSENT:
                raise BadHead("Content-Length is given twice")
            head.length = length_of(value)
        elif name == b"transfer-encoding":
            if coding is not None:
                raise BadHead("Transfer-Encoding is given twice")
            coding = value
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise BadHead("nothing but 100-continue can be expected", 417)
            head.expects = head.minor > 0
        elif name == b"upgrade":
            upgrade = upgrade + b", " + value if upgrade else value
        else:
            head.wishes = True
    if hosts != 1 and (hosts or head.minor):
        raise BadHead("a request needs exactly one Host")
    if coding is not None:
        _coding(coding, head.minor, head.length)
        head.length = CHUNKED
    if connection is not None:
        tokens = {token.strip() for token in connection.lower().split(b",")}
        if head.minor:
            head.keep_alive = b"close" not in tokens
            # An upgrade is ignored, as RFC 9110 7.8 allows: after a body, which nobody sends; to HTTP/2, which is for
            # this hop only.
            wanted = upgrade and b"upgrade" in tokens and head.length in (ABSENT, 0)
            if wanted and not upgrade.lower().startswith(b"h2c"):
                head.upgrade = upgrade
        else:
            head.keep_alive = b"keep-alive" in tokens and b"close" not in tokens
    if target[0] != 0x2F:
        _unusual_target(head)
    return head


def read_answer(data: bytes, fields_max: int, method: bytes) -> AnswerHead:
    """Read the answer to a request of this method, as `read_request` does (RFC 9112 6.3)."""
    lines = _lines(data, fields_max)
    match = _STATUS.fullmatch(lines[0])
    if match is None:
        raise BadHead("the status line is not one of HTTP/1.1")
    minor, status, reason = match.groups()
    del lines[0]
    headers, noted = _fields(lines, _OF_ANSWERS)
    head = AnswerHead(int(status), reason or b"", int(minor), headers)
    coding = connection = None
    for name, value in noted:
        if name == b"content-length":
            if head.declared >= 0:
                raise BadHead("Content-Length is given twice")
            head.declared = length_of(value)
        elif name == b"transfer-encoding":
            if coding is not None:
                raise BadHead("Transfer-Encoding is given twice")
            coding = value
        elif name == b"connection":
            connection = value if connection is None else connection + b"," + value
        elif name == b"upgrade":
            head.upgrade = value
        elif name != b"content-type" or value[: len(JSON_TYPE)].lower() == JSON_TYPE:
            head.signals = True
    if connection is not None:
        tokens = {token.strip() for token in connection.lower().split(b",")}
        head.keep_alive = b"close" not in tokens and (head.minor > 0 or b"keep-alive" in tokens)
    if coding is not None:
        _coding(coding, head.minor, ABSENT if head.declared < 0 else head.declared)
        head.length = CHUNKED
    elif head.declared >= 0:
        head.length = head.declared
    if method == b"HEAD" or head.status < 200 or head.status in (204, 304):
        head.length = ABSENT
        if head.declared >= 0 and (head.status < 200 or head.status == 204):  # RFC 9110 8.6
            head.headers = [field for field in headers if field[0] != b"content-length"]
    elif head.length == UNTIL_CLOSE:
        head.keep_alive = False
    return head


def read_trailers(pairs: Sequence[Header]) -> list[Header]:
    """The trailer fields that may be passed on: none that frame, route or authenticate (RFC 9110 6.5.1), nor one that
    can be taken for such a one. Raises `BadHead` for names that no head may have."""
    kept = []
    for raw, value in pairs:
        name = known_names.get(raw) or field_name(raw)
        plain = name.replace(b"_", b"-")
        if plain not in _NEVER_TRAILERS and not plain.startswith((*_MANAGED_PREFIXES, b"proxy-")):
            kept.append((name, value))
    return kept


_NEVER_TRAILERS = frozenset(
    (
        *(
            b"content-length",
            b"transfer-encoding",
            b"connection",
            b"host",
            b"trailer",
            b"te",
            b"upgrade",
            b"keep-alive",
        ),
        *(b"authorization", b"cookie", b"set-cookie", b"content-encoding", b"content-type", b"content-range"),
        *(
            b"cache-control",
            b"expect",
            b"max-forwards",
            b"range",
            b"www-authenticate",
            b"expires",
            b"date",
            b"location",
        ),
        *(b"age", b"vary", b"pragma", b"retry-after", b"via", b"forwarded"),
    )
)


def _lines(data: bytes, fields_max: int) -> list[bytes]:
    if data.translate(None, _ALLOWED):
        raise BadHead("the head has control characters")
    lines = data[:-4].split(b"\r\n")
    ends = len(lines) + 1
    if data.count(b"\n") != ends or data.count(b"\r") != ends:
        raise BadHead("the head has a bare CR or LF")
    if ends > fields_max + 2:
        raise BadHead(f"the head has more than {fields_max} fields", 431)
    return lines


def _fields(lines: list[bytes], wanted: frozenset[bytes]) -> tuple[list[Header], list[Header]]:
    """Returns all fields, and those of the wanted names."""
    headers = []
    noted = []
    known = known_names
    for line in lines:
        raw, colon, value = line.partition(b":")
        if not colon:
            raise BadHead("a header field has no colon")
        name = known.get(raw) or field_name(raw)
        field = name, value.strip()
        if name in wanted:
            noted.append(field)
        headers.append(field)
    return headers, noted


def field_name(raw: bytes) -> bytes:
    if _NAME.fullmatch(raw) is None:
        raise BadHead("a header field's name is not a token, or the line is folded")
    name = raw.lower()
    if b"_" in name:
        # An app that reads `_` and `-` as one, as CGI does, would take the client's word for the proxy's.
        plain = name.replace(b"_", b"-")
        if plain in _MANAGED or plain.startswith(_MANAGED_PREFIXES):
            raise BadHead(f"the header field {name.decode()} can be taken for {plain.decode()}")
    if len(known_names) < _KNOWN_MAX and len(raw) <= 64:
        known_names[raw] = name
    return name


def length_of(value: bytes) -> int:
    if _DIGITS.fullmatch(value) is None:
        raise BadHead("Content-Length is not one number")
    return int(value)


def _coding(value: bytes, minor: int, length: int) -> None:
    if length != ABSENT:
        raise BadHead("both Content-Length and Transfer-Encoding are given")
    if not minor:
        raise BadHead("HTTP/1.0 has no Transfer-Encoding")
    if value.lower() != b"chunked":
        unknown = _CODINGS.fullmatch(value) is not None and value.lower().count(b"chunked") == 1
        raise BadHead("no Transfer-Encoding but chunked is taken", 501 if unknown else 400)


def host_of(value: bytes) -> str:
    match = _HOST.fullmatch(value)
    if match is None:
        raise BadHead("Host is not a name or address with a port")
    return match[1].decode().lower()


def _unusual_target(head: RequestHead) -> None:
    """Read a target in another form than a path (RFC 9112 3.2.2 to 3.2.4)."""
    if head.target == b"*" and head.method == b"OPTIONS":
        return
    if head.method == b"CONNECT":
        return  # the server decides; only the backhaul takes it
    match = _ABSOLUTE.fullmatch(head.target)
    if match is None:
        raise BadHead("the target is not a path")
    # The target's host goes before the field's. Where they differ somebody may be led astray: refused.
    if host_of(match[1]) != head.host:
        raise BadHead("the target names another host than Host")
    path = match[2]
    head.target = path if path[:1] == b"/" else b"/" + path
