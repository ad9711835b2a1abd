"""Health checks of real programs by a real market: a process that turns bad and good again, also over kill -9 of its
worker, and a container, whose host asks it at its own addresses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import hawker
from tests.kit.markets import Client, Market, free_port, running_market
from tests.kit.oci import busybox_image
from tests.kit.private import open_directory
from tests.kit.registry import DockerRegistry, put, registry
from tests.kit.waiting import eventually

__all__ = ["registry"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OFTEN = {"interval": "100ms", "timeout": "5s"}
SERVER = """
import http.server, pathlib, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if pathlib.Path(sys.argv[2]).exists() else 503)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    with running_market(tmp_path_factory.mktemp("checks"), ("--region", "ord", "--workers", "1")) as market:
        yield market


async def statuses(client: Client, path: str) -> list[str]:
    return [check["status"] for check in (await client.ok("GET", path))["checks"]]


async def become(client: Client, path: str, *wanted: str) -> None:
    async def are() -> bool:
        return await statuses(client, path) == list(wanted)

    await eventually(are, f"the checks are {wanted}")


async def published(market: Market, client: Client, machine: str) -> list[list[str]]:
    query = f"select name, kind, status from checks where machine = '{machine}' order by name"
    rows: list[list[str]] = (await client.ok("POST", "/hawker/sql", {"query": query}))["rows"]
    return rows


@pytest.fixture
def outside() -> Iterator[Path]:
    """For what a machine's program finds."""
    with open_directory() as place:
        yield place


async def test_a_process_that_turns_bad_and_good_again(market: Market, outside: Path) -> None:
    port, well = free_port(), outside / "well"
    up = {"type": "http", "port": port, **OFTEN}
    config: dict[str, Any] = {
        "image": "host",
        "init": {"exec": ["python3", "-c", SERVER, str(port), str(well)]},
        "services": [{"internal_port": port, "checks": [{"type": "http", **OFTEN}]}],
        "checks": {"listening": {"type": "tcp", "port": port, **OFTEN}, "ready": {**up, "kind": "readiness"}},
        "restart": {"policy": "always"},
    }
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "well", "org_slug": "personal"})
        made = await client.ok("POST", "/apps/well/machines?wait=true", {"config": config})
        assert [check["name"] for check in made["checks"]] == [f"servicecheck-00-http-{port}", "listening", "ready"]
        assert all(check["updated_at"] for check in made["checks"])
        path = f"/apps/well/machines/{made['id']}"
        await become(client, path, "critical", "passing", "critical")
        well.touch()
        await become(client, path, "passing", "passing", "passing")
        before = await client.ok("GET", path)

        killed = market.pid("ord-1")
        market.kill("ord-1")
        well.unlink()

        async def another_answers() -> bool:
            answer = await client.call("GET", path)
            return bool(market.pid("ord-1") != killed and answer.status == 200)

        await eventually(another_answers, "the worker is back", 60)
        await become(client, path, "critical", "passing", "critical")
        well.touch()
        await become(client, path, "passing", "passing", "passing")

        after = await client.ok("GET", path)
        assert after["events"] == before["events"], "nothing is done about a machine that fails its checks"
        assert after["checks"][1] == before["checks"][1], "what has not changed has the time of before"
        assert (await client.ok("GET", "/apps/well/machines"))[0]["checks"] == after["checks"]

        async def told() -> bool:
            rows = await published(market, client, made["id"])
            return [row[1:] for row in rows] == [
                ["informational", "passing"],
                ["readiness", "passing"],
                ["service", "passing"],
            ]

        await eventually(told, "the catalog says so")
        shown = await asyncio.to_thread(hawker, "machine", "list", env={"HAWKER_HOME": str(market.home)})
        assert "3/3 passing" in shown.out
        shown = await asyncio.to_thread(hawker, "machine", "status", made["id"], env={"HAWKER_HOME": str(market.home)})
        assert f"servicecheck-00-http-{port}" in shown.out
        await client.ok("DELETE", f"{path}?force=true")

        async def gone() -> bool:
            return await published(market, client, made["id"]) == []

        await eventually(gone, "the catalog has nothing of it")


@pytest.mark.root
@pytest.mark.skipif(
    not (shutil.which("busybox") and shutil.which("docker-registry")), reason="needs busybox and docker-registry"
)
async def test_a_container_is_asked_at_its_own_addresses_of_either_family(
    market: Market, registry: DockerRegistry
) -> None:
    serve = "cd /tmp && touch up && busybox httpd -p '[::]:8080' -h . && exec busybox httpd -f -p 0.0.0.0:8081 -h ."
    config = {
        "image": await put(registry.host, "well:1", busybox_image()),
        "init": {"exec": ["/bin/sh", "-c", serve]},
        "checks": {
            "four": {"type": "http", "port": 8081, "path": "/up", **OFTEN},
            "nobody": {"type": "tcp", "port": 8082, **OFTEN},
            "six": {"type": "http", "port": 8080, "path": "/up", **OFTEN},
        },
    }
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "contained", "org_slug": "personal"})
        made = await client.ok("POST", "/apps/contained/machines?wait=true", {"config": config})
        path = f"/apps/contained/machines/{made['id']}"
        await become(client, path, "passing", "critical", "passing")
        await client.ok("POST", f"{path}/exec", {"command": ["rm", "/tmp/up"]})
        await become(client, path, "critical", "critical", "critical")
        outputs = [check["output"] for check in (await client.ok("GET", path))["checks"]]
        assert [text[:13] for text in outputs] == ["404 Not Found", "connect: conn", "404 Not Found"]
        await client.ok("POST", f"{path}/stop", {})
        await become(client, path, "warning", "warning", "warning")
        await client.ok("DELETE", f"{path}?force=true")
