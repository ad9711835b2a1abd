"""A member that cannot begin says why."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hawker.catalog.node import Node, NodeSettings
from hawker.errors import HawkerError
from hawker.host import live
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
