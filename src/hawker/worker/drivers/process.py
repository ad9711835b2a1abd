"""The process driver: runs programs of the host itself, anywhere, as any user.

The programs belong to a supervisor, one process per worker that outlives this daemon; see
`hawker.worker.drivers.supervised`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hawker.supervisor import cgroups as groups
from hawker.worker.drivers.base import Capabilities, Fingerprint, Instance, InstanceSpec
from hawker.worker.drivers.supervised import SupervisedDriver, Supervisor


class ProcessDriver(SupervisedDriver):
    """See `hawker.worker.drivers.base.Driver`. `directory` is kept between runs; `cgroups` False does without them."""

    name = "process"

    def __init__(self, directory: Path, *, cgroups: bool = True) -> None:
        super().__init__(Supervisor(directory, *([] if cgroups else ["--no-cgroups"])))
        self._kind = groups.usable() if cgroups else ""

    async def fingerprint(self) -> Fingerprint:
        limited = bool(self._kind)
        return Fingerprint(
            driver=self.name,
            healthy=True,
            capabilities=Capabilities(suspend=True, exec=True, limits=limited, images=False),
            attributes={"cgroups": self._kind or "none: limits of cpu and memory are counted, not enforced"},
        )

    async def prepare(self, image: str) -> None:
        """Programs of the host need nothing."""

    async def start(self, spec: InstanceSpec) -> Instance:
        shown = await self.supervisor.call(
            "start",
            key=spec.key,
            machine=spec.machine,
            argv=list(spec.argv),
            env=dict(spec.env),
            limits=msgspec.to_builtins(spec.limits),
        )
        return msgspec.convert(shown, Instance)
