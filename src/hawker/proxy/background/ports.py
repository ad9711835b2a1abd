"""Opens the public ports that apps have to themselves as they claim them, and closes those that nobody claims any more.

A port that cannot be opened is tried again now and then: what has it may end.
"""

from __future__ import annotations

import asyncio

from hawker.catalog.view import RowView
from hawker.errors import HawkerError
from hawker.proxy.base import Address
from hawker.proxy.catalog_view.port_claims import PortClaims
from hawker.proxy.data_plane import DataPlane
from hawker.telemetry import get_logger

AGAIN_S = 10.0


class OpenPorts:
    """`begin`, then `close`. `opened` are addresses by public port; `missing` says why others are not open."""

    def __init__(self, plane: DataPlane, claims: PortClaims, view: RowView, host: str, worker: str) -> None:
        """`host` is the address to open them at, `worker` whose machines are on this host, "" for none."""
        self._plane = plane
        self._claims = claims
        self._view = view
        self._host = host
        self._worker = worker
        self._differ = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.opened: dict[int, Address] = {}
        self.missing: dict[int, str] = {}

    async def begin(self) -> None:
        self._claims.on_ports.append(self._differ.set)
        await self._follow()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="open ports")

    async def close(self) -> None:
        self._claims.on_ports.remove(self._differ.set)
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._differ.wait()
            except TimeoutError:
                pass
            self._differ.clear()
            try:
                await self._follow()
            except HawkerError as error:
                _logger.warning("ports.not_followed", error=error.message, cause="claims of ports")
            except Exception:  # the loop goes on
                _logger.exception("ports.fault", cause="a fault of ours")

    async def _follow(self) -> None:
        wanted = dict(self._claims.ports)
        self.missing = {port: why for port, why in self.missing.items() if port in wanted}
        for port in [port for port in self.opened if port not in wanted]:
            self._plane.stop(self.opened.pop(port))
        for port, app in sorted(wanted.items()):
            if port not in self.opened and (why := await self._open(port)):
                if self.missing.get(port) != why:
                    _logger.warning("port.not_opened", port=port, app=app, why=why, cause="claims of ports")
                self.missing[port] = why

    async def _open(self, port: int) -> str:
        """Open a port. Returns the reason why it cannot be opened, or ""."""
        if self._worker and self._view.rows(
            "select 1 from services where worker = ? and host_port = ? limit 1", (self._worker, port)
        ):
            return "a machine of this host listens there itself"
        try:
            self.opened[port] = await self._plane.listen_own(self._host, port, public=port)
        except OSError as error:
            return f"it cannot be opened: {error.strerror or error}"
        self.missing.pop(port, None)
        return ""


_logger = get_logger()
