"""What the drivers say of this host. They are opened as an agent opens them, in a directory that goes again, and probe
by running something: a container, a guest of some instructions."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from hawker.agent.settings import AgentSettings, TokenSettings, WorkerRole
from hawker.agent.worker_parts import live_worker_parts
from hawker.doctor.findings import Finding, of_driver
from hawker.errors import Unreachable
from hawker.host import live


async def drivers(settings: AgentSettings | None) -> list[Finding]:
    """One finding for each driver that `settings` ask for; without settings for each there is. Raises `Invalid` for
    settings that name a driver there is not."""
    role = (settings.worker if settings else None) or WorkerRole(listen="127.0.0.1:0")
    with tempfile.TemporaryDirectory(prefix="hawker-doctor-") as place:
        own = AgentSettings(
            name="doctor", region="doctor", directory=Path(place), tokens=TokenSettings(cluster=""), worker=role
        )
        parts = await live_worker_parts(replace(settings, directory=Path(place)) if settings else own, role, live())
        try:
            with suppress(Unreachable):  # not one of them can be opened; each says why
                await parts.drivers.open(lambda ended: None)
            found = [of_driver(fingerprint) for _, fingerprint in sorted((await parts.drivers.fingerprints()).items())]
            await parts.drivers.stop_all(grace_s=0)
            await parts.drivers.close()
        finally:
            await parts.close()
    return found


def network() -> Finding:
    """Whether machines can have addresses of their own."""
    from hawker.network.manager import Manager

    if problem := Manager.problem():
        return Finding(what="network", state="missing", found="machines have none of their own", remedy=problem)
    return Finding(what="network", state="ok", found="netlink and nftables")
