"""Requests and answers of HTTP/2 as heads (RFC 9113, 8.2 and 8.3). Pure.

Everything in requests is checked here. The library could do that too, but would end the whole connection for a
malformed one, and with it the requests of others that share it. Beyond the rules of HTTP/2, a server of HTTP/1.1 behind
must not be able to read anything in two ways. Answers were checked by the library before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hawker.core.replay import JSON_TYPE
from hawker.proxy.base import Header
from hawker.proxy.embedded.heads import (
    ABSENT,
    CHUNKED,
    AnswerHead,
    BadHead,
    RequestHead,
    field_name,
    host_of,
    known_names,
    length_of,
    read_trailers,
)

VERSION_2 = 2
"""The `minor` of a head of HTTP/2."""

_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LINE_END = re.compile(rb"[\r\n\x00]")
_BLANK = (b" ", b"\t")
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))
_OF_REQUESTS = frozenset((b":method", b":scheme", b":path"))
_OF_CONNECT = frozenset((b":method",))
_NOT_HERE = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te"))


class Malformed(Exception):
    """A request whose stream is to be reset (RFC 9113, 8.1.1)."""


def read_request(fields: Iterable[Header], *, ended: bool, fields_max: int) -> RequestHead:
    """Read a request's head. `ended`: there is no body. A request for WebSocket (RFC 8441) becomes one for an upgrade,
    as it is in HTTP/1.1, without its key. Raises `Malformed`, `BadHead`."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[Header] = []
    length = ABSENT if ended else CHUNKED
    host: bytes | None = None
    declared = b""
    expects = wishes = False
    for raw, value in fields:
        if raw[:1] == b":":
            if headers or raw in pseudo or raw not in _PSEUDO:
                raise Malformed
            pseudo[raw] = value
            continue
        name = known_names.get(raw) or field_name(raw)
        if name != raw:
            raise Malformed
        if _CONTROL.search(value):
            if _LINE_END.search(value):
                raise Malformed
            raise BadHead("a field has control characters")
        if name in _NOT_HERE and not (name == b"te" and value == b"trailers"):
            raise Malformed
        if value[:1] in _BLANK or value[-1:] in _BLANK:
            raise Malformed
        if name == b"host":
            if host is not None:
                raise Malformed
            host = value
        if name == b"content-length":
            if declared:
                raise BadHead("Content-Length is given twice")
            declared = value
            given = length_of(value)
            length = given if given and not ended else ABSENT
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise BadHead("nothing but 100-continue can be expected", 417)
            expects = True
        elif name[:4] == b"fly-" or name == b"hawker-timing":
            wishes = wishes or name in _WISHES
        headers.append((name, value))
    if len(headers) > fields_max:
        raise BadHead(f"the head has more than {fields_max} fields", 431)
    host = _whose(pseudo, host)
    method, target = pseudo[b":method"], pseudo.get(b":path", host)
    headers = [field for field in headers if field[0] != b"host"]
    if _METHOD.fullmatch(method) is None:
        raise BadHead("the method is not a token")
    if method == b"CONNECT" and b":protocol" in pseudo:
        return _upgrade(pseudo[b":protocol"], target, host, headers, wishes)
    if method != b"CONNECT" and _TARGET.fullmatch(target) is None and (method, target) != (b"OPTIONS", b"*"):
        raise BadHead("the target is not a path")
    if ended and declared and length_of(declared):
        raise BadHead("Content-Length is said of a body that is not there")
    if ended and not declared and method in _WITH_BODY:
        headers.append((b"content-length", b"0"))  # RFC 9110, 8.6
    if not ended and declared and length == ABSENT:
        length = 0
    head = RequestHead(method, target, VERSION_2, [(b"host", host), *headers])
    head.host = host_of(host)
    head.length, head.expects, head.wishes = length, expects, wishes
    return head


def _whose(pseudo: dict[bytes, bytes], host: bytes | None) -> bytes:
    """Read the pseudo fields (RFC 9113, 8.3.1, and 8441, 4). Raises `Malformed`."""
    needed = _OF_CONNECT if pseudo.get(b":method") == b"CONNECT" and b":protocol" not in pseudo else _OF_REQUESTS
    authority = pseudo.get(b":authority", host)
    if not needed <= pseudo.keys() or authority is None or (host is not None and host != authority):
        raise Malformed
    if needed is _OF_CONNECT and (b":path" in pseudo or b":scheme" in pseudo):
        raise Malformed
    if pseudo.get(b":path") == b"" or (b":protocol" in pseudo and pseudo[b":method"] != b"CONNECT"):
        raise Malformed
    return authority


def trailers_of(fields: Sequence[Header], fields_max: int) -> list[Header]:
    """The trailers that may be passed on. They are checked as strictly as a head: to HTTP/1.1 they go as lines, and one
    name or value must not make two of them. Their size is bounded as a head's is, where they are unpacked. Raises
    `BadHead`."""
    if len(fields) > fields_max:
        raise BadHead(f"it has more than {fields_max} trailers")
    for name, value in fields:
        if name[:1] == b":" or (known_names.get(name) or field_name(name)) != name or _CONTROL.search(value):
            raise BadHead("a trailer is malformed")
    return read_trailers(fields)


def _upgrade(protocol: bytes, target: bytes, host: bytes, headers: list[Header], wishes: bool) -> RequestHead:
    if protocol != b"websocket":
        raise BadHead(f"the protocol {protocol.decode('latin-1')} is not spoken here", 501)
    if _TARGET.fullmatch(target) is None:
        raise BadHead("the target is not a path")
    kept = [field for field in headers if field[0] not in (b"content-length", b"sec-websocket-key")]
    head = RequestHead(b"GET", target, VERSION_2, [(b"host", host), *kept])
    head.host, head.upgrade, head.wishes = host_of(host), b"websocket", wishes
    return head


_WISHES = frozenset(
    (b"fly-force-instance-id", b"fly-prefer-instance-id", b"fly-prefer-region", b"fly-force-region", b"hawker-timing")
)


def read_answer(fields: Iterable[Header], method: bytes, *, ended: bool, fields_max: int) -> AnswerHead:
    """Read a machine's answer. One that names its length, which is not what follows, and ends here, has no body. Raises
    `BadHead`."""
    status = declared = -1
    headers: list[Header] = []
    signals = False
    for raw, value in fields:
        if raw[0] == 0x3A:
            if raw == b":status":
                status = _status(value)
            continue
        name = field_name(raw)
        if _CONTROL.search(value):
            raise BadHead("a field has control characters")
        if name == b"content-length":
            if declared >= 0:
                raise BadHead("Content-Length is given twice")
            declared = length_of(value)
        elif name in _SIGNALS or (name == b"content-type" and value[: len(JSON_TYPE)].lower() == JSON_TYPE):
            signals = True
        headers.append((name, value))
    if len(headers) > fields_max:
        raise BadHead(f"the head has more than {fields_max} fields")
    if status == 101:
        raise BadHead("it switches protocols, which HTTP/2 does not")
    head = AnswerHead(status, b"", VERSION_2, headers)
    head.declared = declared
    head.signals = signals
    if method == b"HEAD" or status < 200 or status in (204, 304):
        head.length = ABSENT
        if declared >= 0 and (status < 200 or status == 204):  # RFC 9110, 8.6
            head.headers = [field for field in headers if field[0] != b"content-length"]
    elif ended:
        head.length = 0
        if declared < 0:
            headers.append((b"content-length", b"0"))
    else:
        head.length = declared if declared >= 0 else CHUNKED
    return head


def request_fields(method: bytes, target: bytes, fields: Iterable[Header]) -> list[Header]:
    """The fields of a request as they go to a machine. They say that trailers are accepted, which is what servers of
    gRPC look at."""
    host = b""
    kept = []
    for field in fields:
        if field[0] == b"host":
            host = field[1]
        elif field[0] not in (b"connection", b"upgrade", b"te"):
            kept.append(field)
    pseudo = [(b":method", method), (b":scheme", b"http"), (b":authority", host), (b":path", target)]
    return [*pseudo, *kept, (b"te", b"trailers")]


def _status(value: bytes) -> int:
    if len(value) != 3 or not value.isdigit() or value[0] == 0x30:
        raise BadHead("its status is not a number of three digits")
    return int(value)


_SIGNALS = frozenset((b"fly-replay", b"fly-replay-cache", b"hawker-elsewhere", b"hawker-load"))
