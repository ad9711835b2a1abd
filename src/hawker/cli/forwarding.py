"""`hawker proxy`: a port of this host that leads to a port of a machine, through the API.

Each connection has two threads of its own, one for each way: a side that does not read makes the other one wait. The
end of what one side sends is passed on by itself, and a connection that breaks is broken for both.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING

import click

from hawker.cli import calls, output
from hawker.cli.params import app_option, region_option
from hawker.cli.session import Session, about_app, app_of, label, market_command
from hawker.errors import HawkerError, NotFound, PreconditionFailed, Refused, Unreachable

if TYPE_CHECKING:
    from hawker.client.client import Client, Stream
    from hawker.model.api import Machine

PIECE_BYTES = 128 << 10
BACKLOG = 128
GONE = (404, 412)
"""What the API says of a machine that does not run any more."""
SLOW_DOWN = 429
QUIET_S = 5.0
"""How long the same trouble is not told again."""
AGAIN_S = 0.1
END_S = 3.0
_AT_ONCE = struct.pack("ii", 1, 0)


@click.command()
@click.argument("ports", metavar="LOCAL[:REMOTE]")
@app_option("Forward to a running machine of this app.")
@click.option("--machine", metavar="MACHINE", help="Forward to this machine, by id or name.")
@region_option("Forward to a machine of this region.")
@click.option("--bind", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on.")
@market_command
def proxy(session: Session, ports: str, app: str | None, machine: str | None, region: str | None, bind: str) -> None:
    """Forward a port of this host to a port of a machine, until Ctrl-C.

    REMOTE is any TCP port where a program of the machine listens, whether or not a service names it; the same as LOCAL
    if not given. Connections go through the market's API, with your token, so it works wherever you can reach the API.
    """
    from hawker.cli.talking import ended_in_order

    local, remote = ports_of(ports)
    chosen = Chosen(session, app, machine, region)
    if local == remote and chosen.machine.hawker.driver == "process" and session.client.is_on_this_host():
        raise Refused(  # a connection would come back to us, and be forwarded again, without end
            f"{label(chosen.machine)} is a process, so that its port {remote} is this host's own",
            hint=f"connect to port {remote} itself, or give another one such as 0:{remote}",
        )
    _many_descriptors()
    with listener(bind, local) as sock, ended_in_order():
        at = sock.getsockname()
        shown = f"[{at[0]}]:{at[1]}" if ":" in at[0] else f"{at[0]}:{at[1]}"
        found = chosen.machine
        if session.json:
            output.line({"address": at[0], "port": at[1], "machine": found.id, "remote": remote})
        else:
            output.say(f"{shown} leads to port {remote} of {label(found)} in {found.region}; Ctrl-C ends")
        sys.stdout.flush()
        Forwarding(sock, remote, chosen, session.another_client).go_on()


class Chosen:
    """The machine that connections go to: the one that was asked for, or one of the app's that runs, as long as it
    does."""

    def __init__(self, session: Session, app: str | None, machine: str | None, region: str | None) -> None:
        """Raises `Refused` when there is none that runs."""
        self._session = session
        self._app, self._region = app, region
        self._fixed = bool(machine)
        self._lock = threading.Lock()
        if machine:
            self.machine = session.machine(machine, app)
            if self.machine.state != "started":
                raise PreconditionFailed(
                    f"{label(self.machine)} is {self.machine.state}",
                    hint=f"hawker machine start {self.machine.id}",
                )
        elif app:
            self.machine = self._running()
        else:
            raise click.UsageError("give --app, or --machine")

    def another(self, instead_of: Machine) -> Machine | None:
        """Another machine, when that one does not run any more; None when there is none to choose."""
        if self._fixed:
            return None
        with self._lock:
            if self.machine.id == instead_of.id:
                self.machine = self._running()
            return self.machine

    def _running(self) -> Machine:
        with about_app():
            found, silent = self._session.machines(self._app, region=self._region)
        running = [m for m in found if m.state == "started"]
        if running:
            return min(running, key=lambda m: (m.cordoned, m.region, m.id))
        if silent:
            raise Unreachable(
                f"no machine of app {self._app} runs on the workers that answered: {', '.join(silent)} did not"
            )
        where = f" in {self._region}" if self._region else ""
        if not found:
            raise NotFound(f"app {self._app} has no machines{where}", hint=f"hawker machine run --app {self._app} ...")
        hint = f"hawker machine start {found[0].id}"
        raise PreconditionFailed(f"no machine of app {self._app}{where} runs", hint=hint)


class Forwarding:
    """Takes connections until it is interrupted. The caller closes `listener`."""

    def __init__(self, listener: socket.socket, port: int, chosen: Chosen, client: Callable[[], Client]) -> None:
        self._listener = listener
        self._port = port
        self._chosen = chosen
        self._client = client
        self._threads: dict[_Connection, None] = {}
        self._told: dict[str, float] = {}

    def go_on(self) -> None:
        try:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:  # no descriptor is left for another one, or it has gone again
                    self._note(HawkerError(f"it was not taken: {os.strerror(error.errno or 0)}"))
                    sleep(AGAIN_S)
                    continue
                connection = _Connection(sock, self._port, self._chosen, self._client, self._ended)
                self._threads[connection] = None
                connection.start()
        finally:
            left = list(self._threads)
            for connection in left:
                connection.stop()
            deadline = monotonic() + END_S
            for connection in left:
                connection.join(max(0.0, deadline - monotonic()))

    def _ended(self, connection: _Connection, trouble: HawkerError | None) -> None:
        self._threads.pop(connection, None)
        if trouble is not None:
            self._note(trouble)

    def _note(self, trouble: HawkerError) -> None:
        now = monotonic()
        if now - self._told.get(trouble.message, -QUIET_S) >= QUIET_S:
            self._told[trouble.message] = now
            output.note(f"a connection failed: {trouble.message}")
            for hint in trouble.hint.splitlines():
                output.note(f"  try: {hint}")


class _Connection(threading.Thread):
    """One connection: this thread passes on what the local side sends, another one what the machine sends."""

    def __init__(
        self,
        sock: socket.socket,
        port: int,
        chosen: Chosen,
        client: Callable[[], Client],
        ended: Callable[[_Connection, HawkerError | None], None],
    ) -> None:
        super().__init__(name="connection", daemon=True)
        self._sock = sock
        self._port = port
        self._chosen = chosen
        self._make_client = client
        self._tell = ended
        self._trouble: HawkerError | None = None
        self._complete = False
        self._broken = False
        self._pieces: Stream[bytes] | None = None

    def run(self) -> None:
        try:
            with self._sock, self._make_client() as client:
                try:
                    self._pass(client)
                finally:
                    if not self._complete:
                        with contextlib.suppress(OSError):
                            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        except HawkerError as error:
            self._trouble = self._trouble or error
        except OSError:
            pass  # the local side broke it, and knows
        finally:
            self._tell(self, None if self._complete else self._trouble)

    def stop(self) -> None:
        """From another thread: break it off."""
        self._broken = True
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._sock.shutdown(socket.SHUT_RD)
        if self._pieces is not None:
            self._pieces.wake()

    def _pass(self, client: Client) -> None:
        names = self._connect(client)
        try:
            with client.stream(calls.ReadSession(*names)) as pieces:
                self._pieces = pieces
                if self._broken:
                    return
                back = threading.Thread(target=self._pass_back, args=(pieces,), name="connection, back", daemon=True)
                back.start()
                try:
                    self._pass_on(client, names)
                except BaseException:
                    self._broken = True
                    raise
                finally:
                    if self._broken:
                        pieces.wake()
                    back.join()
        finally:
            if not self._complete:
                with contextlib.suppress(HawkerError):  # it ends by itself when nobody reads
                    client.send(calls.CloseSession(*names))

    def _connect(self, client: Client) -> tuple[str, str, str]:
        from hawker.client.client import ApiError

        machine = self._chosen.machine
        try:
            return self._connected(client, machine)
        except ApiError as error:
            if error.status_code not in GONE or error.word == "not_connected":
                raise
            other = self._chosen.another(machine)
            if other is None:
                raise
            return self._connected(client, other)

    def _connected(self, client: Client, machine: Machine) -> tuple[str, str, str]:
        app = app_of(machine)
        return app, machine.id, client.send(calls.Connect(app, machine.id, port=self._port)).id

    def _pass_on(self, client: Client, names: tuple[str, str, str]) -> None:
        while data := self._sock.recv(PIECE_BYTES):
            self._write(client, names, data)
        if not self._broken:
            self._write(client, names, b"", end=True)

    def _write(self, client: Client, names: tuple[str, str, str], data: bytes, *, end: bool = False) -> None:
        from hawker.client.client import ApiError

        while not self._broken:
            try:
                client.send(calls.WriteSession(*names, data, end=end))
            except ApiError as error:
                if error.status_code == SLOW_DOWN:  # the machine does not read, and nothing was taken
                    continue
                if error.status_code == 404:  # it has just ended: the other thread hears of it
                    return
                raise
            return

    def _pass_back(self, pieces: Stream[bytes]) -> None:
        try:
            self._read(pieces)
        except HawkerError as error:
            if not self._broken:
                self._trouble = error
        except OSError:
            pass  # the local side takes no more
        finally:
            if not self._complete:
                self._broken = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RD)  # whoever waits there for more

    def _read(self, pieces: Stream[bytes]) -> None:
        import msgspec

        from hawker.model import inside_api

        held = bytearray()
        for piece in pieces:
            held += piece
            for kind, data in inside_api.frames(held):
                if kind == inside_api.KIND_END:
                    end = msgspec.json.decode(data, type=inside_api.SessionEnd)
                    self._complete = end.exit_code == 0
                    return
                if kind == inside_api.KIND_STDOUT and data:
                    self._sock.sendall(data)
                elif kind == inside_api.KIND_STDOUT:
                    self._sock.shutdown(socket.SHUT_WR)
        raise Unreachable("the connection broke off between here and the machine")


def ports_of(given: str) -> tuple[int, int]:
    """LOCAL[:REMOTE]. Raises `click.BadParameter`."""
    local, _, remote = given.partition(":")
    remote = remote or local
    if not (local.isdecimal() and remote.isdecimal()) or not (int(local) < 65536 and 0 < int(remote) < 65536):
        raise click.BadParameter(
            f"{given!r}: write a port, or two such as 8080:80, of which the first may be 0 for any."
        )
    return int(local), int(remote)


def _many_descriptors() -> None:
    """Allow this process as many descriptors as the system lets it have: a connection takes three."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listener(address: str, port: int) -> socket.socket:
    """Raises `Refused`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Refused(
            f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}",
            hint="give another LOCAL, or 0 for any free one",
        ) from None
