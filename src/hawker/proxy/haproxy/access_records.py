"""Turns HAProxy's records of the requests that it forwarded by itself into lines of the access log.

HAProxy writes a record for each request into a ring of its own, and sends many at a time to a socket in the file
system. While nobody listens there the ring keeps the first megabyte, and drops the rest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from hawker.proxy.embedded.access_log import AccessLog, quoted

SOCKET = "log.sock"
RING_BYTES = 1 << 20
RECORD_MOST = 4096
"""The most bytes of a record; a longer one loses the end of its target."""
TEXT_MOST = 1024
"""The most bytes of each field that the user wrote."""
_TO_ESCAPE = re.compile(rb'["\\\x00-\x08\x0a-\x1f\x7f-\xff]')
_NOTHING_SENT = frozenset("HQCR")
"""The second letter of HAProxy's code for how a request ended (its manual, section 8.5), if that was before its
answer."""


def record(request_id: str) -> str:
    """The format of a record, with that of a request's id. The captured fields are Referer and User-Agent. Nothing has
    a tab in it: HAProxy does not forward a request with one by itself."""
    return r"\t".join(
        (
            *("%[var(sess.client)]", "%trg", "%HM", "%HV", "%ST", "%B", request_id, "%b", "%s", "%Tr", "%Ta", "%ts"),
            *("%[capture.req.hdr(0)]", "%[capture.req.hdr(1)]", "%[capture.req.uri]"),
        )
    )


def line_of(record: bytes, app_of: Callable[[str], str]) -> str:
    """The line of the access log. `app_of` tells whose backend this is. Raises `ValueError`: it is no record."""
    text = record.decode("latin-1")
    if _TO_ESCAPE.search(record) is not None:
        text = "\t".join(quoted(part.encode("latin-1")) for part in text.split("\t"))
    client, at, method, version, status, sent, request_id, backend, machine, first, total, end, *said = text.split("\t")
    referer, agent, target = said
    if end[:1] == "C" and end[1] in _NOTHING_SENT:
        status = "499"
    if first[:1] == "-":
        first = "-"
    return (
        f'{client} - - [{at}] "{method} {target} {version}" {status} {sent} "{referer}" "{agent}" '
        f"{request_id} {app_of(backend)} {machine} {first} {total}\n"
    )


class AccessRecords(asyncio.Protocol):
    """Receives HAProxy's records."""

    def __init__(self, access: AccessLog, app_of: Callable[[str], str]) -> None:
        self._access = access
        self._app_of = app_of
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *records, self._rest = (self._rest + data).split(b"\n")
        for record in records:
            try:
                self._access.put(line_of(record, self._app_of))
            except ValueError:
                self._access.lost += 1
