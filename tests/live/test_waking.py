"""Sleeping apps before a whole market: the first request has a machine started, and is answered by it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.edges import SERVER, STARTS, region
from tests.kit.load import Address, at_once, parsed
from tests.kit.markets import Client, Market, free_port, running_market
from tests.kit.oci import busybox_image
from tests.kit.processes import PYTHON
from tests.kit.regions import read
from tests.kit.registry import DockerRegistry, put, registry
from tests.kit.tiers import full
from tests.kit.vms import missing
from tests.kit.waiting import eventually

from bench import faults

__all__ = ["registry"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SERVE = 'echo "$FLY_MACHINE_ID on $(uname -n)" > page && exec busybox httpd -f -p "0.0.0.0:$PORT" -h .'
LACKING = [program for program in ("busybox", "docker-registry") if shutil.which(program) is None]
BOOT_S = 120.0  # of a guest on a busy host that emulates


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    options = ("--region", "ord", "--workers", "1", "--http", "0")
    with running_market(tmp_path_factory.mktemp("waking"), options) as market:
        yield market


@pytest.fixture
async def client(market: Market) -> AsyncIterator[Client]:
    async with market.client() as client:
        yield client


async def asleep(client: Client, app: str, config: dict[str, Any]) -> str:
    """A machine of an app of its own that has never run."""
    await client.ok("POST", "/apps", {"app_name": app, "org_slug": "personal"})
    made = await client.filled(app, {"config": config, "skip_launch": True})
    own: str = made["id"]
    return own


async def get(address: Address, app: str) -> tuple[int, str]:
    """The first try of a request on a connection of its own."""
    async with asyncio.timeout(BOOT_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"GET /page HTTP/1.1\r\nhost: {app}.localhost\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
    return parsed(head)[0], body.decode().strip()


async def shown(market: Market, machine: str, state: str) -> None:
    """Until the edge knows."""
    query = f"select id from machines where id = '{machine}' and state = '{state}'"

    async def known() -> bool:
        return bool(read(market.home / "broker" / "catalog.db", query))

    await eventually(known, f"the edge knows that {machine} is {state}")


def starts(market: Market, machine: str) -> int:
    return len(read(market.database("ord-1"), STARTS.format(machine=machine, cause="proxy autostart")))


async def test_a_thousand_requests_at_once_for_a_sleeping_app_are_answered_by_one_start(
    market: Market, client: Client
) -> None:
    port = free_port()
    config = {
        "image": "host",
        "init": {"exec": [PYTHON, "-S", "-E", "-c", SERVER]},
        "env": {"PORT": str(port)},
        "services": [{"internal_port": port, "ports": [{"port": 80, "handlers": ["http"]}]}],
    }
    machine = await asleep(client, "asleep", config)
    await shown(market, machine, "stopped")
    assert await at_once([market.http], "asleep.localhost", 1000) == {200: 1000}
    assert starts(market, machine) == 1
    await client.ok("DELETE", f"/apps/asleep/machines/{machine}?force=true")


@pytest.mark.root
@pytest.mark.skipif(bool(LACKING or missing()), reason=f"not installed: {', '.join(LACKING)} {missing()}")
@pytest.mark.parametrize(
    ("runtime", "page"),
    [("process", f"M on {os.uname().nodename}"), ("container", "M on M"), *full(("microvm", "M on M"))],
)
async def test_a_sleeping_app_answers_its_first_request_as_process_container_or_microvm(
    market: Market, client: Client, registry: DockerRegistry, runtime: str, page: str
) -> None:
    """One word of the configuration is another."""
    image = await put(registry.host, "first:1", busybox_image())
    port = free_port()
    config = {
        "image": image,
        "init": {"exec": ["/bin/sh", "-c", SERVE]},
        "env": {"PORT": str(port)},
        "services": [{"internal_port": port, "ports": [{"port": 80, "handlers": ["http"]}]}],
        "runtime": runtime,
    }
    machine = await asleep(client, runtime, config)
    await shown(market, machine, "stopped")
    status, said = await get(market.http, runtime)
    assert (status, said.replace(machine, "M")) == (200, page)
    assert starts(market, machine) == 1
    await client.ok("DELETE", f"/apps/{runtime}/machines/{machine}?force=true")


@pytest.mark.parametrize("rounds", [6, *full(20)])
async def test_two_edges_asked_in_the_same_millisecond_begin_one_start_each_time(tmp_path: Path, rounds: int) -> None:
    async with region(tmp_path, workers=1, edges=2) as it:
        await faults.both_at_once(it, rounds)
