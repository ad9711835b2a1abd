"""What requests waited for, told to a collector."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.doors import edge, free_port, house
from tests.kit.waiting import until

from hawker.core.metrics import Registry
from hawker.errors import Invalid
from hawker.model.rows import RunRow
from hawker.proxy.traces import endpoint_of


class Collector:
    """Of OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.taken: set[asyncio.Task[None] | None] = set()
        self.url = ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"POST /v1/traces HTTP/1.1\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def requests(self) -> dict[str, list[str]]:
        """The names of the spans, by path and parent or not."""
        found: dict[str, list[str]] = {}
        for body in self.bodies:
            spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
            for request in (span for span in spans if span["name"] == "request"):
                values = {each["key"]: each["value"] for each in request["attributes"]}
                where = "door" if "parentSpanId" in request else "edge"
                mine = {request["spanId"]} | {s["spanId"] for s in spans if s.get("parentSpanId") == request["spanId"]}
                names = sorted(span["name"] for span in spans if span.get("parentSpanId") in mine)
                found[f"{values['url.path']['stringValue']} {where}"] = names
        return found


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    it = Collector()
    server = await asyncio.start_server(it.take, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    yield it
    server.close()
    await asyncio.gather(*(task for task in it.taken if task))


async def test_a_request_that_wakes_a_machine_leaves_a_trace_of_both_proxies_and_counts_of_the_same_phases(
    tmp_path: Path, collector: Collector
) -> None:
    async with house(tmp_path, traces=collector.url) as it, edge(it, traces=collector.url) as downstream:
        await it.machine("web")
        assert await downstream.get("web") == (200, b"ok")
        await until(lambda: len(collector.requests()) == 2)
        assert collector.requests() == {
            "/ edge": ["answer", "connect", "obtain", "wait"],
            "/ door": ["answer", "connect", "obtain", "ready", "start", "wait"],
        }
        registry = Registry()
        registry.register(it.proxy.plane.counters)
        for phase in ("obtain", "wait", "start", "ready", "connect"):
            assert registry.value("hawker_proxy_phase_seconds_count", phase=phase) == 1
        traced = {span["traceId"] for body in collector.bodies for span in _spans(body)}
        assert len(traced) == 1
        await downstream.get("web")  # it is awake: nothing to tell
        assert downstream.proxy.traces is not None
        assert downstream.proxy.traces.sent == 1


@pytest.mark.parametrize(
    ("sent", "told"),
    [(f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}-01"), (f"00-{'0' * 32}-{'b' * 16}-01", "")],
)
async def test_what_a_worker_does_for_a_request_is_known_by_the_trace_that_the_request_is_part_of(
    tmp_path: Path, sent: str, told: str
) -> None:
    async with house(tmp_path) as it, edge(it) as downstream:
        machine = await it.machine("web")
        assert (await downstream.get("web", headers=f"traceparent: {sent}\r\n"))[0] == 200
        runs = it.worker.store.read.select(RunRow, "resource = ? order by id", (machine,))
        assert [(run.flow, run.trace) for run in runs] == [("machine.create", ""), ("machine.start", told)]


async def test_a_collector_that_is_away_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    async with house(tmp_path, traces=f"http://127.0.0.1:{free_port()}") as it:
        await it.machine("web")
        assert await it.get("web") == (200, b"ok")
        traces = it.proxy.traces
        assert traces is not None
        registry = Registry()
        registry.register(traces)
        await until(lambda: traces.lost == 1)
        assert registry.value("hawker_proxy_traces_total", outcome="lost") == 1


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "https://c.example/v1/traces", "http://", "http://c:x/", "http://c?a"]
)
def test_a_collector_that_cannot_be_told_is_refused_by_name(url: str) -> None:
    with pytest.raises(Invalid, match=r"^proxy\.traces: .* is not valid: write http://HOST:PORT/v1/traces"):
        endpoint_of("proxy.traces", url)


def _spans(body: dict[str, Any]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return spans
