"""Apps: rows that many nodes write, kept by workers and spread by the catalog; the newest stamp wins.

One worker decides each name (`core.rendezvous`), so that two brokers do not make one name twice; it must answer for an
app to be made. Everything else about apps works while any worker answers. A deleted app leaves a tombstone, so that a
worker that was away does not bring it back. With a fixed list of workers, where no catalog spreads anything, every
worker is told.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from msgspec.structs import replace

from hawker.broker.directory import Directory
from hawker.broker.fleet import Fleet, WorkerLink, ask_each, unreachable
from hawker.core import rendezvous
from hawker.errors import NameTaken, NotFound, Unreachable
from hawker.host import Host
from hawker.model.market import KeepApp, ListAppsKept
from hawker.model.rows import AppRow
from hawker.telemetry import get_logger

REMEMBERED = 1000
"""Apps written through this broker. They come back by the catalog in a second or two."""


class KnownApp(msgspec.Struct, frozen=True, kw_only=True):
    """An app's newest row and its machines on all workers that answered."""

    row: AppRow
    machines: int


class Apps:
    """Reads and writes apps over the fleet."""

    def __init__(self, fleet: Fleet, host: Host, directory: Directory | None = None) -> None:
        self._fleet = fleet
        self._host = host
        self._directory = directory
        self._written: OrderedDict[str, AppRow] = OrderedDict()  # by this broker, and perhaps not in its catalog yet

    def known(self, name: str) -> AppRow | None:
        """The app's row in the catalog, or the newer one that this broker has just written. It may say that the app was
        deleted."""
        if self._directory is None:
            return None
        shown, written = self._directory.app(name), self._written.get(name)
        if shown and written and shown.stamp_ms >= written.stamp_ms:
            del self._written[name]
            return shown
        return written or shown

    async def all(self) -> tuple[list[KnownApp], list[str]]:
        """All apps, by name, and the workers that did not answer, whose machines are not counted.

        Raises `Unreachable` when no worker answers.
        """
        found, silent = await self._read("", self._directory.apps() if self._directory else [])
        return sorted(found.values(), key=lambda app: app.row.name), silent

    async def get(self, name: str) -> KnownApp:
        """Raises `NotFound`."""
        known = self.known(name)
        found, silent = await self._read(name, [known] if known else [])
        if name in found:
            return found[name]
        deciding = self._deciding(name)[0].name
        if deciding in silent and known is None:  # it may be the only one that knows it so far
            raise Unreachable(
                f"app not found on the workers that answered, and {deciding}, which decides this name, did not answer",
                hint="try again when it is back",
            )
        raise NotFound(f"app not found: {name}", hint=f"hawker apps create {name}")

    async def create(self, name: str, org: str, network: str, role: str) -> AppRow:
        """Raises `NameTaken`, and `Unreachable` when the worker that decides names does not answer."""
        now = self._host.now_ms()
        row = AppRow(
            name=name,
            id=name,
            org=org,
            network=network,
            number=self._host.rng.getrandbits(31),
            created_at_ms=now,
            stamp_ms=now,
            role=role,
        )
        known = self.known(name)
        if known and not known.deleted:
            raise _taken(name)
        first, *others = self._deciding(name)
        row = replace(row, stamp_ms=max(now, known.stamp_ms + 1 if known else 0))
        try:
            kept = await first.send(KeepApp(app=row, if_absent=True))
            if kept.deleted:  # the tombstone's clock was ahead of ours
                row = replace(row, stamp_ms=kept.stamp_ms + 1)
                kept = await first.send(KeepApp(app=row, if_absent=True))
        except Unreachable as error:
            raise Unreachable(
                f"{first.name}, which decides this name, does not answer", hint="try again when it is back"
            ) from error
        if kept != row:
            raise _taken(name)
        if self._directory is None:
            await self._tell(others, row)
        self._wrote(row)
        return row

    def _wrote(self, row: AppRow) -> None:
        self._written[row.name] = row
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)

    async def _tell(self, others: list[WorkerLink], row: AppRow) -> None:
        _, errors = await ask_each(others, KeepApp(app=row))
        for worker, refusal in errors.items():
            # It learns of the app with the first reservation that is confirmed there.
            _logger.warning("app.not_told", app=row.name, worker=worker, error=refusal.message, cause="app created")

    async def delete(self, app: KnownApp) -> None:
        """Leave a tombstone. With the catalog it is enough that one worker takes it; with a fixed list all must, since
        one that does not would keep the app. Raises `Unreachable`, and the error of a worker that refuses."""
        row = replace(app.row, deleted=True, stamp_ms=max(app.row.stamp_ms + 1, self._host.now_ms()))
        answers, errors = await self._fleet.ask_all(KeepApp(app=row))
        silent = unreachable(errors)
        if silent and not (answers and self._directory):
            raise Unreachable(
                f"{', '.join(silent)} did not answer; the app may still be known there", hint="delete it again"
            )
        if errors and not (answers and self._directory):
            raise next(iter(errors.values()))
        self._wrote(row)

    def _deciding(self, name: str) -> list[WorkerLink]:
        """The worker that decides a name, and the others."""
        names = rendezvous.ranked(f"app/{name}", self._fleet.settled(self._host.now_ms()))
        if not names:
            raise Unreachable("no worker is known that could keep the app", hint="hawker members")
        rest = [other for other in self._fleet.links if other != names[0]]
        return [self._fleet.links[other] for other in (names[0], *rest)]

    async def _read(self, name: str, known: list[AppRow]) -> tuple[dict[str, KnownApp], list[str]]:
        answers, errors = await self._fleet.ask_all(ListAppsKept(name=name))
        if not answers:
            raise next(iter(errors.values()), Unreachable("no worker is known", hint="hawker members"))
        found = {row.name: KnownApp(row=row, machines=0) for row in known}
        for kept in (k for answer in answers.values() for k in answer):
            there = found.get(kept.app.name)
            row = kept.app if there is None or kept.app.stamp_ms > there.row.stamp_ms else there.row
            deployed = kept.app.deployed or (there is not None and there.row.deployed)
            found[row.name] = KnownApp(
                row=replace(row, deployed=deployed), machines=kept.machines + (there.machines if there else 0)
            )
        return {name: app for name, app in found.items() if not app.row.deleted}, unreachable(errors)


def _taken(name: str) -> NameTaken:
    return NameTaken(
        "Validation failed: Name has already been taken", hint=f"choose another name, or use the app {name}"
    )


_logger = get_logger()
