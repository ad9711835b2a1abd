"""The contract of a driver: the life of an instance in order, and what a driver may leave out.

An *instance* is one run of a machine's program. It is named by its *key*, `<run id>/<step>`, the name of the outside
effect that started it: asking twice for the same key gives the same instance. A driver keeps what it needs to find its
instances again by that key, so that a worker daemon can be killed and upgraded while machines run on.

The order of a life: `start` -> (`signal`, `exec`, `stats`, what `abilities` add)* -> `stop` or an exit of its own ->
`destroy`, which removes every leftover. The exit record of an instance stays readable until `destroy`.

Every driver passes the conformance suite in `tests/live/conformance/`. Third parties register drivers under the entry
point group `hawker.drivers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from hawker.worker.drivers.base import (
    ExecResult,
    Exit,
    Fingerprint,
    Instance,
    InstanceSpec,
    Limits,
    LogLine,
    NotSupported,
    Process,
    Stats,
    Terminal,
)

T = TypeVar("T")

StartRelease = Literal["now", "soon", "no"]
"""What releasing a prespawned start has led to. "now": the program runs, or cannot, which `Driver.start` tells; a
program that runs is the instance of its key, also for a caller who asks after a crash. "soon": `start` releases it, and
nothing is in its way. "no": only `start` can tell."""


class Suspends(Protocol):
    async def suspend(self, key: str) -> None:
        """Freeze the whole tree and keep its memory. Repeating is harmless. Raises `NotSupported`,
        `UnknownInstance`."""

    async def resume(self, key: str) -> None: ...


class Resizes(Protocol):
    async def resize(self, key: str, limits: Limits) -> None:
        """Change the limits of a running instance. Raises `NotSupported`, `Refused`, `UnknownInstance`."""


class OpensTerminals(Protocol):
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


class Prespawns(Protocol):
    """The driver begins a start while the database still makes the start durable."""

    def prespawn(self, spec: InstanceSpec) -> bool:
        """`start` will be called with this specification once it is durable. What the driver begins must vanish by
        itself if that call never comes, also when this process is killed. Returns False if it begins nothing."""

    def release_start(self, spec: InstanceSpec) -> StartRelease:
        """The start is durable now, so the prespawned process may become the program. Call it only after a `prespawn`
        that returned True; call `start` in any case."""


class StandsBy(Protocol):
    def stand_by(self) -> None:
        """Machines of this driver may be started: get ready what the first start would wait for."""


@dataclass(frozen=True)
class Abilities:
    """What a driver can do beside what every driver does; None where it cannot. Whether an ability works on this host,
    the driver's fingerprint says."""

    suspending: Suspends | None = None
    resizing: Resizes | None = None
    terminals: OpensTerminals | None = None
    prespawning: Prespawns | None = None
    standing_by: StandsBy | None = None


class Driver(Protocol):
    """Runs instances. Every method may be called again after a crash and must give the same end state.

    `open` takes over what still runs and starts what the driver itself needs; `close` leaves instances running.
    `stop_all` is for a host that shuts down.
    """

    name: str
    abilities: Abilities

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

    async def stats(self, key: str) -> Stats: ...

    async def processes(self, key: str) -> Sequence[Process]: ...

    def logs(self, machine: str, *, tail: int = 100, follow: bool = False) -> AsyncIterator[LogLine]:
        """The last `tail` lines the machine's instances wrote, oldest first; then, with `follow`, new ones as they
        come until the caller stops iterating. The last ones can be read for an hour after the machine was purged."""

    async def stop_all(self, *, grace_s: float) -> None:
        """Stop every instance and everything the driver started of its own. Exits stay recorded for `recover`."""


def needed(ability: T | None, what: str) -> T:
    """Raises `NotSupported` for an ability that the driver lacks."""
    if ability is None:
        raise NotSupported(f"its driver does not support {what}")
    return ability
