"""What drivers take and give: an instance's specification, what is told of one, and the errors of a driver's calls.

`hawker.worker.drivers.driver` has the calls themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from hawker.model.fingerprint import Capabilities as Capabilities
from hawker.model.fingerprint import Fingerprint as Fingerprint
from hawker.model.inside import File as File
from hawker.model.inside import Tmpfs as Tmpfs
from hawker.model.services import Port as Port
from hawker.supervisor.calls import Limits as Limits
from hawker.supervisor.calls import Mount as Mount


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's own root file system over its image. `persist` keeps what was written from one start to the next;
    without it each start finds the image as it is. `size_mib` bounds what can be written, 0 does not."""

    size_mib: int = 0
    read_only: bool = False
    persist: bool = False


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's place in its app's private network. `number` names that network; `address` is the machine's IPv6
    address in it (`fdaa:` and so on, of length 128)."""

    number: int
    address: str
    publish: Sequence[Port] = ()


class Dns(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the machine's resolv.conf. Without name servers here, the machine asks the worker's own
    resolver."""

    nameservers: Sequence[str] = ()
    searches: Sequence[str] = ()
    options: Sequence[str] = ()


TERMINAL = (80, 24)
"""Columns and rows of a program's own terminal."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a driver needs to start an instance, and to know it again.

    `argv` is the whole command line. Where it is empty, `entrypoint` and `cmd` make it, as Docker joins them: an empty
    `entrypoint` is the image's, an empty `cmd` the image's, but not when `entrypoint` was given. `env` goes over the
    image's. `user` is `name|uid[:group|gid]`, looked up in the image; empty: the image's. Without `network` the machine
    has a loopback of its own and nothing else, or, run by the `process` driver, the host's. `driver` names the one that
    is to run it, where a worker has several. With `tty` the program's standard streams are a terminal of its own, of
    the size `TERMINAL`, that nobody types at; what it shows is logged as "stdout". `listens` are ports of the host that
    the program itself is to listen on, of one without a network of its own: whoever else has them would be taken for
    it.
    """

    key: str
    machine: str
    image: str
    driver: str = "process"
    argv: Sequence[str] = ()
    env: Mapping[str, str]
    limits: Limits
    entrypoint: Sequence[str] = ()
    cmd: Sequence[str] = ()
    user: str = ""
    hostname: str = ""
    tty: bool = False
    root: Root = Root()
    files: Sequence[File] = ()
    tmpfs: Sequence[Tmpfs] = ()
    mounts: Sequence[Mount] = ()
    network: Network | None = None
    dns: Dns = Dns()
    listens: Sequence[Port] = ()
    note: Mapping[str, Any] = {}  # kept with the instance, for whoever has lost the rest


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance ended. With both `code` and `signal` None, the instance is gone and nobody saw how it ended
    (`error` says why)."""

    key: str
    machine: str
    code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    error: str = ""
    at_ms: int = 0

    @property
    def status(self) -> int:
        """The shell's convention: the exit code, 128 + signal, or -1 when nobody saw it."""
        if self.code is not None:
            return self.code
        return 128 + self.signal if self.signal is not None else -1


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A driver's view of one instance. `exit` is set once it has ended. `note` is its specification's, where the driver
    keeps one."""

    key: str
    machine: str
    pid: int | None
    started_at_ms: int
    suspended: bool = False
    exit: Exit | None = None
    note: Mapping[str, Any] = {}


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one instance: cumulative cpu seconds, resident bytes, live processes."""

    cpu_s: float
    memory_bytes: int
    processes: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One live process of an instance, as `ps` shows it."""

    pid: int
    ppid: int
    started_at_ms: int
    cpu_s: float
    rss_bytes: int
    directory: str
    command: str
    listen: Sequence[tuple[str, str]] = ()  # (protocol, "address:port")


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command run inside an instance gave back. Each output is cut at `MAX_EXEC_OUTPUT` bytes, and `truncated`
    says so. A command that was killed at its time-out keeps what it had written until then."""

    code: int
    signal: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line that the program wrote. `stream` is "stdout" or "stderr"; `instance` the key that wrote it."""

    at_ms: int
    stream: str
    text: str
    instance: str = ""


MAX_EXEC_OUTPUT = 1 << 20


class UnknownInstance(Exception):
    """No instance of this key is known to the driver: never started, or destroyed."""


class InstanceRunning(Exception):
    """`destroy` without `force` on an instance that still runs."""


class NotSupported(Exception):
    """The driver's capabilities leave this out."""


class Refused(Exception):
    """The driver could do this, but not now: e.g. a memory limit below what is in use. Nothing was changed."""


class StartFailed(Exception):
    """The program could not be started: not found, not executable, a limit the kernel refused. Final, not retried."""


class Terminal(Protocol):
    """A command that somebody talks to. It is killed by `close`, and when the daemon that holds it ends."""

    async def read(self) -> tuple[Literal["stdout", "stderr"], bytes] | None:
        """What it wrote next, some KiB at most; None once it has ended and all was read. With a terminal everything is
        "stdout"."""

    async def write(self, data: bytes) -> None:
        """Write to its standard input. Returns once the data was taken; data for a command that has ended is
        dropped."""

    async def end_input(self) -> None:
        """No more input will come."""

    async def resize(self, columns: int, rows: int) -> None: ...

    async def wait(self) -> tuple[int, int | None]:
        """(exit code, signal) as `ExecResult` has them."""

    async def close(self) -> None:
        """Kill it if it runs, and forget it. May be repeated."""
