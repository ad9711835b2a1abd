"""QEMU's control socket, with one at the other end that is not ours any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hawker.worker.drivers.microvm.qemu import LINE_MOST, QemuError, Qmp

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\n'


async def told(path: Path, says: bytes) -> asyncio.Server:
    """What says this at once to whoever connects, and nothing more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        with suppress(ConnectionError):
            await reader.read()  # until it is closed
        writer.close()

    return await asyncio.start_unix_server(serve, path)


@pytest.mark.parametrize(
    "says",
    [
        pytest.param(lambda: b"x" * (2 * LINE_MOST), id="no end of a line"),
        pytest.param(lambda: GREETING + b" " * (2 * LINE_MOST), id="no end of an answer"),
    ],
)
async def test_one_that_says_more_than_it_has_to_say_is_hung_up_on(tmp_path: Path, says: Callable[[], bytes]) -> None:
    async with await told(tmp_path / "qmp", says()), asyncio.timeout(10):
        with pytest.raises(QemuError, match="gone"):
            await Qmp.connect(tmp_path / "qmp")
