"""A member that cannot begin says why, and one that began goes on."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.kit.markets import free_port
from tests.kit.waiting import until

from hawker.catalog.base import Site
from hawker.catalog.gossip.exchange import Answering
from hawker.catalog.gossip.membership import Probe
from hawker.catalog.gossip.node import Node
from hawker.catalog.gossip.packets import Sealer
from hawker.errors import HawkerError, Unreachable
from hawker.host import live
from hawker.http.call import Call
from hawker.telemetry import Metrics


def site(port: int, directory: Path) -> Site:
    return Site(
        name="ord-1",
        region="ord",
        host="127.0.0.1",
        port=port,
        bind="127.0.0.1",
        cluster="test",
        secrets=("secret",),
        token="token",
        path=directory / "catalog.db",
        machine=live(),
        metrics=Metrics(),
    )


async def test_a_port_that_is_taken_for_datagrams_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        node = Node(site(port, tmp_path))
        with pytest.raises(HawkerError, match=f"cannot take datagrams on 127.0.0.1:{port}: Address already in use"):
            await node.open()
        await node.close()


async def test_a_member_that_is_being_closed_answers_nothing_more() -> None:
    """Its server outlives it by a moment, and asked a database that was closed. Found by the simulator, seed 250."""

    async def answer(question: bytes) -> bytes:
        return b"answered " + question

    closed = False
    sealer = Sealer("test", ("secret",), random.Random(1))
    handle = Answering(sealer, lambda why: None, lambda: closed).routes({Probe: answer})[0].handler
    call = cast(Call, SimpleNamespace(body=sealer.seal(b"what")))
    assert sealer.open((await handle(call)).body) == b"answered what"
    closed = True
    with pytest.raises(Unreachable, match="being closed"):
        await handle(call)


async def test_an_address_that_makes_no_sense_does_not_end_the_endpoint(tmp_path: Path) -> None:
    """asyncio closes an endpoint for good when a name cannot be encoded, and members announce what they like."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.settimeout(5)
        node = Node(site(free_port(), tmp_path))
        await node.open()
        for host in ("a..b", "", "x" * 300, "not an address", "\udcff"):
            node.send((host, 1), b"x")
        node.send(other.getsockname(), b"x")
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, other.recv, 2048)
        await node.close()


async def test_an_endpoint_that_ends_is_opened_again(tmp_path: Path) -> None:
    node = Node(site(free_port(), tmp_path))
    await node.open()
    before = node._transport
    assert before is not None
    before.abort()
    await until(lambda: node._transport is not before)
    await node.close()
