"""What the proxy asks of the kernel itself, past asyncio, answered by the simulated network.

A look whether a machine takes connections is a system call, which leaves a socket when one is taken; whether bytes lie
in a socket, and how long its peer may be silent, are asked of the socket. A simulation has no sockets.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress

from hawker.proxy.base import Address
from hawker.proxy.embedded.machine import MachineConnection
from hawker.proxy.machines import waking
from hawker.sim.platform.loop import SimLoop
from hawker.sim.platform.net import LOOPBACK, Net
from hawker.sim.platform.processes import current_process
from hawker.sim.platform.replacing import Change, replaced
from hawker.sim.platform.streams import StreamEnd

LOOK_S = 30e-6
"""What a look at a port of the own host takes, as was measured."""


async def _connected(address: Address, within_s: float = waking.TRY_S) -> StreamEnd | None:
    """The end of a connection stands for its socket: what the proxy does with it is to close it or to hand it to the
    loop."""
    host, port = address
    station, net = current_process().station, _net()
    assert station is not None  # proxies run on hosts
    if host == LOOPBACK or net.listener(station, host, port) is not None:
        await asyncio.sleep(LOOK_S)
        return net.dial_here(host, port)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(within_s):
            return await net.dial(host, port)
    await asyncio.sleep(LOOK_S)
    return None


def _net() -> Net:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    assert isinstance(loop.net, Net)
    return loop.net


def _stream(connection: MachineConnection) -> StreamEnd:
    assert isinstance(connection.transport, StreamEnd)
    return connection.transport


def _has_come(connection: MachineConnection) -> bool:
    return _stream(connection).has_come


def _no_last_words(connection: MachineConnection) -> None:
    """What was read before the reset is read; a reset drops the rest."""


def _guard(connection: MachineConnection, guarded: bool) -> None:
    connection._guarded = guarded
    _stream(connection).guard(connection._settings.connect_timeout_s if guarded else 0.0)


def simulated() -> AbstractContextManager[None]:
    """Until the block ends."""
    return replaced(
        (
            Change(waking, "connected", _connected),
            Change(MachineConnection, "_has_come", _has_come),
            Change(MachineConnection, "_last_words", _no_last_words),
            Change(MachineConnection, "_guard", _guard),
        )
    )
