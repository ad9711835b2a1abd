"""One app as a process, a container and a microVM: the same image, command line and port, and one word changed.

A real market, an image from a real registry on loopback, and a web server that is asked from the worker's host.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.programs import hawker
from tests.kit.markets import Market, free_port, running_market
from tests.kit.oci import busybox_image
from tests.kit.registry import DockerRegistry, put, registry
from tests.kit.vms import missing
from tests.kit.waiting import eventually

from hawker.client.client import Client
from hawker.model.inside_api import KIND_END, KIND_STDOUT, Connect, ReadSession, WriteSession, frames

__all__ = ["registry"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(240)]

UP_S = 120.0  # of a guest on a busy host that emulates
SERVE = 'echo "$FLY_MACHINE_ID on $(uname -n)" > page && exec busybox httpd -f -p "$PORT" -h .'
LACKING = [program for program in ("busybox", "docker-registry") if shutil.which(program) is None]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    if LACKING or missing():
        pytest.skip(f"not installed: {', '.join(LACKING)} {missing()}")
    with running_market(tmp_path_factory.mktemp("runtimes"), ("--region", "ord", "--workers", "1")) as market:
        yield market


async def test_one_word_makes_an_app_a_process_a_container_or_a_microvm(
    market: Market, registry: DockerRegistry
) -> None:
    image = await put(registry.host, "web:1", busybox_image())
    port = str(free_port())
    config: dict[str, Any] = {
        "image": image,
        "init": {"exec": ["/bin/sh", "-c", SERVE]},
        "env": {"PORT": port},
        "services": [{"internal_port": int(port), "ports": [{"port": 80}]}],
        "restart": {"policy": "no"},
        "runtime": "process",
    }
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "one-word", "org_slug": "personal"})
        machine = await client.ok("POST", "/apps/one-word/machines?wait=true", {"config": config})
        path = f"/apps/one-word/machines/{machine['id']}"
        own: str = machine["id"]
        said: dict[str, str] = {}
        for runtime in ("process", "container", "microvm"):
            if runtime != "process":
                await client.ok("POST", path, {"config": {**config, "runtime": runtime}})
            shown = await started(client, path)
            assert shown["hawker"]["driver"] == runtime
            (published,) = shown["hawker"]["ports"]
            assert (published["internal_port"] == published["host_port"]) == (runtime == "process")
            said[runtime] = await page(published["host_port"])
            assert await inside(market, own, "cat", "page") == (0, said[runtime] + "\n")
            assert await asyncio.to_thread(forwarded, market, "one-word", own, int(port)) == said[runtime]
        await client.ok("DELETE", f"{path}?force=true")
    apart = f"{own} on {own}"
    assert said == {"process": f"{own} on {os.uname().nodename}", "container": apart, "microvm": apart}


async def test_a_container_outlives_kill_9_of_its_worker_and_is_reached_on_its_port(
    market: Market, registry: DockerRegistry
) -> None:
    image = await put(registry.host, "lasting:1", busybox_image())
    config = {
        "image": image,
        "init": {"exec": ["/bin/sh", "-c", SERVE]},
        "env": {"PORT": "8080"},
        "services": [{"internal_port": 8080}],
    }
    async with market.client() as client:
        await client.ok("POST", "/apps", {"app_name": "lasting", "org_slug": "personal"})
        machine = await client.ok("POST", "/apps/lasting/machines?wait=true", {"config": config})
        path = f"/apps/lasting/machines/{machine['id']}"
        before = await started(client, path)
        port = before["hawker"]["ports"][0]["host_port"]
        said = await page(port)
        killed = market.pid("ord-1")
        market.kill("ord-1")
        assert await page(port) == said, "while no worker is there"

        async def another_answers() -> bool:
            answer = await client.call("GET", path)
            return bool(market.pid("ord-1") != killed and answer.status == 200)

        await eventually(another_answers, "the worker is back", UP_S)
        assert await page(port) == said
        after = await client.ok("GET", path)
        assert (after["state"], after["hawker"]["ports"]) == ("started", before["hawker"]["ports"])
        assert [event["type"] for event in after["events"]] == [event["type"] for event in before["events"]]
        assert await inside(market, machine["id"], "echo", "again") == (0, "again\n")
        await client.ok("DELETE", f"{path}?force=true")


async def started(client: Any, path: str) -> Any:
    """The machine, once its image is there and its program runs."""
    found: dict[str, Any] = {}

    async def settled() -> bool:
        found.update(await client.ok("GET", path))
        assert found["state"] != "failed", [event.get("request") for event in found["events"]][:2]
        return bool(found["state"] == "started")

    await eventually(settled, "the machine has started", UP_S)
    return found


async def inside(market: Market, machine: str, *command: str) -> tuple[int, str]:
    """A command beside the app: its status and what it wrote."""
    arguments = ("machine", "exec", machine, "--", *command)
    ended = await asyncio.to_thread(hawker, *arguments, env={"HAWKER_HOME": str(market.home)})
    return ended.status, ended.out


def forwarded(market: Market, app: str, machine: str, port: int) -> str:
    """The same page by a connection through the API."""
    held, answer = bytearray(), b""
    with Client(market.endpoint, market.token) as client:
        session = client.send(Connect(app, machine, port=port)).id
        client.send(WriteSession(app, machine, session, b"GET /page HTTP/1.0\r\n\r\n"))
        with client.stream(ReadSession(app, machine, session)) as pieces:
            for piece in pieces:
                held += piece
                for kind, data in frames(held):
                    answer += data
                    if kind == KIND_STDOUT and not data:  # it has sent all
                        client.send(WriteSession(app, machine, session, b"", end=True))
                    elif kind == KIND_END:
                        assert data == b'{"exit_code":0,"exit_signal":0}'
                        head, _, body = answer.removesuffix(data).partition(b"\r\n\r\n")
                        assert b"200 OK" in head
                        return body.decode().strip()
    raise AssertionError(f"it broke off: {answer!r}")


async def page(port: int) -> str:
    """What the app says, once it does."""
    said = ""

    def ask() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=5) as answer:
            text: str = answer.read().decode().strip()
            return text

    async def answers() -> bool:
        nonlocal said
        try:
            said = await asyncio.to_thread(ask)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    await eventually(answers, f"port {port} answers", UP_S)
    return said
