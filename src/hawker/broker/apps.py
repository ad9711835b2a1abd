"""Apps, until the catalog keeps them: a row on every worker, the newest stamp wins, the first worker decides a name.

Deciding names in one place keeps two brokers from making one name twice; that worker must answer for an app to be
made. Everything else about apps works while any worker answers. A deleted app leaves a tombstone, so that a worker
that was away does not bring it back.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from hawker.broker.fleet import AppKept, Fleet, gather_named, unreachable
from hawker.errors import NameTaken, NotFound, Unreachable
from hawker.host import Host
from hawker.model.rows import AppRow
from hawker.telemetry import get_logger


class KnownApp(msgspec.Struct, frozen=True, kw_only=True):
    """An app's newest row and its machines on all workers that answered."""

    row: AppRow
    machines: int


class Apps:
    """Reads and writes apps over the fleet."""

    def __init__(self, fleet: Fleet, host: Host) -> None:
        self._fleet = fleet
        self._host = host

    async def all(self) -> tuple[list[KnownApp], list[str]]:
        """All apps, by name, and the workers that did not answer, whose machines are not counted.

        Raises `Unreachable` when no worker answers.
        """
        found, silent = await self._read("/v1/market/apps")
        return sorted(found.values(), key=lambda app: app.row.name), silent

    async def get(self, name: str) -> KnownApp:
        """Raises `NotFound`."""
        found, _ = await self._read(f"/v1/market/apps?name={quote(name, safe='')}")
        if name not in found:
            raise NotFound(f"app not found: {name}", hint=f"hawker apps create {name}")
        return found[name]

    async def create(self, name: str, org: str, network: str, role: str) -> AppRow:
        """Raises `NameTaken`, and `Unreachable` when the worker that decides names does not answer."""
        now = self._host.now_ms()
        row = AppRow(
            name=name,
            id=name,
            org=org,
            network=network or "default",
            number=self._host.rng.getrandbits(31),
            created_at_ms=now,
            stamp_ms=now,
            role=role,
        )
        first, *others = self._fleet.links.values()
        try:
            kept = await first.call("POST", "/v1/market/apps", AppRow, {"app": row, "if_absent": True})
            if kept.deleted:  # the tombstone's clock was ahead of ours
                row = replace(row, stamp_ms=kept.stamp_ms + 1)
                kept = await first.call("POST", "/v1/market/apps", AppRow, {"app": row, "if_absent": True})
        except Unreachable as error:
            raise Unreachable(
                f"{first.name}, which decides the names of apps, does not answer", hint="try again when it is back"
            ) from error
        if kept != row:
            raise NameTaken(
                "Validation failed: Name has already been taken", hint=f"choose another name, or use the app {name}"
            )
        body = {"app": row}
        _, errors = await gather_named({o.name: o.ask("POST", "/v1/market/apps", AppRow, body) for o in others})
        for worker, refusal in errors.items():
            # It learns of the app with the first reservation that is confirmed there.
            _logger.warning("app.not_told", app=name, worker=worker, error=refusal.message, cause="app created")
        return row

    async def delete(self, app: KnownApp) -> None:
        """Leave a tombstone on every worker. Raises `Unreachable` when one does not answer: it would keep the app."""
        row = replace(app.row, deleted=True, stamp_ms=max(app.row.stamp_ms + 1, self._host.now_ms()))
        _, errors = await self._fleet.ask_all("POST", "/v1/market/apps", AppRow, {"app": row})
        if silent := unreachable(errors):
            raise Unreachable(
                f"{', '.join(silent)} did not answer; the app may still be known there", hint="delete it again"
            )

    async def _read(self, path: str) -> tuple[dict[str, KnownApp], list[str]]:
        answers, errors = await self._fleet.ask_all("GET", path, list[AppKept])
        if not answers:
            raise next(iter(errors.values()))
        found: dict[str, KnownApp] = {}
        for kept in (k for answer in answers.values() for k in answer):
            there = found.get(kept.app.name)
            row = kept.app if there is None or kept.app.stamp_ms > there.row.stamp_ms else there.row
            deployed = kept.app.deployed or (there is not None and there.row.deployed)
            found[row.name] = KnownApp(
                row=replace(row, deployed=deployed), machines=kept.machines + (there.machines if there else 0)
            )
        return {name: app for name, app in found.items() if not app.row.deleted}, unreachable(errors)


_logger = get_logger()
