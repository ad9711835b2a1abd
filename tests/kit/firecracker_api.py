"""Firecracker's API as `src/firecracker/swagger/firecracker.yaml` describes it, as far as we use it: what a request
must look like, and in which state of the machine it is accepted. Read at 1.17."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec


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


class Bucket(Body):
    size: int
    refill_time: int
    one_time_burst: int = 0


class Limiter(Body):
    bandwidth: Bucket | None = None
    ops: Bucket | None = None


class Drive(Body):
    drive_id: str
    is_root_device: bool
    is_read_only: bool  # required for virtio-block
    path_on_host: str
    cache_type: str = "Unsafe"
    rate_limiter: Limiter | None = None


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
        self.version = "1.17.0"

    def tell(self, path: str) -> dict[str, str] | None:
        """What a GET is answered, None for a path that there is not."""
        if path == "/version":
            return {"firecracker_version": self.version}
        state = {"running": "Running", "paused": "Paused"}.get(self.state, "Not started")
        about = {"id": "anonymous-instance", "state": state, "vmm_version": self.version, "app_name": "Firecracker"}
        return about if path == "/" else None

    def accepted(self, path: str, fields: dict[str, Any]) -> str:
        """For whoever does what is asked: the fault it meets, "" for none."""
        return ""

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
            return self.accepted(path, fields)
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
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    said = json.dumps(self.tell(path) or {"fault_message": "no such path"}).encode()
                    writer.write(f"HTTP/1.1 200 \r\nContent-Length: {len(said)}\r\n\r\n".encode() + said)
                    continue
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                assert length is not None
                fault = self.take(method, path, await reader.readexactly(int(length[1])))
                if fault:
                    said = json.dumps({"fault_message": fault}).encode()
                    answer = f"HTTP/1.1 400 \r\nServer: Firecracker API\r\nContent-Length: {len(said)}\r\n\r\n"
                    writer.write(answer.encode() + said)
                else:
                    writer.write(b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n")
        except asyncio.IncompleteReadError:
            await hang_up(reader, writer)
