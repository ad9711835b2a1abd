"""The bare runtime for `bench.containers`: a process with mounts of its own that makes containers when it is asked to.

    python -m bench.bare_container RUNTIME

A request is a line of JSON (`Request`), the answer a line with times of CLOCK_MONOTONIC in ns. What is done is what has
to be done: an overlay, a pair of interfaces if there is to be a network, `create` and `start`, or `run`. Nothing is
recorded or supervised.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from hawker.network import netlink as nl
from hawker.supervisor import mounts

DEVICE = f"bench{os.getpid()}"
GATEWAY_MAC, MAC = "02:00:00:00:be:01", "02:00:00:00:be:02"
STATUS_FD, GO_FD = 3, 4
PR_SET_CHILD_SUBREAPER = 36


class Request(msgspec.Struct, frozen=True):
    """`directory` is the bundle's, to be made; `config` has it as `@directory@`. `how`: `create` (and start) or
    `run`. `address`: of a network with the fewest calls, "" for none."""

    directory: str
    config: str
    layers: list[str]
    ids: int | None
    init: str
    files: list[str]
    how: str = "create"
    address: str = ""


class Bare:
    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        mounts.private_namespace()
        self._netlink = nl.Socket()

    def start(self, ask: Request) -> dict[str, int]:
        """`began` and `created`, when it was ready to be started."""
        began = monotonic_ns()
        directory = ask.directory
        ids = mounts.IdMap(ask.ids) if ask.ids is not None else None
        for name in ("rootfs", "files", "state"):
            os.makedirs(f"{directory}/{name}", mode=0o711)
        for number, content in enumerate(ask.files):
            Path(f"{directory}/files/{number}").write_text(content)
            os.chown(f"{directory}/files/{number}", ids.base if ids else 0, -1)
        if ids:
            Path(f"{directory}/init").touch()
            mounts.bind(ask.init, f"{directory}/init", read_only=True)
        Path(f"{directory}/config.json").write_text(ask.config)
        mounts.mount_overlay(
            ask.layers, f"{directory}/upper", f"{directory}/work", f"{directory}/rootfs", ids=ids, volatile=True
        )
        go, let_go = os.pipe()
        os.write(let_go, b"g")
        output = os.open(f"{directory}/out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        status = os.open(f"{directory}/status", os.O_WRONLY | os.O_CREAT)
        ends = {1: output, 2: output, STATUS_FD: status, GO_FD: go}
        detached = ["run", "--detach"] if ask.how == "run" else ["create"]
        more = ["--bundle", directory, "--pid-file", f"{directory}/pid", "--preserve-fds", "2", "c"]
        self._call(directory, [*detached, *more], ends)
        created = monotonic_ns()
        if ask.address:
            self._connect(int(Path(f"{directory}/pid").read_text()), ask.address)
        connected = monotonic_ns()
        if ask.how == "create":
            self._call(directory, ["start", "c"], {})
        for fd in (go, let_go, output, status):
            os.close(fd)
        mounts.unmount(f"{directory}/rootfs")
        return {"began": began, "created": created, "connected": connected, "started": monotonic_ns()}

    def exec(self, directory: str, argv: Sequence[str]) -> dict[str, int]:
        began = monotonic_ns()
        self._call(directory, ["exec", "c", *argv], {})
        return {"began": began, "ended": monotonic_ns()}

    def end(self, directory: str) -> dict[str, int]:
        """SIGTERM until it is gone, then all of it removed."""
        pid = int(Path(f"{directory}/pid").read_text())
        began = monotonic_ns()
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        stopped = monotonic_ns()
        self._call(directory, ["delete", "c"], {})
        if os.path.exists(f"{directory}/init"):
            mounts.unmount(f"{directory}/init")
        shutil.rmtree(directory)
        return {"began": began, "stopped": stopped, "ended": monotonic_ns()}

    def _call(self, directory: str, words: Sequence[str], ends: dict[int, int]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        numbers = {0: null, 1: null, 2: null} | ends
        high = {number: os.dup2(fd, 30 + number, inheritable=False) for number, fd in numbers.items()}
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in high.items()]
        argv = [self._runtime, "--root", f"{directory}/state", *words]
        try:
            pid = os.posix_spawn(argv[0], argv, {"PATH": os.defpath}, file_actions=actions, setsid=True)
        finally:
            for fd in (*high.values(), null):
                os.close(fd)
        _, status = os.waitpid(pid, 0)
        if status:
            said = Path(f"{directory}/out").read_text()
            raise RuntimeError(f"{argv} ended with {os.waitstatus_to_exitcode(status)}: {said}")

    def _connect(self, pid: int, address: str) -> None:
        """A pair, both ends up, an address, a way there and a way back."""
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            made = nl.veth(DEVICE, GATEWAY_MAC, "eth0", MAC, namespace, 1500)
            self._netlink.tell(nl.NEWLINK, nl.CREATE | nl.EXCL, made)
            with closing(nl.Socket(namespace)) as inside:
                index = inside.index("eth0")
                inside.tell(nl.SETLINK, 0, nl.link(index=index, flags=nl.IFF_UP, change=nl.IFF_UP))
                six = nl.family(address)
                new = nl.CREATE | nl.EXCL
                its = nl.address(family=six, prefixlen=128, index=index, ADDRESS=address, FLAGS=nl.IFA_F_NODAD)
                inside.tell(nl.NEWADDR, new, its)
                inside.tell(nl.NEWROUTE, new, nl.route(family=six, table=254, proto=4, type=1, OIF=index))
            host = self._netlink.index(DEVICE)
            self._netlink.tell(nl.SETLINK, 0, nl.link(index=host, flags=nl.IFF_UP, change=nl.IFF_UP))
            back = nl.route(family=six, table=254, proto=4, type=1, dst_len=128, DST=address, OIF=host)
            self._netlink.tell(nl.NEWROUTE, new, back)
        finally:
            os.close(namespace)


def main(runtime: str) -> None:
    bare = Bare(runtime)
    calls: dict[str, Any] = {"exec": bare.exec, "end": bare.end}
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            answer = bare.start(msgspec.convert(asked["start"], Request))
        else:
            ((name, arguments),) = asked.items()
            answer = calls[name](*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
