"""What the API offers inside a machine that runs: its size while it runs, commands that somebody talks to, connections.

A *session* is a command beside the machine's program. Its output is one stream of frames: a byte for the kind, four for
the length of what follows, most significant first, then that. Kinds: 0 nothing (the command is quiet), 1 standard
output, 2 standard error, 3 its end as JSON `{"exit_code": .., "exit_signal": ..}`, always the last. A stream that broke
off has lost what was on its way; the next one goes on after that. Nothing is kept for a reader that is away: the
command waits until somebody reads, and is killed when nobody has for `AWAY_S`, or has not begun to within `FIRST_S`.

A *connection* to a port of the machine is a session without a command: what the machine sends is standard output, and
its end an empty frame of that. The last frame comes once the other side has ended its input, too; its exit code is 0,
or 1 when the connection was broken.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hawker.model.api import Body, Ok
from hawker.model.call_bases import MACHINE, OfLeasedMachine, OfMachine, StreamOfMachine
from hawker.model.op import BYTES, Op, declared_in

AWAY_S = 30.0
FIRST_S = 10.0
QUIET_S = 10.0
"""A stream whose command says nothing for so long says that, so that each end notices when the other has gone."""
KIND_QUIET, KIND_STDOUT, KIND_STDERR, KIND_END = range(4)
HEAD_BYTES = 5

Columns = Annotated[int, Meta(ge=1, le=10_000)]


class Memory(Body, frozen=True):
    """`available_mb`: of its limit, what it does not use."""

    limit_mb: int
    available_mb: int


class Session(Body, frozen=True):
    id: str


class SessionEnd(Body, frozen=True):
    """The shell's convention has 128 + signal in the place of a code."""

    exit_code: int
    exit_signal: int = 0


def frame(kind: int, data: bytes = b"") -> bytes:
    return kind.to_bytes(1, "big") + len(data).to_bytes(4, "big") + data


def end_frame(code: int, signal: int | None) -> bytes:
    return frame(KIND_END, msgspec.json.encode(SessionEnd(exit_code=code, exit_signal=signal or 0)))


def frames(data: bytearray) -> list[tuple[int, bytes]]:
    """The whole frames at the beginning of `data`, which are taken from it."""
    found = []
    while len(data) >= HEAD_BYTES:
        length = int.from_bytes(data[1:HEAD_BYTES], "big")
        if len(data) < HEAD_BYTES + length:
            break
        found.append((data[0], bytes(data[HEAD_BYTES : HEAD_BYTES + length])))
        del data[: HEAD_BYTES + length]
    return found


# --- calls -----------------------------------------------------------------------------------------------------------

_SESSIONS = f"{MACHINE}/exec/sessions"
_SESSION = f"{_SESSIONS}/{{session_id}}"


class ShowMemory(OfMachine[Memory]):
    """Get a machine's memory limit and what of it is free."""

    op = Op("Machines_show_memory", "GET", f"{MACHINE}/memory", refuses=(412,))


class SetMemory(OfLeasedMachine[Memory]):
    """Change a machine's memory, and its cpus, while it runs: refused when there is no room or it uses more.

    `cpus` is ours.
    """

    op = Op("Machines_set_memory", "PUT", f"{MACHINE}/memory", refuses=(409, 412, 422), example={"limit_mb": 512})
    limit_mb: Annotated[int, Meta(ge=1)]
    cpus: Annotated[int, Meta(ge=1)] | None = None


class OpenSession(OfMachine[Session]):
    """Start a command beside a machine's program, to talk to it.

    `env` is added to the program's. The command is killed when nobody reads what it writes for half a minute.
    """

    op = Op(
        "Machines_open_session",
        "POST",
        _SESSIONS,
        refuses=(412, 422, 429),
        extension=True,
        example={"command": ["sh"], "tty": True},
    )
    command: Annotated[list[str], Meta(min_length=1)]
    tty: bool = False
    columns: Columns = 80
    rows: Columns = 24
    env: dict[str, str] = {}


class Connect(OfMachine[Session]):
    """Connect to a TCP port of a machine, whether or not a service names it: what it gives is a session.

    `port` is the one that the machine's program sees.
    """

    op = Op("Machines_connect", "POST", f"{MACHINE}/connections", refuses=(412, 429), extension=True)
    port: Annotated[int, Meta(ge=1, le=65535)]


class ReadSession(StreamOfMachine[bytes], kw_only=False):
    """What the command or connection gives, as it comes, up to its end, in frames."""

    op = Op("Machines_read_session", "GET", f"{_SESSION}/output", media=BYTES, quiet_s=3 * QUIET_S + 5, extension=True)
    session_id: str


class WriteSession(OfMachine[Ok], kw_only=False):
    """Give the command or connection input."""

    op = Op(
        "Machines_write_session",
        "POST",
        f"{_SESSION}/input",
        query=("end",),
        raw="data",
        refuses=(429,),
        extension=True,
    )
    session_id: str
    data: bytes
    end: Annotated[bool, Meta(description="this is the last of it")] = False


class ResizeSession(OfMachine[Ok], kw_only=False):
    """Tell the command the size of its terminal."""

    op = Op("Machines_resize_session", "POST", f"{_SESSION}/resize", extension=True)
    session_id: str
    columns: Columns
    rows: Columns


class CloseSession(OfMachine[Ok], kw_only=False):
    """Kill the command or break off the connection, if it is still there, and forget it."""

    op = Op("Machines_close_session", "DELETE", _SESSION, extension=True)
    session_id: str


INSIDE_CALLS = declared_in(globals())
