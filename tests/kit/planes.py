"""The data planes that the behaviour tests run on, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import hawker.host
from hawker.proxy.base import Address, Router
from hawker.proxy.certificates import Certificates
from hawker.proxy.embedded.engine import Engine
from hawker.proxy.embedded.settings import Settings


class Plane(Protocol):
    """`http` is public port 80, `backhaul` for other proxies, `tcp` public port 5432 for bytes alone, `own` the same
    for whatever the service of the app says that has it to itself. `settings` are those of the embedded plane, and
    `certificates`, a directory."""

    http: Address
    backhaul: Address
    tcp: Address
    own: Address

    async def open(self, router: Router, settings: dict[str, Any]) -> None: ...

    async def close(self) -> None:
        """Let finish what is in flight."""
        ...


class Embedded:
    http: Address
    backhaul: Address
    tcp: Address
    own: Address
    engine: Engine

    async def open(self, router: Router, settings: dict[str, Any]) -> None:
        settings = dict(settings)
        directory: Path | None = settings.pop("certificates", None)
        host = hawker.host.live()
        certificates = None if directory is None else Certificates((directory,), host)
        if certificates is not None:
            await certificates.look()
        self.engine = Engine(router, Settings(**settings), host, certificates)
        self.http = await self.engine.listen("127.0.0.1", 0, public=80)
        self.backhaul = await self.engine.listen_backhaul("127.0.0.1", 0)
        self.tcp = await self.engine.listen_plain("127.0.0.1", 0, public=5432)
        self.own = await self.engine.listen_own("127.0.0.1", 0, public=5432)

    async def close(self) -> None:
        await self.engine.close()


PLANES: dict[str, Callable[[], Plane]] = {"embedded": Embedded}
