"""A fleet as one catalog shows it, without any machine: rows as their owners would publish them.

fleet = Fleet(tmp_path)
fleet.worker("ord-1")
fleet.app("web")
fleet.machine("m1", "web", ports=[80], state="stopped")
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.catalog.owners import Owner

from hawker.catalog.gossip.replica import Replica
from hawker.host import Host
from hawker.model.catalog import Values
from hawker.model.services import Concurrency, PublicPort, catalog_json

NOW_MS = 1_700_000_000_000
REGION = "ord"


class Fleet:
    """`replica` has it all. `close` when done."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.host = Host(lambda: NOW_MS / 1000, random.Random(1))
        self.replica = Replica.open(directory / "catalog.db", self.host)
        self._owners: dict[tuple[str, str], Owner] = {}

    def close(self) -> None:
        self.replica.close()

    def put(self, owner: str, table: str, **rows: Values | None) -> None:
        tier = "global" if table in ("workers", "apps", "app_regions", "forgotten") else "region"
        key = owner, tier
        if key not in self._owners:
            self._owners[key] = Owner(self.replica, owner, "global" if tier == "global" else "region")
        self._owners[key].put(table, **rows)

    def worker(
        self, name: str, *, region: str = REGION, host: str = "127.0.0.1", port: int = 4281, proxy: int = 0
    ) -> None:
        values = {"region": region, "host": host, "port": port, "proxy_port": proxy, "state": "active"}
        self.put(name, "workers", **{name: values})

    def app(self, name: str, *, org: str = "personal", created_at_ms: int = 1, owner: str = "ord-1") -> None:
        values = {"org": org, "created_at_ms": created_at_ms, "stamp": 1, "number": 1}
        self.put(owner, "apps", **{name: values})

    def elsewhere(self, app: str, region: str, worker: str) -> None:
        self.put(worker, "app_regions", **{app: {"region": region, "machines": 1}})

    def machine(
        self,
        machine: str,
        app: str,
        *,
        worker: str = "ord-1",
        state: str = "started",
        generation: int = 1,
        cordoned: bool = False,
    ) -> None:
        values = {
            "app": app,
            "region": REGION,
            "state": state,
            "generation": generation,
            "cordoned": cordoned,
            "created_at_ms": 1,
            "private_ip": "fdaa::1",
        }
        self.put(worker, "machines", **{machine: values})

    def service(
        self,
        machine: str,
        app: str,
        *,
        worker: str = "ord-1",
        internal: int = 8080,
        host_port: int | None = None,
        ports: tuple[tuple[int, int, tuple[str, ...]], ...] = ((80, 80, ("http",)),),
        soft: int = 20,
        hard: int = 0,
        **more: Any,
    ) -> None:
        public = tuple(PublicPort(first=first, last=last, handlers=handlers) for first, last, handlers in ports)
        values = {
            "machine": machine,
            "app": app,
            "protocol": "tcp",
            "internal_port": internal,
            "host_port": internal if host_port is None else host_port,
            "ports": catalog_json(public),
            "concurrency": catalog_json(Concurrency(soft_limit=soft, hard_limit=hard)),
            "autostart": True,
            "autostop": "off",
            "min_machines_running": 0,
            **more,
        }
        self.put(worker, "services", **{f"{machine}/tcp/{internal}": values})

    def check(
        self, machine: str, app: str, *, status: str, name: str = "up", service: str = "tcp/8080", worker: str = "ord-1"
    ) -> None:
        values = {"machine": machine, "app": app, "name": name, "kind": "service", "service": service, "status": status}
        self.put(worker, "checks", **{f"{machine}/{name}": values})
