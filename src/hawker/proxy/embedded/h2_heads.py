"""Requests and answers of HTTP/2 as heads (RFC 9113, 8.2 and 8.3). Pure.

The library has looked at what RFC 9113 says of any field already: pseudo fields, names in lower case, no fields of a
connection, values without line ends, one authority, cookies put together. What is left is that nothing may be read in
two ways by a server of HTTP/1.1 behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
    length_of,
)

VERSION_2 = 2
"""As `minor` of a head."""

_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))


def read_request(fields: Iterable[Header], *, ended: bool, fields_max: int) -> RequestHead:
    """`ended`: there is no body. A request for WebSocket (RFC 8441) becomes one for an upgrade, as it is in HTTP/1.1,
    without its key. Raises `BadHead`."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[Header] = []
    length = ABSENT if ended else CHUNKED
    host = declared = b""
    expects = wishes = False
    for raw, value in fields:
        if raw[0] == 0x3A:
            pseudo[bytes(raw)] = value
            continue
        name = field_name(raw)
        if _CONTROL.search(value):
            raise BadHead("a field has control characters")
        if name == b"host":
            host = value
            continue
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
    host = pseudo.get(b":authority", host)
    method, target = pseudo[b":method"], pseudo.get(b":path", host)
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
    """A machine's. What says itself how long it is not, and ends here, has no body. Raises `BadHead`."""
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
        head.length = declared if declared > 0 else CHUNKED
    return head


def request_fields(method: bytes, target: bytes, fields: Iterable[Header]) -> list[Header]:
    """A request as it goes to a machine. Trailers are taken: that is what servers of gRPC look at."""
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
