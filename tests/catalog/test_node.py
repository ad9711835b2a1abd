"""A member that cannot begin says why."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hawker.catalog.exchange import Answering
from hawker.catalog.node import Node, NodeSettings
from hawker.catalog.packets import Sealer
from hawker.errors import HawkerError, Unreachable
from hawker.host import live
from hawker.http.call import Call
from hawker.telemetry import Metrics


async def test_a_port_that_is_taken_for_datagrams_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        settings = NodeSettings(
            name="ord-1",
            region="ord",
            host="127.0.0.1",
            port=port,
            bind="127.0.0.1",
            cluster="test",
            secrets=("secret",),
            token="token",
        )
        node = Node(settings, live(), tmp_path / "catalog.db", Metrics())
        with pytest.raises(HawkerError, match=f"cannot take datagrams on 127.0.0.1:{port}: Address already in use"):
            await node.open()
        await node.close()


async def test_a_member_that_is_being_closed_answers_nothing_more() -> None:
    """Its server outlives it by a moment, and asked a database that was closed. Found by the simulator, seed 250."""

    async def answer(question: bytes) -> bytes:
        return b"answered " + question

    closed = False
    sealer = Sealer("test", ("secret",), random.Random(1))
    handle = Answering(sealer, lambda why: None, lambda: closed).routes({"/question": answer})["POST", "/question"]
    call = cast(Call, SimpleNamespace(body=sealer.seal(b"what")))
    assert sealer.open((await handle(call)).body) == b"answered what"
    closed = True
    with pytest.raises(Unreachable, match="being closed"):
        await handle(call)
