"""Sends what requests waited for to a collector of OpenTelemetry, as traces (`hawker.core.tracing`).

Only requests that had to wait have traces: for a machine that starts, for room, for another try. Those that a machine
takes at once, nearly all, cost nothing here. If the collector does not answer, spans are kept up to a bound and then
lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

from hawker.client.connection import Peer
from hawker.core.metrics import Family
from hawker.core.tracing import Span, Value, otlp, parent_of, path_of, spans_of
from hawker.errors import HawkerError, Invalid
from hawker.host import Host
from hawker.proxy.background.loop import BackgroundLoop
from hawker.proxy.embedded.access_log import RequestRecord
from hawker.telemetry import get_logger

EVERY_S = 1.0
REQUESTS_MOST = 512
"""How many requests are sent each time: a request has some kilobytes, and a load that makes all of them wait is shown
by fewer as well."""
SEND_S = 5.0


def endpoint_of(field: str, url: str) -> tuple[str, int, str]:
    """The host, port and path of a collector. Raises `Invalid`."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and not parts.query and not parts.username:
            return parts.hostname, parts.port or 4318, parts.path.rstrip("/") or "/v1/traces"
    except ValueError:  # such as a port that is none
        pass
    raise Invalid(field, url, "write http://HOST:PORT/v1/traces, where a collector takes OTLP over HTTP as JSON")


class Traces(BackgroundLoop):
    """`begin`, then `close`."""

    def __init__(self, url: str, host: Host, *, region: str, proxy: str) -> None:
        super().__init__("traces", EVERY_S)
        address, port, self._path = endpoint_of("proxy.traces", url)
        self._peer = Peer(address, port)
        self._host = host
        self._proxy = proxy
        self._resource: dict[str, Value] = {"service.name": "hawker-proxy", "hawker.region": region}
        self._resource["service.instance.id"] = proxy
        self._spans: list[Span] = []
        self._requests = 0
        self._failed = False
        self.sent = 0
        self.lost = 0

    def add(self, record: RequestRecord) -> None:
        """A request is over."""
        request = record.request
        parent = None
        for name, value in request.headers:
            if name == b"traceparent":
                parent = parent_of(value)
        if parent is not None and not parent.sampled:
            return
        if self._requests >= REQUESTS_MOST:
            self.lost += 1
            return
        self._requests += 1
        attributes: dict[str, Value] = {
            "http.request.method": request.method.decode("latin-1"),
            "url.path": path_of(request.target),
            "http.response.status_code": record.status,
            "hawker.request": record.request_id.decode("latin-1"),
            "hawker.app": record.app,
            "hawker.machine": record.machine,
        }
        self._spans += spans_of(
            record.request_id,
            parent,
            edge=record.edge,
            proxy=self._proxy,
            begun=record.begun,
            first=record.first,
            ended=record.first if record.status == 101 else record.ended,  # a tunnel may last for days
            marks=record.marks,
            wall_ns=self._host.now_ms() * 1_000_000,
            attributes=attributes,
            failed=record.status >= 500,
        )

    async def look(self) -> None:
        """Send what there is."""
        spans, requests = self._spans, self._requests
        if not spans:
            return
        self._spans, self._requests = [], 0
        body = otlp(spans, self._resource)
        why = ""
        try:
            headers = {"content-type": "application/json"}
            reply = await self._peer.request("POST", self._path, body=body, headers=headers, timeout_s=SEND_S)
            if reply.status >= 300:
                why = f"the collector answers {reply.status}"
        except HawkerError as error:
            why = error.message
        if not why:
            self.sent += requests
            self._failed = False
            return
        self.lost += requests
        if not self._failed:
            self._failed = True  # once: the collector may be away for days
            _logger.warning("traces.lost", error=why, cause="local rule: traces")

    async def close(self) -> None:
        await super().close()
        try:
            async with asyncio.timeout(EVERY_S):
                await self.look()
        except TimeoutError:
            self.lost += self._requests
        await self._peer.close()

    def collect(self) -> Iterator[Family]:
        text = "Requests whose spans went to the collector, or were lost"
        yield Family("counter", "hawker_proxy_traces", text, ["outcome"]).add(self.sent, "sent").add(self.lost, "lost")


_logger = get_logger()
