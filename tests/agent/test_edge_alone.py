"""An agent that is a proxy and nothing else: an edge on a host of its own, with its own replica of the catalog."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
from tests.kit.doors import PORT, TOKEN, free_port, house

from hawker.agent.agent import Agent
from hawker.agent.settings import AgentSettings, CatalogSettings, TokenSettings
from hawker.client.connection import Peer
from hawker.errors import HawkerError
from hawker.host import live
from hawker.proxy.settings import ProxySettings


async def test_a_proxy_alone_serves_apps_and_tells_how_it_is(tmp_path: Path) -> None:
    async with house(tmp_path) as it:
        machine = await it.machine("web")
        api = free_port()
        settings = AgentSettings(
            name="edge-1",
            region="ord",
            directory=tmp_path / "edge-1",
            tokens=TokenSettings(cluster=TOKEN, metrics="scraper"),
            proxy=ProxySettings(listen={str(PORT): "127.0.0.1:0"}),
            catalog=CatalogSettings(listen=f"127.0.0.1:{api}", join=[it.agent.settings.listens[0]]),
        )
        edge = Agent(settings, live())
        await edge.open()
        try:
            assert edge.proxy is not None
            reader, writer = await asyncio.open_connection(*edge.proxy.listening[PORT])
            writer.write(b"GET / HTTP/1.1\r\nhost: web.localhost\r\nconnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(-1), 15)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"ok")
            assert it.story(machine).count("start starting") == 1
            peer = Peer("127.0.0.1", api, headers={"authorization": f"Bearer {TOKEN}"})
            health = msgspec.json.decode((await peer.request("GET", "/health", timeout_s=5)).body)
            assert (health["ok"], health["role"], health["name"]) == (True, "proxy", "edge-1")
            members = msgspec.json.decode((await peer.request("GET", "/v1/hawker/members", timeout_s=5)).body)
            assert {each["name"]: each["roles"] for each in members} == {"edge-1": ["proxy"], "ord-1": ["worker"]}
            metrics = (await peer.request("GET", "/metrics", timeout_s=5)).body.decode()
            assert 'hawker_proxy_requests_total{status="200"} 1.0' in metrics.splitlines()
            assert (await peer.request("GET", "/v1/apps", timeout_s=5)).status == 404
            scraper = Peer("127.0.0.1", api, headers={"authorization": "Bearer scraper"})
            own = msgspec.json.decode((await scraper.request("GET", "/health/proxy", timeout_s=5)).body)
            assert own == msgspec.to_builtins(edge.proxy.health(), str_keys=True)
            for method, path, status in (
                ("GET", "/metrics", 200),
                ("GET", "/health/proxy", 200),
                ("GET", "/v1/hawker/members", 401),
                ("POST", "/v1/catalog/digest", 401),  # agents' own
                ("GET", "/v1/apps", 404),
            ):
                assert (await scraper.request(method, path, timeout_s=5)).status == status
            await scraper.close()
            await peer.close()
        finally:
            await edge.close()


@pytest.mark.parametrize("field", ["proxy.listen.80", "proxy.backhaul"])
async def test_an_address_that_is_taken_is_told_by_its_field(tmp_path: Path, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        settings = AgentSettings(
            name="edge-1",
            region="ord",
            directory=tmp_path,
            tokens=TokenSettings(cluster=TOKEN),
            proxy=ProxySettings(listen={"80": taken}) if field != "proxy.backhaul" else ProxySettings(backhaul=taken),
            catalog=CatalogSettings(listen=f"127.0.0.1:{free_port()}"),
        )
        with pytest.raises(HawkerError) as caught:
            await Agent(settings, live()).open()
        assert str(caught.value).startswith(f"{field}: cannot listen on {taken}: Address already in use")
