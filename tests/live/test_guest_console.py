"""The guest as Firecracker has it, as far as QEMU can show it: no virtio ports for what the program says and how it
ends, but a serial console and a status drive; and the agent on vsock, which the guest reaches in itself."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.drivers import shell
from tests.kit.unpacked import UnpackedImages
from tests.kit.vms import prepared
from tests.kit.waiting import eventually

from hawker.init.build import COMPILERS, program
from hawker.supervisor.status_file import last_words
from hawker.worker.drivers.base import StartFailed
from hawker.worker.drivers.microvm import kernel, qemu, start_message
from hawker.worker.drivers.microvm.agent import Agent
from hawker.worker.drivers.microvm.disk import Disks
from hawker.worker.drivers.microvm.kernel import Kernel
from hawker.worker.drivers.microvm.qemu import Vm

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.usefixtures("guests")]

CPUINFO = Path("/proc/cpuinfo").read_text()
SEED = bytes(start_message.SEED_BYTES)


class Portless:
    """A machine without ports beside the agent's, whose disks have no serial numbers that mean anything."""

    def __init__(self, directory: Path, words: str) -> None:
        self.directory = directory
        self.words = words
        self.console = directory / "console"
        self.status = directory / "status"
        self.images = UnpackedImages(directory / "images")

    async def made(self, boots: Kernel) -> list[str]:
        disks = Disks(self.directory / "disks")
        disks.open()
        image = await self.images.ensure("busybox")
        path = await disks.of_image(image, self.images.layers(image))
        await disks.empty(self.directory / "disk", 64, journal=False)
        self.status.write_bytes(bytes(4096))
        vm = Vm(
            binary=qemu.binary(),
            accelerator="tcg",
            cpus=1,
            memory_mib=128,
            kernel=boots,
            tsc_khz=qemu.host_tsc_khz(CPUINFO),
            image=str(path),
            disk=str(self.directory / "disk"),
        )
        return self._rewired(qemu.command(vm))

    def _rewired(self, argv: Sequence[str]) -> list[str]:
        out: list[str] = []
        for word in argv:
            if word.startswith("file,id=") or (word.startswith("virtserialport") and "name=agent" not in word):
                out.pop()  # the option before it
            elif word.startswith("virtio-blk-device"):
                out.append(word.partition(",serial=")[0] + ",serial=123456789")
            elif word.startswith("socket,id="):  # that the supervisor would hand over
                out.append(re.sub(r"fd=\{(\w+)\}", r"path=\1", word))
            elif word.startswith("microvm,"):
                out.append(word.replace("isa-serial=off", "isa-serial=on"))
            elif "rdinit=/init" in word:
                out.append(word.replace("8250.nr_uarts=0", "8250.nr_uarts=1") + f" hawker.console=serial{self.words}")
            else:
                out.append(word)
        out += ["-serial", f"file:{self.console}"]
        out += ["-drive", f"id=status,if=none,file={self.status},format=raw"]
        return [*out, "-device", "virtio-blk-device,drive=status,serial=123456789"]

    async def start(self, agent: Agent, script: str, *argv: str) -> None:
        image = await self.images.ensure("busybox")
        one = shell(script, image="busybox")
        if argv:
            one = replace(one, argv=argv)
        await agent.start(start_message.told(one, image.config, None, clock_ns=1_700_000_000_000_000_000, seed=SEED))


@asynccontextmanager
async def running(it: Portless, boots: Kernel) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*await it.made(boots), cwd=it.directory, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture(scope="module")
def boots(guests: None) -> Kernel:
    return prepared()


@pytest.fixture(scope="module")
def with_relay(boots: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """The same, with process 1 behind a relay from its own vsock: a second archive takes the place of files of the
    first (early-userspace/buffer-format.rst)."""
    directory = tmp_path_factory.mktemp("relay")
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    source = Path(__file__).parents[1] / "kit" / "relay.c"
    subprocess.run([compiler, "-static", "-O1", "-o", directory / "relay", source], check=True)
    found = kernel.in_order((*kernel.VSOCK_MODULES, "vsock_loopback"), kernel.find().modules)
    more = [
        kernel.entry("init", (directory / "relay").read_bytes(), 0o100755),
        kernel.entry("guest-init", program("guest", Path(boots.initrd).parent).read_bytes(), 0o100755),
        kernel.entry("modules.vsock", "".join(f"/{path.name}\n" for path in found).encode()),
        *(kernel.entry(path.name, kernel.unsigned(path.read_bytes())) for path in found),
        kernel.entry("TRAILER!!!", b"", 0),
    ]
    initrd = directory / "with-relay"
    initrd.write_bytes(Path(boots.initrd).read_bytes() + b"".join(more))
    return replace(boots, initrd=str(initrd))


async def test_a_program_speaks_on_the_console_and_its_end_is_on_the_status_drive(
    tmp_path: Path, boots: Kernel
) -> None:
    it = Portless(tmp_path, "")
    async with asyncio.timeout(60), running(it, boots) as process:
        agent = await Agent.connect(tmp_path / "agent")
        await it.start(agent, "echo out; echo err >&2; seq 3000; echo the last; exit 7")
        await process.wait()
        await agent.close()
    lines = it.console.read_bytes().split(b"\n")
    assert b"err" in lines
    assert [line for line in lines if line != b"err"] == [
        b"out",
        *(b"%d" % n for n in range(1, 3001)),
        b"the last",
        b"",
    ]
    assert last_words(str(it.status)) == {"code": 7, "signal": None, "oom_killed": False, "error": ""}
    assert it.status.stat().st_size == 4096


async def test_what_could_not_start_says_so_on_the_status_drive_and_to_whoever_asks_by_vsock(
    tmp_path: Path, with_relay: Kernel
) -> None:
    it = Portless(tmp_path, " hawker.agent=vsock")
    async with asyncio.timeout(60), running(it, with_relay) as process:
        agent = await Agent.connect(tmp_path / "agent")
        with pytest.raises(StartFailed, match="no-such-program"):
            await it.start(agent, "", "no-such-program")
        await process.wait()
        await agent.close()
    ended = last_words(str(it.status))
    assert ended is not None
    assert "no-such-program" in ended["error"]


async def test_the_agent_on_vsock_answers_one_connection_after_the_other(tmp_path: Path, with_relay: Kernel) -> None:
    it = Portless(tmp_path, " hawker.agent=vsock")
    async with asyncio.timeout(60), running(it, with_relay) as process:
        agent = await Agent.connect(tmp_path / "agent")
        await it.start(agent, "trap 'echo asked; exit 3' TERM; echo up; while :; do sleep 0.05; done")
        done = await agent.execute(["echo", "over vsock"], stdin=b"", env={}, timeout_s=20)
        assert (done.stdout, done.code) == (b"over vsock\n", 0)
        await agent.close()
        _, writer = await asyncio.open_unix_connection(tmp_path / "agent")
        writer.write(b"\xff")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        again = await Agent.connect(tmp_path / "agent")
        assert not again.idle

        async def up() -> bool:
            return b"up" in it.console.read_bytes()

        await eventually(up, "the program has set its trap")
        await again.signal(15)
        await process.wait()
        await again.close()
    assert it.console.read_bytes() == b"up\nasked\n"
    assert last_words(str(it.status)) == {"code": 3, "signal": None, "oom_killed": False, "error": ""}
