"""Every byte at every place of a request where it could change how the request is read."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proxy.test_smuggling import CHUNKED, GET, POST

from bench.torture_suites import Case

_NEXT = b"GET /next HTTP/1.1\r\nHost: web.example\r\n\r\n"
_ATTACKS = {
    "before the name": b"%bTransfer-Encoding: chunked",
    "in the name": b"Transfer%bEncoding: chunked",
    "before the colon": b"Transfer-Encoding%b: chunked",
    "after the colon": b"Transfer-Encoding:%bchunked",
    "in the value": b"Transfer-Encoding: chun%bked",
    "after the value": b"Transfer-Encoding: chunked%b",
    "before it in another field": b"X-A: b%bTransfer-Encoding: chunked",
}
_CODINGS = (b"identity", b"gzip", b"x", b"", b"chunked", b'"chunked"', b"chunked;q=1")
_C = POST + CHUNKED + b"\r\n"
_PLACES = {
    "before the request": b"%bGET / HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "in the method": b"GE%bT / HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "after the method": b"GET%b/ HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "in the target": b"GET /a%bb HTTP/1.1\r\nHost: web.example\r\n\r\n",
    "before the version": b"GET /%bHTTP/1.1\r\nHost: web.example\r\n\r\n",
    "in the version": b"GET / HTTP/1%b1\r\nHost: web.example\r\n\r\n",
    "after the version": b"GET / HTTP/1.1%b\r\nHost: web.example\r\n\r\n",
    "in Host": b"GET / HTTP/1.1\r\nHost: web%bexample\r\n\r\n",
    "after Host": b"GET / HTTP/1.1\r\nHost: web.example%b\r\n\r\n",
    "before a field": GET + b"%bX-A: b\r\n\r\n",
    "in a name": GET + b"X%bA: b\r\n\r\n",
    "before a colon": GET + b"X-A%b: b\r\n\r\n",
    "in a value": GET + b"X-A: b%bc\r\n\r\n",
    "after a value": GET + b"X-A: b%b\r\n\r\n",
    "for a field's CR": GET + b"X-A: b%b\nX-C: d\r\n\r\n",
    "for a field's LF": GET + b"X-A: b\r%bX-C: d\r\n\r\n",
    "for the head's last CR": GET + b"%b\n",
    "for the head's last LF": GET + b"\r%b",
    "in the name of the length": POST + b"Content%bLength: 4\r\n\r\nabcd",
    "after the name of the length": POST + b"Content-Length%b: 4\r\n\r\nabcd",
    "before the length": POST + b"Content-Length: %b4\r\n\r\nabcd",
    "in the length": POST + b"Content-Length: 0%b4\r\n\r\nabcd",
    "after the length": POST + b"Content-Length: 4%b\r\n\r\nabcd",
    "before a size": _C + b"%b5\r\nhello\r\n0\r\n\r\n",
    "after a size": _C + b"5%b\r\nhello\r\n0\r\n\r\n",
    "for a size's CR": _C + b"5%b\nhello\r\n0\r\n\r\n",
    "for a size's LF": _C + b"5\r%bhello\r\n0\r\n\r\n",
    "in an extension": _C + b"5;a%bb\r\nhello\r\n0\r\n\r\n",
    "in an extension's value": _C + b"5;a=%bb\r\nhello\r\n0\r\n\r\n",
    "in an extension's quotes": _C + b'5;a="%b"\r\nhello\r\n0\r\n\r\n',
    "after data": _C + b"5\r\nhello%b\r\n0\r\n\r\n",
    "for data's CR": _C + b"5\r\nhello%b\n0\r\n\r\n",
    "for data's LF": _C + b"5\r\nhello\r%b0\r\n\r\n",
    "before the last size": _C + b"5\r\nhello\r\n%b0\r\n\r\n",
    "after the last size": _C + b"5\r\nhello\r\n0%b\r\n\r\n",
    "in a trailer's name": _C + b"5\r\nhello\r\n0\r\nX%bA: b\r\n\r\n",
    "before a trailer's colon": _C + b"5\r\nhello\r\n0\r\nX-A%b: b\r\n\r\n",
    "in a trailer's value": _C + b"5\r\nhello\r\n0\r\nX-A: b%bc\r\n\r\n",
    "for the body's last CR": _C + b"5\r\nhello\r\n0\r\n%b\n",
    "for the body's last LF": _C + b"5\r\nhello\r\n0\r\n\r%b",
}


def sweep() -> Iterator[Case]:
    """Attacks that hide one of two lengths from one of two readers: a byte in the field `Transfer-Encoding`, or a pair
    of codings, beside a length that holds more, or less, than the chunks. Then a byte anywhere, and another request."""
    signs = [(f"{sign:#04x}", bytes((sign,))) for sign in range(256)]
    disguised = {f"{sign} {place}": text % byte for place, text in _ATTACKS.items() for sign, byte in signs}
    for one in _CODINGS:
        for two in _CODINGS:
            for name, between in {"a comma": b", ", "a space": b" ", "a field": b"\r\nTransfer-Encoding: "}.items():
                disguised[f"{one!r}, {two!r} with {name}"] = b"Transfer-Encoding: " + one + between + two
    for name, field in disguised.items():
        for which, body in {"TE.CL": b"0\r\n\r\nX", "CL.TE": b"1\r\nZ\r\nQ"}.items():
            length = b"Content-Length: %d\r\n" % (6 if which == "TE.CL" else 4)
            parts = (POST + field + b"\r\n" + length + b"\r\n" + body,)
            yield Case(suite="sweep: lengths", name=f"{which}: {name}", parts=parts, wants="either")
    for place, text in _PLACES.items():
        for sign, byte in signs:
            parts = (text.replace(b"%b", byte) + _NEXT,)
            yield Case(suite="sweep: bytes", name=f"{sign} {place}", parts=parts, wants="either")
