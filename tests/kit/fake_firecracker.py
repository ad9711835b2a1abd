"""A stand-in for `firecracker` and `jailer`: `fake_firecracker.py firecracker|jailer ARGUMENTS`.

It serves Firecracker's API under the rules of `firecracker_api`, opens the files it is told of as their user, and
behind its vsock socket, with the handshake of docs/vsock.md, there is in the place of a guest a program of the host and
a little of what our init answers. Standard output is the guest's serial console. What it was asked is written to the
file `asked` in its working directory, a JSON array a line. $FAKE_VERSION is the version it says it has, $FAKE_REFUSES a
path that it refuses.

As a jailer it changes nothing but its directory and, once Python runs, its user: paths that begin with / are those of
the jail.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.firecracker_api import Published

from hawker.worker.drivers.microvm import frames

_kept: set[asyncio.Future[Any]] = set()
FILES = {
    "kernel_image_path": os.O_RDONLY,
    "initrd_path": os.O_RDONLY,
    "snapshot_path": os.O_RDONLY,
    "backend_path": os.O_RDONLY,
}


def inside(path: str) -> str:
    """In a jail / is the working directory."""
    return path.lstrip("/") if "FAKE_USER" in os.environ else path


class Guest:
    """Its init, and the program. `argv` is what was started in it."""

    def __init__(self) -> None:
        self.argv: list[str] = []
        self.status = -1
        self.program: asyncio.subprocess.Process | None = None
        self.writers: set[asyncio.StreamWriter] = set()

    async def run(self, argv: list[str]) -> None:
        self.argv = argv
        self.program = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stderr=1)
        _kept.add(asyncio.ensure_future(self.end(self.program)))

    async def end(self, program: asyncio.subprocess.Process) -> None:
        code = await program.wait()
        told = {"code": code} if code >= 0 else {"signal": -code}
        os.pwrite(self.status, json.dumps(told).encode() + b"\n", 0)
        os._exit(0)

    def signal(self, number: int) -> None:
        if self.program and self.program.returncode is None:
            self.program.send_signal(number)

    def drop_connections(self) -> None:
        for writer in self.writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        if asked != b"CONNECT 1\n":
            writer.close()
            return
        self.writers.add(writer)
        writer.write(b"OK 1073741824\n")
        decoder = frames.Decoder()
        while data := await reader.read(65536):
            for kind, number, payload in decoder.feed(data):
                for answer in await self.answers(kind, payload):
                    writer.write(frames.encode(answer[0], number, answer[1]))
        self.writers.discard(writer)
        writer.close()

    async def answers(self, kind: str, payload: bytes) -> list[tuple[str, bytes]]:
        fields = frames.read_fields(payload) if kind in "sxg" else []
        pairs = list(zip(fields[::2], fields[1::2], strict=False))
        argv = [value.decode() for name, value in pairs if name == b"argument"]
        if kind == "h":
            return [("r", b"running" if self.argv else b"idle")]
        if kind == "s":
            await self.run(argv)
            return [("r", b"running")]
        if kind == "g":
            self.signal(int(fields[0]))
        if kind == "q":
            return [("r", b"cpu_us 1500000\nmemory 4096\nprocesses 1\n")]
        if kind == "x":
            done = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            said, _ = await done.communicate()
            return [("r", b""), ("o", said), ("w", frames.fields(["code", done.returncode or 0]))]
        return [("r", b"")] if kind in "gn" else []


class Fake(Published):
    def __init__(self) -> None:
        super().__init__()
        self.version = os.environ.get("FAKE_VERSION", self.version)
        self.guest = Guest()
        self.config: dict[str, Any] = {}

    def accepted(self, path: str, fields: dict[str, Any]) -> str:
        with open("asked", "a") as file:
            print(json.dumps([path, fields]), file=file)
        if path == os.environ.get("FAKE_REFUSES"):
            return "no such luck"
        try:
            self.do(path, fields)
        except OSError as error:
            return str(error)
        return ""

    def do(self, path: str, fields: dict[str, Any]) -> None:
        flat = {**fields, **fields.get("mem_backend", {})}
        for name, flags in FILES.items():
            if name in flat and path != "/snapshot/create":
                os.close(os.open(inside(flat[name]), flags))
        if path.startswith("/drives/"):
            self.drive(fields)
        elif path == "/vsock":
            self.listen(fields)
        elif path == "/vm":
            self.guest.signal(signal.SIGSTOP if fields["state"] == "Paused" else signal.SIGCONT)
        elif path == "/snapshot/create":
            Path(inside(fields["snapshot_path"])).write_text(json.dumps([self.config, self.guest.argv]))
            Path(inside(fields["mem_file_path"])).write_text("the guest's memory")
            self.guest.drop_connections()
        elif path == "/snapshot/load":
            self.config, argv = json.loads(Path(inside(fields["snapshot_path"])).read_text())
            for name, kept in self.config.items():
                self.drive(kept) if name != "vsock" else self.listen(kept)
            _kept.add(asyncio.ensure_future(self.guest.run(argv)))

    def drive(self, fields: dict[str, Any]) -> None:
        fd = os.open(inside(fields["path_on_host"]), os.O_RDONLY if fields["is_read_only"] else os.O_RDWR)
        self.config[fields["drive_id"]] = fields
        if os.fstat(fd).st_size == 4096:  # as our init knows it
            self.guest.status = fd

    def listen(self, fields: dict[str, Any]) -> None:
        self.config["vsock"] = fields
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(inside(fields["uds_path"]))
        _kept.add(asyncio.ensure_future(asyncio.start_unix_server(self.guest.serve, sock=sock)))


async def serve(path: str) -> None:
    async with await asyncio.start_unix_server(Fake().serve, path) as server:
        await server.serve_forever()


def jailer(argv: list[str]) -> None:
    own, rest = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    told = dict(zip(own[::2], own[1::2], strict=True))
    program = told["--exec-file"]
    assert set(told) == {"--id", "--exec-file", "--uid", "--gid", "--chroot-base-dir"}
    assert "firecracker" in Path(program).name
    root = Path(told["--chroot-base-dir"]) / Path(program).name / told["--id"] / "root"
    root.mkdir(parents=True, exist_ok=True)
    (root / Path(program).name).touch(exist_ok=False)  # as it refuses a jail that was used before
    os.chdir(root)
    user = {"FAKE_USER": told["--uid"], "FAKE_GROUP": told["--gid"]}
    os.execve(program, [program, "--id", told["--id"], *rest], {**os.environ, **user})


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "jailer":
        jailer(arguments)
    else:
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert set(given) <= {"--id", "--api-sock", "--level"}, given
        if "FAKE_USER" in os.environ:
            os.setgroups([])
            os.setgid(int(os.environ["FAKE_GROUP"]))
            os.setuid(int(os.environ["FAKE_USER"]))
        asyncio.run(serve(inside(given["--api-sock"])))
