"""The data planes that a proxy can be made with, chosen by `[proxy] engine`.

Other packages bring theirs under the entry point group `hawker.data_planes`: an object with the methods of
`PlaneFactory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import msgspec

from hawker.errors import Invalid
from hawker.plugins import installed
from hawker.proxy.data_plane import DataPlane
from hawker.proxy.delegation import Delegator
from hawker.proxy.embedded.context import PlaneParts
from hawker.proxy.embedded.plane import EmbeddedPlane
from hawker.proxy.haproxy.plane import HaproxyPlane
from hawker.proxy.haproxy.process import Process, end_left
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.settings import GROUP, ProxySettings


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a data plane is made of. `embedded` is for Hawker's own HTTP code, `proxy` has the operator's words.
    `delegator` makes what delegates machines to a program outside this process. `files` is the agent's directory, None
    where it has none."""

    embedded: PlaneParts
    proxy: ProxySettings
    delegator: Callable[[], Delegator]
    files: Path | None = None


class PlaneFactory(Protocol):
    def check(self, settings: ProxySettings, files: Path) -> None:
        """Raises `Invalid` when this host cannot run the plane, as far as is to be seen without opening it."""
        ...

    def make(self, parts: Parts) -> DataPlane:
        """Raises `Invalid` as `check` does."""
        ...

    async def end_left(self, settings: ProxySettings, files: Path) -> None:
        """End the programs that an earlier agent left running with this plane, and that the settings ask for no more:
        they would hold their addresses, and answer nobody."""
        ...


class _Embedded:
    def check(self, settings: ProxySettings, files: Path) -> None: ...

    def make(self, parts: Parts) -> DataPlane:
        return EmbeddedPlane(parts.embedded)

    async def end_left(self, settings: ProxySettings, files: Path) -> None: ...


class _Haproxy:
    def check(self, settings: ProxySettings, files: Path) -> None:
        Process(settings.haproxy, _directory(settings, files), "", lambda: None)

    def make(self, parts: Parts) -> DataPlane:
        if not parts.proxy.haproxy.directory and parts.files is None:
            raise Invalid("proxy.haproxy.directory", "", "say where HAProxy's files are to be")
        haproxy, directory = self._ports(parts.proxy, parts.files), _directory(parts.proxy, parts.files)
        return HaproxyPlane(parts.embedded, parts.delegator(), haproxy, directory)

    async def end_left(self, settings: ProxySettings, files: Path) -> None:
        haproxy = self._ports(settings, files)
        if settings.engine != "haproxy" or not (haproxy.plain or haproxy.tls):
            await end_left(settings.haproxy, _directory(settings, files), settings.embedded.pause_s)

    @staticmethod
    def _ports(settings: ProxySettings, files: Path | None) -> HaproxySettings:
        """HAProxy's settings, without the ports that the proxy does not listen at."""
        shared, haproxy = settings.shared_ports(), settings.haproxy
        plain, tls = (tuple(port for port in ports if port in shared) for ports in (haproxy.plain, haproxy.tls))
        with_tls = settings.certificates or (settings.acme is not None and files is not None)
        return msgspec.structs.replace(haproxy, plain=plain, tls=tls if with_tls else ())


def _directory(settings: ProxySettings, files: Path | None) -> Path:
    """Where HAProxy's configuration and sockets are."""
    return Path(settings.haproxy.directory or (files or Path()) / "haproxy").absolute()


EMBEDDED: PlaneFactory = _Embedded()
HAPROXY: PlaneFactory = _Haproxy()
_OURS: dict[str, PlaneFactory] = {"embedded": EMBEDDED, "haproxy": HAPROXY}


def factory(name: str) -> PlaneFactory:
    """The name was checked with the settings."""
    return _OURS.get(name) or cast(PlaneFactory, installed(GROUP, _OURS)[name].load())


async def end_left_programs(settings: ProxySettings, files: Path) -> None:
    """End what earlier agents left running with data planes that `settings` do not ask for any more."""
    for each in _OURS.values():
        await each.end_left(settings, files)
