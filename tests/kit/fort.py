"""A worker with machines that try to get out, and a neighbour that must not notice: for tests of isolation.

The host is a network namespace (`tests.kit.site`); its containers are real. `attempts` is compiled from `attempts.c`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.kit.namespaces import missing_for_namespaces
from tests.kit.oci import block_device, character_device, directory, file
from tests.kit.site import HOST4, HOST6, Site
from tests.kit.unpacked import UnpackedImages
from tests.kit.waiting import wait_until

from hawker.network.base import Settings, Wanted
from hawker.worker.drivers.base import Exit, Instance, InstanceSpec, Limits, Network, Root, Tmpfs
from hawker.worker.drivers.container.driver import ContainerDriver

SOURCE = Path(__file__).parent / "attempts.c"
PORT = 8080
API_PORT = 8700
CONNECTIONS = 100
"""Those a machine may have."""
ANSWER_S = 5.0
"""How long a neighbour may take to answer while two cpus are fought for."""


def missing_for_fort() -> str:
    """Why there can be no `Fort` here, or "" when there can."""
    if without := missing_for_namespaces():
        return without
    tools = ("cc", "crun", "runc", "mke2fs")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return next((f"needs {tool}" for tool in tools if shutil.which(tool, path=path) is None), "")


def compiled(directory: Path) -> bytes:
    """`attempts`, an executable that needs nothing beside it."""
    made = directory / "attempts"
    subprocess.run(["cc", "-O1", "-static", "-Wall", "-Wextra", "-Werror", "-o", made, SOURCE], check=True)
    return made.read_bytes()


class Fort:
    """`with Site() as site: fort = Fort(...)`, then `open`, and in the end `close`."""

    def __init__(self, site: Site, place: Path, runtime: str, *, user_namespaces: bool = True) -> None:
        self.site = site
        self.user_namespaces = user_namespaces
        self.secret = place / "secret-of-the-host"
        self.secret.write_text("secret")
        self.images = UnpackedImages(place / "images")
        program = compiled(place)
        nodes = [character_device("nodes/mem", 1, 1), block_device("nodes/disk", 254, 0, 0o666)]
        programs = [file("bin/attempts", program, 0o755), file("bin/suid", program, 0o4755)]
        self.images.add("attempts", {}, [[*programs, directory("nodes"), *nodes]])
        manager = site.worker("isolation", Settings(connections=CONNECTIONS))
        self.directory = place / "driver"
        self.driver = ContainerDriver(
            self.directory, self.images, manager, runtime=runtime, user_namespaces=user_namespaces
        )
        self._number = 0
        self.abstract = f"hawker-{os.getpid()}-{runtime}"
        with site.network.inside("host"):
            self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + self.abstract)
        self._listener.listen()
        self.neighbour = self.spec("neighbour", str(PORT), network=9)
        for port in (API_PORT, PORT):
            site.listen("host", port)
        site.listen("internet", PORT)

    @property
    def neighbour_address(self) -> str:
        assert self.neighbour.network
        return self.neighbour.network.address

    def open(self) -> None:
        self.run(self.driver.open(lambda ended: None))
        self.neighbour_pid = self.start(self.neighbour).pid
        wait_until(self.answers, "the neighbour answers", ANSWER_S)

    def close(self) -> None:
        self.run(self.driver.stop_all(grace_s=0))
        self.run(self.driver.close())
        self._listener.close()

    def run(self, call: Any) -> Any:
        return self.site.run(call)

    def spec(self, *attempt: str, network: int = 7, user: str = "", root_mib: int = 0) -> InstanceSpec:
        """A machine that makes this attempt."""
        self._number += 1
        number = self._number
        return InstanceSpec(
            key=f"try{number:04d}/launch",
            machine=f"{number:014x}",
            image="attempts",
            argv=("/bin/attempts", *attempt),
            env={},
            limits=Limits(cpu_millis=500, memory_mib=64, pids=48),
            user=user,
            root=Root(size_mib=root_mib),
            tmpfs=(Tmpfs(path="/tmp", size_mib=8),),
            network=Network(number=network, address=f"fdaa:0:{network:x}:0:1:0:{number:x}:2"),
        )

    def start(self, spec: InstanceSpec) -> Instance:
        started: Instance = self.run(self.driver.start(spec))
        return started

    def ended(self, spec: InstanceSpec) -> tuple[Exit, list[str]]:
        """How it ended and what it said, once it has ended."""

        async def wait() -> tuple[Exit, list[str]]:
            ended = await self.driver.wait(spec.key)
            return ended, await self._said(spec)

        found: tuple[Exit, list[str]] = self.run(wait())
        return found

    def says(self, spec: InstanceSpec, text: str) -> None:
        """Wait until it has said this."""
        wait_until(lambda: any(text in line for line in self.run(self._said(spec))), f"it says {text!r}")

    def destroy(self, spec: InstanceSpec) -> None:
        self.run(self.driver.destroy(spec.key, force=True))
        self.run(self.driver.purge(spec.machine))

    def answers(self) -> bool:
        """Whether the neighbour does."""
        try:
            with (
                self.site.network.inside("host"),
                socket.create_connection((self.neighbour_address, PORT), timeout=ANSWER_S) as connection,
            ):
                return connection.recv(5, socket.MSG_WAITALL) == b"alive"
        except OSError:
            return False

    def neighbour_undisturbed(self) -> None:
        """It is the same process as ever, and answers."""
        assert self.answers(), "the neighbour does not answer"
        now: Instance = self.run(self.driver.inspect(self.neighbour.key))
        assert (now.pid, now.exit) == (self.neighbour_pid, None)

    def services(self) -> list[str]:
        """The host's addresses, as a machine may try them."""
        place = self.neighbour.network
        assert place
        plan = self.site.managers["isolation"].plan(
            Wanted(machine=self.neighbour.machine, number=place.number, address=place.address)
        )
        return [HOST4, HOST6, "127.0.0.1", "::1", plan.gateway4, plan.resolver]

    async def _said(self, spec: InstanceSpec) -> list[str]:
        return [line.text async for line in self.driver.logs(spec.machine, tail=1000)]
