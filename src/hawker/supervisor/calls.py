"""The calls that a supervisor takes: each is declared here once, as the struct of its request, and both sides use it.

On the wire a request is a JSON object on a line, `{"id", "op", ...}`, with the fields of its struct beside these two.
The supervisor leaves out fields of a newer daemon's request that it does not know; `hawker.supervisor.protocol`
says which requests a daemon does not send to an older one. A supervisor imports nothing but the standard library, so
the structs are dataclasses, and replies are plain JSON that the daemon checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

_OPERATIONS_A_WEIGHT = 40  # of the disk: the smallest machine has the kernel's own default, 100


# --- parts of requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Kernel limits of one instance. `cpu_millis` 1000 is one cpu; a dedicated cpu is a cap, a shared one only a
    weight. `disk_bytes` and `disk_operations` may be read a second, and as much again written; 0 is without bound."""

    cpu_millis: int
    memory_mib: int
    dedicated: bool = False
    pids: int = 4096
    disk_bytes: int = 0
    disk_operations: int = 0

    @property
    def disk_weight(self) -> int:
        """A machine's part of a disk that many want, 1 to 1000."""
        return min(1000, max(1, self.disk_operations // _OPERATIONS_A_WEIGHT))


@dataclass(frozen=True, kw_only=True)
class Confined:
    """What a confined program sees and gets. `user` is the number of its user and of its group. `shown` are files and
    directories that it sees under the names that they have here, and `own` those that it may write to if their modes
    let it. `devices` become its own. `sockets` are names in its directory, `tap` is that of a network interface, "" for
    none."""

    user: int | None = None
    shown: Sequence[str] = ()
    own: Sequence[str] = ()
    devices: Sequence[str] = ()
    sockets: Sequence[str] = ()
    tap: str = ""


@dataclass(frozen=True, kw_only=True)
class RootLayer:
    """The machine's own layer over its image. `size_mib` 0 is without bound."""

    persist: bool = False
    size_mib: int = 0


@dataclass(frozen=True, kw_only=True)
class NamedFile:
    """A file in a container's bundle. `content` is base64."""

    name: str
    content: str
    mode: int
    owner: int


@dataclass(frozen=True, kw_only=True)
class FileAt:
    """A file in a machine's tree. `content` is base64."""

    path: str
    content: str
    mode: int


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A directory of the host inside the machine."""

    source: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class TmpfsAt:
    path: str
    size_mib: int


@dataclass(frozen=True, kw_only=True)
class _OfInstance:
    key: str


@dataclass(frozen=True, kw_only=True)
class _OfMachine:
    machine: str


# --- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Reply: the supervisor's pid, protocol and features, and its instances."""

    op: ClassVar[str] = "hello"


@dataclass(frozen=True)
class ListInstances:
    """Reply: every instance that has not been destroyed."""

    op: ClassVar[str] = "list"


@dataclass(frozen=True, kw_only=True)
class ShutDown:
    """Stop every instance, reply, and end."""

    op: ClassVar[str] = "shutdown"
    grace_s: float


# --- starting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start a program of the host. Reply: the instance, also when it was started before.

    The program runs in its machine's working directory unless `cwd` says where, as a user of its machine's own among
    those from `users` on. With `status`, `{status}` in its arguments becomes the number of the descriptor that it tells
    its end by.
    """

    op: ClassVar[str] = "start"
    key: str
    machine: str
    argv: Sequence[str]
    env: Mapping[str, str]
    limits: Limits
    cwd: str = ""
    users: int | None = None
    status: bool = False
    confined: Confined | None = None
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KeepStandby:
    """Keep standby processes ready as long as this connection is open. `program` is the file that they run. No
    reply."""

    op: ClassVar[str] = "standby"
    program: str


@dataclass(frozen=True, kw_only=True)
class Prespawn:
    """Make the process for a start that will be asked for. It leaves nothing when the start does not come. No reply."""

    op: ClassVar[str] = "prespawn"
    standby: str
    start: Start


@dataclass(frozen=True, kw_only=True)
class MakeContainer:
    """Have a runtime make a container that waits in front of its program. Reply: `{"pid"}` of its first process, or
    `{"instance"}` where its program runs already.

    `config` is the runtime's configuration; `ids` the first of the host's users that the container's are.
    """

    op: ClassVar[str] = "make"
    key: str
    machine: str
    runtime: str
    init: str
    config: str
    layers: Sequence[str]
    root: RootLayer
    ids: int | None
    mounts: Sequence[tuple[str, bool]]
    files: Sequence[NamedFile]
    owner: int
    limits: Limits
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MakeTree:
    """Make an image's tree with our init in it, which waits in front of the program. Reply: as to `MakeContainer`.

    `users` is the first of the host's users that the image's are, `user` who the program runs as inside.
    """

    op: ClassVar[str] = "make"
    kind: str = "tree"
    key: str
    machine: str
    init: str
    options: Sequence[str]
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    user: str
    owner: int
    layers: Sequence[str]
    root: RootLayer
    read_only: bool
    users: int
    mounts: Sequence[Mount]
    tmpfs: Sequence[TmpfsAt]
    files: Sequence[FileAt]
    limits: Limits
    note: Mapping[str, Any] = field(default_factory=dict)


class ReleaseContainer(_OfInstance):
    """Let the program of a container that was made start. Reply: the instance."""

    op: ClassVar[str] = "go"


class DiscardContainer(_OfInstance):
    """Remove a container whose program was not released."""

    op: ClassVar[str] = "unmake"


# --- one instance ----------------------------------------------------------------------------------------------------


class Inspect(_OfInstance):
    """Reply: the instance."""

    op: ClassVar[str] = "inspect"


class Wait(_OfInstance):
    """Reply, once it has ended: its exit."""

    op: ClassVar[str] = "wait"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Signal the program, and kill its tree after `grace_s`. Reply, once all of it is gone: its exit."""

    op: ClassVar[str] = "stop"
    key: str
    signal: int
    grace_s: float


@dataclass(frozen=True, kw_only=True)
class Destroy:
    """Remove what is left of an instance; with `force` kill it first."""

    op: ClassVar[str] = "destroy"
    key: str
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Signal:
    op: ClassVar[str] = "signal"
    key: str
    signal: int


class Suspend(_OfInstance):
    op: ClassVar[str] = "suspend"


class Resume(_OfInstance):
    op: ClassVar[str] = "resume"


@dataclass(frozen=True, kw_only=True)
class Resize:
    op: ClassVar[str] = "resize"
    key: str
    limits: Limits


class ReadStats(_OfInstance):
    """Reply: cpu seconds, bytes of memory, processes."""

    op: ClassVar[str] = "stats"


class ListProcesses(_OfInstance):
    """Reply: the live processes of the instance."""

    op: ClassVar[str] = "processes"


@dataclass(frozen=True, kw_only=True)
class Execute:
    """Run a command beside the program, to its end or to its time-out. `stdin` is base64. Reply: how it ended and what
    it wrote."""

    op: ClassVar[str] = "exec"
    key: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stdin: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Converse:
    """Run a command beside the program on a connection of its own: its descriptors come with the reply, and it is
    killed when the connection closes."""

    op: ClassVar[str] = "converse"
    key: str
    argv: Sequence[str]
    env: Mapping[str, str]
    tty: bool
    columns: int
    rows: int


# --- one machine -----------------------------------------------------------------------------------------------------


class Purge(_OfMachine):
    """Remove the machine's directory and its log but for its end."""

    op: ClassVar[str] = "purge"


class Follow(_OfMachine):
    """Send an event whenever the machine's log has grown."""

    op: ClassVar[str] = "follow"


class Unfollow(_OfMachine):
    op: ClassVar[str] = "unfollow"


Request = (
    Hello
    | ListInstances
    | ShutDown
    | Start
    | KeepStandby
    | Prespawn
    | MakeContainer
    | MakeTree
    | ReleaseContainer
    | DiscardContainer
    | Inspect
    | Wait
    | Stop
    | Destroy
    | Signal
    | Suspend
    | Resume
    | Resize
    | ReadStats
    | ListProcesses
    | Execute
    | Converse
    | Purge
    | Follow
    | Unfollow
)
