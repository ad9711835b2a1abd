"""What users get of a proxy whose catalog is old or empty, as after a loss of power, until it has caught up: real
catalogs and sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kit.doors import PORT, TOKEN, House, free_port, house
from tests.kit.waiting import until

from hawker.catalog.base import Site
from hawker.catalog.gossip.node import Node
from hawker.host import live
from hawker.proxy.service import Proxy
from hawker.proxy.settings import ProxySettings
from hawker.telemetry import Metrics


@asynccontextmanager
async def edge(catalog: Path, join: House) -> AsyncIterator[tuple[Node, Proxy]]:
    """A proxy with a catalog of its own, which is a member once its node is opened."""
    first = join.agent.settings.listens[0].rpartition(":")
    site = Site(
        name="edge",
        region="ord",
        host="127.0.0.1",
        port=free_port(),
        bind="127.0.0.1",
        cluster="hawker",
        secrets=(TOKEN,),
        token=TOKEN,
        roles=("proxy",),
        join=((first[0], int(first[2])),),
        path=catalog,
        machine=live(),
        metrics=Metrics(),
    )
    node = Node(site)
    proxy = await Proxy.open(
        ProxySettings(listen={str(PORT): "127.0.0.1:0"}),
        node.view,
        live(),
        region="ord",
        token=TOKEN,
        complete=node.complete,
    )
    try:
        yield node, proxy
    finally:
        await proxy.close()
        await node.close()


async def asked(proxy: Proxy, app: str) -> bytes:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*proxy.listening[PORT])
        try:
            writer.write(f"GET / HTTP/1.1\r\nhost: {app}.localhost\r\nconnection: close\r\n\r\n".encode())
            return await reader.read(-1)
        finally:
            writer.close()


async def test_what_is_unknown_to_an_edge_without_a_catalog_is_held_until_it_has_caught_up(tmp_path: Path) -> None:
    """Once it was answered with 404, as if the app did not exist."""
    async with house(tmp_path) as it, edge(tmp_path / "edge.db", it) as (node, proxy):
        await it.machine("web")
        asking = [asyncio.ensure_future(asked(proxy, app)) for app in ("web", "nobody")]
        await until(lambda: proxy.router.held == 2)
        assert not node.readiness()
        await node.open()
        web, nobody = await asyncio.gather(*asking)
        assert web.startswith(b"HTTP/1.1 200 ")
        assert nobody.startswith(b"HTTP/1.1 404 ")
        assert node.readiness()
        assert proxy.router.held == 0
