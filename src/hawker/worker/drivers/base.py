"""The contract of a driver: the life of an instance in order, and what a driver may leave out.

An *instance* is one run of a machine's program. It is named by its *key*, `<run id>/<step>`, the name of the outside
effect that started it: asking twice for the same key gives the same instance. A driver keeps what it needs to find its
instances again by that key, so that a worker daemon can be killed and upgraded while machines run on.

The order of a life: `start` → (`signal`, `exec`, `stats`, `suspend`, `resume`)* → `stop` or an exit of its own →
`destroy`, which removes every leftover. The exit record of an instance stays readable until `destroy`.

Every driver passes the conformance suite in `tests/live/conformance/`. Third parties register drivers under
the entry point group `hawker.drivers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this driver can do on this host. A call outside them is refused by name, never ignored."""

    suspend: bool = False
    exec: bool = False
    limits: bool = False  # cpu, memory and process limits are enforced by the kernel
    images: bool = False  # runs OCI images; False: runs the host's own programs
    terminal: bool = False  # `terminal` works
    resize: bool = False  # `resize` works while the program runs
    network: bool = False  # gives machines their own address


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver found on this host. `healthy` False keeps the worker from offering it; `problem` says why."""

    driver: str
    healthy: bool
    problem: str = ""
    capabilities: Capabilities = Capabilities()
    attributes: dict[str, str] = {}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel limits of one instance. `cpu_millis` 1000 is one cpu; `dedicated` caps at it, shared only weighs by it.
    `disk_bytes` and `disk_operations` may be read a second, and again as much written; 0 is without bound."""

    cpu_millis: int
    memory_mib: int
    dedicated: bool = False
    pids: int = 4096
    disk_bytes: int = 0
    disk_operations: int = 0


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file written into the machine before its program starts. `path` is absolute, `mode` permission bits."""

    path: str
    content: bytes
    mode: int = 0o644


class Tmpfs(msgspec.Struct, frozen=True, kw_only=True):
    """A file system in memory inside the machine; it counts towards the memory limit."""

    path: str
    size_mib: int


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of the host inside the machine."""

    source: str
    path: str
    read_only: bool = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's own root file system over its image. `persist` keeps what was written from one start to the next;
    without it each start finds the image as it is. `size_mib` bounds what can be written, 0 does not."""

    size_mib: int = 0
    read_only: bool = False
    persist: bool = False


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the machine that others reach on a port of the worker's host."""

    protocol: Literal["tcp", "udp"]
    internal_port: int
    host_port: int


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's place in its app's private network. `number` names that network; `address` is the machine's IPv6
    address in it (`fdaa:` and so on, of length 128)."""

    number: int
    address: str
    publish: Sequence[Publish] = ()


class Dns(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into the machine's resolv.conf. Without name servers: the worker's own resolver."""

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
    listens: Sequence[Publish] = ()
    note: Mapping[str, Any] = {}  # kept with the instance, for whoever has lost the rest


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance ended. All of `code`, `signal` None: it is gone and nobody saw how (`error` says why)."""

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
    """What a command run inside an instance gave back. Output is cut at `MAX_EXEC_OUTPUT` bytes each, which `truncated`
    says; of one that was killed at its time-out it is what came until then."""

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
        """To its standard input. Returns once it was taken; what comes after its end is dropped."""

    async def end_input(self) -> None:
        """No more input will come."""

    async def resize(self, columns: int, rows: int) -> None: ...

    async def wait(self) -> tuple[int, int | None]:
        """(exit code, signal) as `ExecResult` has them."""

    async def close(self) -> None:
        """Kill it if it runs, and forget it. May be repeated."""


class Driver(Protocol):
    """Runs instances. Every method may be called again after a crash and must give the same end state.

    `open` takes hold of what still runs and starts what the driver needs of its own; `close` lets go and leaves
    instances running. `stop_all` is for a host that shuts down.
    """

    name: str

    async def open(self, on_exit: Callable[[Exit], None]) -> None:
        """Connect, recover, and from now on call `on_exit` once for every instance that ends, also for those that
        ended while nobody was looking. Calls for one key may repeat after a crash."""

    async def close(self) -> None: ...

    async def fingerprint(self) -> Fingerprint: ...

    async def prepare(self, image: str) -> None:
        """Make an image ready to be started from at once: fetched, unpacked, and in the form this driver runs.
        Repeating is cheap.

        Raises `errors.ImageError` when it cannot be had (final), `errors.Unreachable` when it may be had later.
        """

    async def start(self, spec: InstanceSpec) -> Instance:
        """Start the program, preparing its image first where it is not. The same key again: the instance that is there,
        running or ended.

        Raises `StartFailed` when the program cannot be started, and what `prepare` raises; nothing is left behind then.
        """

    async def recover(self) -> Sequence[Instance]:
        """Every instance that has not been destroyed, running or ended."""

    async def inspect(self, key: str) -> Instance:
        """Raises `UnknownInstance`."""

    async def wait(self, key: str) -> Exit:
        """Return when it has ended; at once if it already has. Raises `UnknownInstance`."""

    async def stop(self, key: str, *, signal: int, grace_s: float) -> Exit:
        """Signal the main process, wait up to `grace_s`, then kill the whole tree. Returns when all of it is gone.

        A suspended instance is killed without a grace time. Raises `UnknownInstance`.
        """

    async def destroy(self, key: str, *, force: bool = False) -> None:
        """Remove every leftover of the instance but the machine's log and directory. Unknown key: success.

        Raises `InstanceRunning` when it still runs and `force` is False; with `force` kills it first.
        """

    async def purge(self, machine: str) -> None:
        """Remove the machine's working directory, and its log files but for their end. Unknown machine: success."""

    async def signal(self, key: str, signal: int) -> None:
        """Deliver to the main process. Raises `UnknownInstance`; an ended instance: `UnknownInstance` too."""

    async def suspend(self, key: str) -> None:
        """Freeze the whole tree, memory kept. Raises `NotSupported`, `UnknownInstance`. Repeating is harmless."""

    async def resume(self, key: str) -> None: ...

    async def exec(
        self,
        key: str,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> ExecResult:
        """Run a command beside the program: same environment, directory and limits. Killed, tree and all, at the
        time-out. Raises `UnknownInstance`, `StartFailed`."""

    async def terminal(
        self,
        key: str,
        argv: Sequence[str],
        *,
        tty: bool,
        env: Mapping[str, str] | None = None,
        columns: int = 80,
        rows: int = 24,
    ) -> Terminal:
        """Run a command beside the program and talk to it while it runs, with a terminal of its own if `tty`. Raises
        `NotSupported`, `UnknownInstance`, `StartFailed`."""

    async def resize(self, key: str, limits: Limits) -> None:
        """Change the limits of a running instance. Raises `NotSupported`, `Refused`, `UnknownInstance`."""

    async def stats(self, key: str) -> Stats: ...

    async def processes(self, key: str) -> Sequence[Process]: ...

    def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        """The last `tail` lines the machine's instances wrote, oldest first; then, with `follow`, new ones as they
        come until the caller stops iterating. The last ones can be read for an hour after the machine was purged."""

    async def stop_all(self, *, grace_s: float) -> None:
        """Stop every instance and everything the driver started of its own. Exits stay recorded for `recover`."""
