"""What Firecracker is asked, held against its published description by a server of ours on a unix socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.kit.firecracker_api import Published, hang_up

from hawker.worker.drivers.microvm import firecracker, firecracker_api
from hawker.worker.drivers.microvm.firecracker_api import Call, FirecrackerError, Jail, Snapshot
from hawker.worker.drivers.microvm.kernel import Kernel
from hawker.worker.drivers.microvm.qemu import Vm

VM = Vm(
    binary="",
    accelerator="kvm",
    cpus=2,
    memory_mib=256,
    kernel=Kernel(vmlinux="/vmlinux", initrd="/initrd", version="6.1", digest="d"),
    image="/image.erofs",
    disk="/disk",
    tap="hk0",
)
SNAPSHOT = Snapshot(state="/state", memory="/memory")


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Published]:
    os.makedirs(directory)
    published = Published()
    fd = os.open(directory, os.O_PATH)
    async with await asyncio.start_unix_server(published.serve, f"/proc/self/fd/{fd}/api") as server:
        yield published
        server.close()
    os.close(fd)


async def test_a_machine_is_booted_saved_and_loaded_again(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    async with serving(deep / "one") as one:
        await firecracker_api.ask(deep / "one", firecracker_api.boot(VM, mac="02:00:00:00:00:01"))
        assert one.state == "running"
        await firecracker_api.ask(deep / "one", firecracker_api.save(SNAPSHOT))
        assert one.state == "paused"
    async with serving(deep / "two") as two:
        await firecracker_api.ask(deep / "two", firecracker_api.load(SNAPSHOT))
        assert two.state == "paused"  # until its record is written
        await firecracker_api.ask(deep / "two", firecracker_api.go_on())
        assert two.state == "running"


async def test_the_image_is_shared_and_the_machines_disk_is_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path / "fc") as there:
        await firecracker_api.ask(tmp_path / "fc", firecracker_api.boot(VM))
        drives = {body["drive_id"]: body for _, path, body in there.got if path.startswith("/drives/")}
    assert drives["image"]["is_read_only"]
    assert (drives["machine"]["is_read_only"], drives["machine"]["cache_type"]) == (False, "Writeback")
    assert there.got[-1][2] == {"action_type": "InstanceStart"}


async def test_what_a_guest_reads_and_writes_is_bounded_but_for_the_drive_it_tells_its_end_by(tmp_path: Path) -> None:
    async with serving(tmp_path / "fc") as there:
        await firecracker_api.ask(
            tmp_path / "fc", firecracker_api.boot(replace(VM, disk_bytes=1 << 20, disk_operations=500))
        )
        drives = {body["drive_id"]: body for _, path, body in there.got if path.startswith("/drives/")}
    buckets = {
        "bandwidth": {"size": 1 << 20, "refill_time": 1000, "one_time_burst": 10 << 20},
        "ops": {"size": 500, "refill_time": 1000, "one_time_burst": 5000},
    }
    assert [drives[name].get("rate_limiter") for name in ("image", "machine", "status")] == [buckets, buckets, None]


async def test_what_is_refused_is_said_in_its_words_and_nothing_more_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path / "fc") as there:
        with pytest.raises(
            FirecrackerError, match="PUT /snapshot/create: /snapshot/create: not accepted when untouched"
        ):
            await firecracker_api.ask(tmp_path / "fc", [*firecracker_api.save(SNAPSHOT)[1:], *firecracker_api.boot(VM)])
        assert there.got == []
        with pytest.raises(FirecrackerError, match="no PUT /no-such-path"):
            await firecracker_api.ask(tmp_path / "fc", [Call("PUT", "/no-such-path", {})])


async def test_a_hypervisor_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FirecrackerError, match="nobody listens at"):
        await firecracker_api.ask(tmp_path, firecracker_api.go_on())

    async with await asyncio.start_unix_server(hang_up, str(tmp_path / "api")):
        with pytest.raises(FirecrackerError, match="is gone"):
            await firecracker_api.ask(tmp_path, firecracker_api.go_on())


class Heard(asyncio.Protocol):
    def __init__(self) -> None:
        self.all: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._some = b""

    def data_received(self, data: bytes) -> None:
        self._some += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.set_result(self._some)


async def test_the_guest_is_reached_by_its_port(tmp_path: Path) -> None:
    """As docs/vsock.md has it: CONNECT and a port, OK and the host's, then the stream itself."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        if asked == b"CONNECT 1\n":
            writer.write(b"OK 1073741824\nhello")
        await hang_up(reader, writer)

    heard = Heard()
    assert not await firecracker.dial(tmp_path, heard)
    async with await asyncio.start_unix_server(connect, str(tmp_path / "vsock")):
        assert await firecracker.dial(tmp_path, heard)
        assert await heard.all == b"hello"

    os.unlink(tmp_path / "vsock")
    async with await asyncio.start_unix_server(hang_up, str(tmp_path / "vsock")):
        assert not await firecracker.dial(tmp_path, Heard())  # its guest does not listen yet


def test_the_jailer_makes_the_jail_and_becomes_the_hypervisor() -> None:
    jail = Jail(id="00000000000001-run1", base=Path("/var/lib/hawker/jails"), uid=901, gid=902)
    assert firecracker_api.jailed("/usr/bin/jailer", "/usr/bin/firecracker", jail) == [
        *("/usr/bin/jailer", "--id", "00000000000001-run1", "--exec-file", "/usr/bin/firecracker"),
        *("--uid", "901", "--gid", "902", "--chroot-base-dir", "/var/lib/hawker/jails", "--", "--api-sock", "/api"),
    ]
    assert jail.root == Path("/var/lib/hawker/jails/firecracker/00000000000001-run1/root")
    for bad in ("run/1", "", "a" * 65):
        with pytest.raises(ValueError, match="letters, digits and hyphens"):
            firecracker_api.jailed("j", "f", Jail(id=bad, base=Path("/"), uid=1, gid=1))
