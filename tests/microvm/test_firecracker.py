"""What Firecracker is asked, held against its published description by a server of ours on a unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hawker.worker.drivers.microvm import firecracker
from hawker.worker.drivers.microvm.firecracker import Call, FirecrackerError, Jail, Snapshot
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


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """From firecracker.yaml at 1.17: the fields we use, those it requires without a default."""


class Machine(Body):
    vcpu_count: int
    mem_size_mib: int
    smt: bool = False


class BootSource(Body):
    kernel_image_path: str
    initrd_path: str = ""
    boot_args: str = ""


class Drive(Body):
    drive_id: str
    is_root_device: bool
    is_read_only: bool  # required for virtio-block
    path_on_host: str
    cache_type: str = "Unsafe"


class Interface(Body):
    iface_id: str
    host_dev_name: str
    guest_mac: str = ""


class Vsock(Body):
    guest_cid: int
    uds_path: str


class Entropy(Body):
    pass


class Action(Body):
    action_type: str


class State(Body):
    state: str


class Create(Body):
    mem_file_path: str
    snapshot_path: str
    snapshot_type: str = "Full"


class Backend(Body):
    backend_type: str
    backend_path: str


class Load(Body):
    snapshot_path: str
    mem_backend: Backend
    resume_vm: bool = False


# Method, path, body, and the state it is accepted in.
API: list[tuple[str, str, type[Body], str]] = [
    ("PUT", r"/machine-config", Machine, "fresh"),
    ("PUT", r"/boot-source", BootSource, "fresh"),
    ("PUT", r"/drives/(\w+)", Drive, "fresh"),
    ("PUT", r"/network-interfaces/(\w+)", Interface, "fresh"),
    ("PUT", r"/vsock", Vsock, "fresh"),
    ("PUT", r"/entropy", Entropy, "fresh"),
    ("PUT", r"/actions", Action, "any"),
    ("PATCH", r"/vm", State, "booted"),
    ("PUT", r"/snapshot/create", Create, "paused"),
    ("PUT", r"/snapshot/load", Load, "untouched"),
]
ENUMS = {
    "action_type": {"FlushMetrics", "InstanceStart", "SendCtrlAltDel"},
    "state": {"Paused", "Resumed"},
    "snapshot_type": {"Full", "Diff"},
    "backend_type": {"File", "Uffd"},
    "cache_type": {"Unsafe", "Writeback"},
}


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


class Published:
    """Accepts what the description accepts, in the state it asks for."""

    def __init__(self) -> None:
        self.state = "untouched"
        self.got: list[tuple[str, str, Any]] = []

    def take(self, method: str, path: str, raw: bytes) -> str:
        """The fault, "" for none."""
        for verb, pattern, body, needed in API:
            found = re.fullmatch(pattern, path)
            if verb != method or not found:
                continue
            try:
                read = msgspec.json.decode(raw, type=body)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                return f"{path}: {error}"
            if found.groups() and found[1] not in (getattr(read, "drive_id", ""), getattr(read, "iface_id", "")):
                return f"{path}: another id in the body"
            fields = json.loads(raw)
            for name, allowed in ENUMS.items():
                if name in fields and fields[name] not in allowed:
                    return f"{name}: {fields[name]}"
            if problem := self._move(needed, fields):
                return f"{path}: {problem}"
            self.got.append((method, path, fields))
            return ""
        return f"no {method} {path}"

    def _move(self, needed: str, fields: dict[str, Any]) -> str:
        allowed = {
            "fresh": {"untouched", "configured"},
            "untouched": {"untouched"},
            "paused": {"paused"},
            "booted": {"running", "paused"},
            "any": {"configured", "running"},
        }
        if self.state not in allowed[needed]:
            return f"not accepted when {self.state}"
        if needed == "fresh":
            self.state = "configured"
        elif needed == "untouched":
            self.state = "running" if fields["resume_vm"] else "paused"
        elif fields.get("action_type") == "InstanceStart":
            self.state = "running"
        elif "state" in fields:
            self.state = "paused" if fields["state"] == "Paused" else "running"
        return ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                assert length is not None
                method, path, _ = head.split(" ", 2)
                fault = self.take(method, path, await reader.readexactly(int(length[1])))
                if fault:
                    said = json.dumps({"fault_message": fault}).encode()
                    answer = f"HTTP/1.1 400 \r\nServer: Firecracker API\r\nContent-Length: {len(said)}\r\n\r\n"
                    writer.write(answer.encode() + said)
                else:
                    writer.write(b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
        except asyncio.IncompleteReadError:
            await hang_up(reader, writer)


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
        await firecracker.ask(deep / "one", firecracker.boot(VM, mac="02:00:00:00:00:01"))
        assert one.state == "running"
        await firecracker.ask(deep / "one", firecracker.save(SNAPSHOT))
        assert one.state == "paused"
    async with serving(deep / "two") as two:
        await firecracker.ask(deep / "two", firecracker.load(SNAPSHOT))
        assert two.state == "paused"  # until its record is written
        await firecracker.ask(deep / "two", firecracker.go_on())
        assert two.state == "running"


async def test_the_image_is_shared_and_the_machines_disk_is_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path / "fc") as there:
        await firecracker.ask(tmp_path / "fc", firecracker.boot(VM))
        drives = {body["drive_id"]: body for _, path, body in there.got if path.startswith("/drives/")}
    assert drives["image"]["is_read_only"]
    assert (drives["machine"]["is_read_only"], drives["machine"]["cache_type"]) == (False, "Writeback")
    assert there.got[-1][2] == {"action_type": "InstanceStart"}


async def test_what_is_refused_is_said_in_its_words_and_nothing_more_is_asked(tmp_path: Path) -> None:
    async with serving(tmp_path / "fc") as there:
        with pytest.raises(
            FirecrackerError, match="PUT /snapshot/create: /snapshot/create: not accepted when untouched"
        ):
            await firecracker.ask(tmp_path / "fc", [*firecracker.save(SNAPSHOT)[1:], *firecracker.boot(VM)])
        assert there.got == []
        with pytest.raises(FirecrackerError, match="no PUT /no-such-path"):
            await firecracker.ask(tmp_path / "fc", [Call("PUT", "/no-such-path", {})])


async def test_a_hypervisor_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(FirecrackerError, match="nobody listens at"):
        await firecracker.ask(tmp_path, firecracker.go_on())

    async with await asyncio.start_unix_server(hang_up, str(tmp_path / "api")):
        with pytest.raises(FirecrackerError, match="is gone"):
            await firecracker.ask(tmp_path, firecracker.go_on())


async def test_the_guest_is_reached_by_its_port(tmp_path: Path) -> None:
    """As docs/vsock.md has it: CONNECT and a port, OK and the host's, then the stream itself."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        if asked == b"CONNECT 1\n":
            writer.write(b"OK 1073741824\nhello")
        await hang_up(reader, writer)

    async with await asyncio.start_unix_server(connect, str(tmp_path / "vsock")):
        reader, writer = await firecracker.agent_stream(tmp_path)
        assert await reader.read() == b"hello"
        await hang_up(reader, writer)

    os.unlink(tmp_path / "vsock")
    async with await asyncio.start_unix_server(hang_up, str(tmp_path / "vsock")):
        with pytest.raises(FirecrackerError, match="does not listen on port 1"):
            await firecracker.agent_stream(tmp_path)


def test_the_jailer_makes_the_jail_and_becomes_the_hypervisor() -> None:
    jail = Jail(id="00000000000001-run1", base=Path("/var/lib/hawker/jails"), uid=901, gid=902)
    assert firecracker.jailed("/usr/bin/jailer", "/usr/bin/firecracker", jail) == [
        *("/usr/bin/jailer", "--id", "00000000000001-run1", "--exec-file", "/usr/bin/firecracker"),
        *("--uid", "901", "--gid", "902", "--chroot-base-dir", "/var/lib/hawker/jails", "--", "--api-sock", "/api"),
    ]
    assert jail.root == Path("/var/lib/hawker/jails/firecracker/00000000000001-run1/root")
    for bad in ("run/1", "", "a" * 65):
        with pytest.raises(ValueError, match="letters, digits and hyphens"):
            firecracker.jailed("j", "f", Jail(id=bad, base=Path("/"), uid=1, gid=1))
