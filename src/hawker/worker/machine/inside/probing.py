"""One look of a health check: connect, or ask by HTTP/1.1, and say in a few words what came.

Every look has a connection of its own. The answer's status decides: 200 to 299 is good; a redirect is not followed, and
is not good. The look keeps the beginning of the body, for people. It never waits for a name server: addresses are
numbers.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import httptools

from hawker.core.checking import Outcome
from hawker.model.checks import Check
from hawker.model.values import format_duration

Address = tuple[str, int]

OUTPUT_MOST = 500
"""Characters of an answer that are kept."""
RECEIVED_MOST = 128 << 10
"""Bytes of an answer that are read: the rest is not waited for."""
AGENT = "Hawker-Health-Check"
SUCCESS = "Success"


async def probe(check: Check, addresses: Sequence[Address]) -> tuple[Outcome, Address | None]:
    """Look once, at the first of `addresses` that takes a connection, and say which that was. Takes `check.timeout_s`
    at most; raises nothing."""
    look = _Look(check)
    try:
        async with asyncio.timeout(check.timeout_s):
            return await look.at_one_of(addresses), look.address
    except TimeoutError:
        return look.late(), look.address
    except ssl.SSLCertVerificationError as error:
        return Outcome(False, f"tls: {error.verify_message}"), look.address
    except ssl.SSLError as error:
        return Outcome(False, f"tls: {error.reason or error}"), look.address
    except OSError as error:
        return Outcome(False, f"connect: {_text(error)}"), None
    except ValueError as error:  # a server name that is none
        return Outcome(False, f"tls: {error}"), None
    finally:
        look.close()


NOWHERE = "this worker has no way to the machine"


def short(text: str) -> str:
    """One line of printable characters, cut off at `OUTPUT_MOST`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= OUTPUT_MOST else line[: OUTPUT_MOST - 1] + "…"


class _Look:
    """A connection at a time, the last one to `address`."""

    def __init__(self, check: Check) -> None:
        self.address: Address | None = None
        self._check = check
        self._asking: _Asking | None = None
        self._transport: asyncio.Transport | None = None

    async def at_one_of(self, addresses: Sequence[Address]) -> Outcome:
        """Raises `OSError`, that of the last one."""
        for n, self.address in enumerate(addresses):
            try:
                return await self._at(self.address)
            except ssl.SSLError:
                raise
            except OSError:
                if n == len(addresses) - 1:
                    raise
        return Outcome(False, NOWHERE)

    async def _at(self, address: Address) -> Outcome:
        loop, check = asyncio.get_running_loop(), self._check
        if check.type == "tcp":
            self._transport, _ = await loop.create_connection(asyncio.Protocol, *address)
            return Outcome(True, SUCCESS)
        asking = _Asking(head_only=check.method == "HEAD")
        tls: dict[str, Any] = {}
        if check.tls:
            tls = {"ssl": tls_context(check.tls_verify), "server_hostname": check.tls_server_name or address[0]}
        self._transport, _ = await loop.create_connection(lambda: asking, *address, **tls)
        self._asking = asking
        self._transport.write(request_of(check, address))
        await asking.done
        return asking.outcome()

    def late(self) -> Outcome:
        """When the time is over: a body that never ends is no failure."""
        if self._asking is not None and self._asking.status:
            return self._asking.outcome()
        return Outcome(False, f"no answer within {format_duration(self._check.timeout_s)}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Asking(asyncio.Protocol):
    """Reads one answer. `done` when nothing more of it is wanted."""

    def __init__(self, *, head_only: bool) -> None:
        self.status = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head_only = head_only
        self._parser = httptools.HttpResponseParser(self)
        self._location = ""
        self._body = bytearray()
        self._received = 0
        self._problem = "it closed the connection without an answer"

    def outcome(self) -> Outcome:
        status = self.status
        if not status:
            return Outcome(False, short(self._problem))
        body = self._body.decode(errors="replace")
        line = f"{status} {_PHRASES.get(status, '')}".rstrip()
        if 200 <= status <= 299:
            return Outcome(True, short(body) or line)
        if self._location:
            line += f", a redirect to {self._location}"
        return Outcome(False, short(f"{line}: {body}" if body.strip() else line))

    # --- asyncio ---

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end()
        except httptools.HttpParserError as error:
            self._problem = f"the answer is no HTTP/1.1: {error}"
            self._end()
        if self._received > RECEIVED_MOST:
            self._problem = f"the first {RECEIVED_MOST} bytes of the answer have no end of headers"
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._problem = f"it broke the connection: {_text(error)}"
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"location":
            self._location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 or status == HTTPStatus.SWITCHING_PROTOCOLS:  # the others come before the answer
            self.status = status
            if self._head_only:
                self._end()

    def on_body(self, data: bytes) -> None:
        if len(self._body) < OUTPUT_MOST * 4:  # as many bytes as so many characters have at most
            self._body += data

    def on_message_complete(self) -> None:
        if self.status:
            self._end()


def request_of(check: Check, address: Address) -> bytes:
    """The request as it goes over the wire. The configuration's headers take the place of ours."""
    host, port = address
    ours = {"Host": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "User-Agent": AGENT, "Accept": "*/*"}
    if check.method in ("POST", "PUT", "PATCH"):
        ours["Content-Length"] = "0"
    given = {name.lower() for name, _ in check.headers}
    headers = [(name, value) for name, value in ours.items() if name.lower() not in given]
    lines = [f"{name}: {value}" for name, value in (*headers, *check.headers, ("Connection", "close"))]
    return "\r\n".join([f"{check.method} {check.path} HTTP/1.1", *lines, "", ""]).encode()


@cache
def tls_context(verify: bool) -> ssl.SSLContext:
    """Made once: the system's authorities are a quarter of a megabyte to read."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _text(error: Exception) -> str:
    """The kernel's own words for its errors: asyncio's words name the address, too."""
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number else str(error) or type(error).__name__


_PHRASES = {int(status): status.phrase for status in HTTPStatus}
