"""Firecracker: what it is asked over its API socket, and how its jailer is started.

The API is HTTP/1.1 on a unix socket, described by `src/firecracker/swagger/firecracker.yaml` of Firecracker (read at
1.17). Kernel, initial file system and disks are those that QEMU gets. Firecracker has no virtio ports: the guest's init
is reached through its vsock device, where a host connects to a unix socket and says which port it wants.

A kernel that finds its devices by ACPI, as Debian's does, needs Firecracker 1.8 or newer; older ones are refused.
Nothing here has run a guest, for want of a processor that does. What it is asked is held against its published
description. `firecracker` is what the driver does with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from hawker.worker.drivers.microvm.qemu import MARGIN_S, HypervisorError, Vm

BINARY, JAILER = "firecracker", "jailer"
GUEST_CID = 3  # the first that a guest may have; it means something to this one hypervisor only
AGENT_PORT = 1
OLDEST = (1, 8)  # with ACPI
PROBE_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20


class FirecrackerError(HypervisorError):
    """What Firecracker refused, in its words, or that it is gone."""


class Call(msgspec.Struct, frozen=True):
    """One request."""

    method: Literal["GET", "PUT", "PATCH"]
    path: str
    body: Mapping[str, Any] | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a snapshot, as Firecracker sees them. Those of its disks are remembered in it by their paths."""

    state: str
    memory: str


class Jail(msgspec.Struct, frozen=True, kw_only=True):
    """Where Firecracker runs: in `base/<program>/<id>/root`, as another user. What it opens must be in there, linked or
    copied, and that user's. `program` is the last part of its path, behind symbolic links."""

    id: str
    base: Path
    uid: int
    gid: int
    program: str = BINARY

    @property
    def root(self) -> Path:
        return self.base / self.program / self.id / "root"


def boot(vm: Vm, *, mac: str = "", vsock: str = "vsock") -> list[Call]:
    """What makes a fresh Firecracker boot this machine, in order. Files are in its working directory, by these names;
    `status` is the last drive."""
    calls = [
        Call("PUT", "/machine-config", {"vcpu_count": vm.cpus, "mem_size_mib": vm.memory_mib, "smt": False}),
        Call(
            "PUT",
            "/boot-source",
            {
                "kernel_image_path": "kernel",
                "initrd_path": "initrd",
                "boot_args": "quiet loglevel=0 reboot=k panic=-1 pci=off nokaslr audit=0 lsm= 8250.nr_uarts=1 "
                "hawker.console=serial hawker.agent=vsock rdinit=/init",
            },
        ),
        _drive("image", read_only=True, limiter=_limiter(vm)),
        _drive("machine", read_only=False, limiter=_limiter(vm)),
        _drive("status", read_only=False),
    ]
    if vm.tap:
        card = {"iface_id": "eth0", "host_dev_name": vm.tap, **({"guest_mac": mac} if mac else {})}
        calls.append(Call("PUT", "/network-interfaces/eth0", card))
    calls.append(Call("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": vsock}))
    calls.append(Call("PUT", "/entropy", {}))
    calls.append(Call("PUT", "/actions", {"action_type": "InstanceStart"}))
    return calls


def save(snapshot: Snapshot) -> list[Call]:
    """Halt the machine and write all of it."""
    return [
        Call("PATCH", "/vm", {"state": "Paused"}),
        Call(
            "PUT",
            "/snapshot/create",
            {"snapshot_type": "Full", "snapshot_path": snapshot.state, "mem_file_path": snapshot.memory},
        ),
    ]


def load(snapshot: Snapshot) -> list[Call]:
    """The other way round, into a fresh Firecracker. The machine stands still until `go_on`: its record is written
    first."""
    backend = {"backend_type": "File", "backend_path": snapshot.memory}
    body = {"snapshot_path": snapshot.state, "mem_backend": backend, "resume_vm": False}
    return [Call("PUT", "/snapshot/load", body)]


def go_on() -> list[Call]:
    return [Call("PATCH", "/vm", {"state": "Resumed"})]


def _limiter(vm: Vm) -> dict[str, Any] | None:
    """The limits of one drive, for reading and writing together (`RateLimiter` of the API): buckets that fill in a
    second, and a margin to boot from."""
    most = {"bandwidth": vm.disk_bytes, "ops": vm.disk_operations}
    buckets = {
        kind: {"size": number, "one_time_burst": number * MARGIN_S, "refill_time": 1000}
        for kind, number in most.items()
        if number
    }
    return buckets or None


def _drive(name: str, *, read_only: bool, limiter: dict[str, Any] | None = None) -> Call:
    body = {
        "drive_id": name,
        "path_on_host": name,
        "is_root_device": False,
        "is_read_only": read_only,
        "cache_type": "Unsafe" if read_only else "Writeback",
        **({"rate_limiter": limiter} if limiter else {}),
    }
    return Call("PUT", f"/drives/{name}", body)


def jailed(jailer: str, firecracker: str, jail: Jail, socket: str = "api") -> list[str]:
    """The jailer's command line. It makes the jail, becomes the user, and turns into Firecracker: the process stays
    the one that the supervisor started, in the control group that it made."""
    if not jail.id.replace("-", "").isalnum() or len(jail.id) > 64:
        raise ValueError(f"a jail's id has letters, digits and hyphens, 64 at most, not {jail.id!r}")
    return [
        jailer,
        *("--id", jail.id),
        *("--exec-file", firecracker),
        *("--uid", str(jail.uid), "--gid", str(jail.gid)),
        *("--chroot-base-dir", str(jail.base)),
        *("--", "--api-sock", f"/{socket}"),
    ]


def binaries() -> tuple[str, str]:
    """Paths of Firecracker and of its jailer, each "" where it is not here or, the jailer, would not work for us."""
    found = shutil.which(BINARY), shutil.which(JAILER) if os.geteuid() == 0 else None
    firecracker, jailer = (os.path.realpath(path) if path else "" for path in found)
    return firecracker, jailer


class _Local(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PROBE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(PROBE_S)
        self.sock.connect(self._path)


def too_old(binary: str) -> str:
    """Why this Firecracker cannot run our guests, "" when it can. It is started and asked."""
    with tempfile.TemporaryDirectory(prefix="hawker-") as there:
        argv = [binary, "--api-sock", "api", "--level", "Error"]
        quiet = subprocess.DEVNULL
        child = subprocess.Popen(argv, cwd=there, stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            version = _version(child, f"{there}/api")
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            return f"{binary} does not tell its version: {error}"
        finally:
            child.kill()
            child.wait()
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        return f"{binary} is of version {version}: guests need {OLDEST[0]}.{OLDEST[1]} or newer, which has ACPI"
    return ""


def _version(child: subprocess.Popen[bytes], path: str) -> str:
    until_s = time.monotonic() + PROBE_S
    while True:
        connection = _Local(path)
        try:
            connection.request("GET", "/version")
            said = msgspec.json.decode(connection.getresponse().read(_ANSWER_BYTES_MAX))
            return str(said["firecracker_version"]) if isinstance(said, dict) else ""
        except (FileNotFoundError, ConnectionRefusedError):
            if child.poll() is not None or time.monotonic() > until_s:
                raise
            time.sleep(0.005)
        finally:
            connection.close()


async def ask(directory: Path, calls: Sequence[Call], socket: str = "api") -> None:
    """Make calls, one after the other, over the socket in a directory. Raises `FirecrackerError` at the first that is
    refused, with what was said."""
    await _asked(directory, calls, socket)


async def state(directory: Path) -> str:
    """The state of its machine: "Not started", "Running" or "Paused"."""
    found = msgspec.json.decode(await _asked(directory, [Call("GET", "/")], "api"))
    return str(found.get("state", "")) if isinstance(found, dict) else ""


async def listens(directory: Path) -> bool:
    """Whether it serves its API already."""
    try:
        _, writer = await _connect(directory, "api")
    except FirecrackerError:
        return False
    await _close(writer)
    return True


async def _asked(directory: Path, calls: Sequence[Call], socket: str) -> bytes:
    """What was said to the last call."""
    said = b""
    reader, writer = await _connect(directory, socket)
    try:
        for call in calls:
            body = b"" if call.body is None else msgspec.json.encode(call.body)
            head = f"{call.method} {call.path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            status, said = await _answer(reader)
            if not 200 <= status < 300:
                raise FirecrackerError(f"{call.method} {call.path}: {_fault(said) or status}")
        return said
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        raise FirecrackerError("Firecracker is gone") from error
    finally:
        await _close(writer)


async def _connect(directory: Path, socket: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:  # by way of the descriptor: the path may be longer than the 108 bytes a socket's name takes
        return await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/{socket}")
    except OSError as error:
        raise FirecrackerError(f"nobody listens at {directory / socket}: {error.strerror}") from error
    finally:
        os.close(fd)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    if length > _ANSWER_BYTES_MAX:
        raise FirecrackerError(f"an answer of {length} bytes")
    return int(status_line.split()[1]), await reader.readexactly(length)


def _fault(said: bytes) -> str:
    try:
        found = msgspec.json.decode(said)
    except msgspec.DecodeError:
        return ""
    return str(found.get("fault_message", "")) if isinstance(found, dict) else ""
