"""Runs HAProxy as a process: starts it, finds it again, reloads it, ends it. It outlives this process if that is
killed."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import msgspec

from hawker.errors import HawkerError, Invalid, Unreachable
from hawker.proxy.base import Address
from hawker.proxy.haproxy.config import Config, map_of, socket_of
from hawker.proxy.haproxy.config_text import ERRORS, error_file, text
from hawker.proxy.haproxy.runtime import Runtime, Workers, ask
from hawker.proxy.haproxy.settings import HaproxySettings
from hawker.proxy.haproxy.sockets import bound, copied
from hawker.telemetry import get_logger

BEGIN_S = 30.0
"""How long HAProxy may take to start, to reload, and to answer at all, on a host that is busy."""
LOG_MOST = 1 << 20
"""How many bytes of HAProxy's output are kept: it writes a few lines whenever a machine comes or goes."""
LOOK_S = 0.01
PATH_MOST = 90
"""The most bytes of the directory's path: the system takes 107 of a socket's, and the socket's name is a part of
them."""
JOINING = ((2, 6),)
"""Versions that were seen to write a field of several lines as it is (`Config.joined`)."""
_VERSION = re.compile(r"HAProxy version (\d+)\.(\d+)")


class NotStarted(HawkerError):
    """HAProxy does not run; the message is what it said."""


def program(settings: HaproxySettings) -> str:
    """The path of the program. Raises `Invalid` when it is missing, or too old."""
    found = shutil.which(settings.program) or shutil.which(settings.program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Invalid(
            "proxy.haproxy.program",
            settings.program,
            "there is no such program: install the package haproxy, or set proxy.engine to embedded",
        )
    if version(found) < (2, 6):
        raise Invalid("proxy.haproxy.program", found, "HAProxy 2.6 or newer is needed")
    return found


def version(path: str) -> tuple[int, int]:
    """The version of this program; zeros: it is no HAProxy."""
    said = subprocess.run([path, "-v"], capture_output=True, text=True, check=False).stdout
    found = _VERSION.search(said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def connections_most() -> int:
    """How many clients' connections this process's limit of open files is enough for: each takes two, and others are
    needed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(100, min(100_000, (hard - 200) * 10 // 22)) if hard > 0 else 100_000


Hosts = Mapping[tuple[int, bool], Mapping[str, str]]
"""The backends by public port, whether it is for methods that change something, and host."""


class Reserved:
    """An address that nobody else gets until HAProxy listens there. Raises `OSError` when it is taken."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.address: Address = self._socket.getsockname()[:2]

    def close(self) -> None:
        self._socket.close()


class Process:
    """`directory` is HAProxy's own. `ended` is called when HAProxy is gone without `end`."""

    def __init__(self, settings: HaproxySettings, directory: Path, name: str, ended: Callable[[], None]) -> None:
        """Raises `Invalid`."""
        if len(os.fsencode(directory)) > PATH_MOST:
            raise Invalid("proxy.haproxy.directory", str(directory), f"its path may have {PATH_MOST} bytes")
        self.settings = settings
        self.directory = directory
        self.root = os.geteuid() == 0
        self.runtime = Runtime(str(directory))
        self.config: Config | None = None
        self._program = program(settings)
        self.joins = version(self._program) in JOINING
        self._name = name
        self._ended = ended
        self.sockets: dict[str, socket.socket] = {}  # the activator's sockets, by name
        self._numbers: dict[str, int] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._master = 0
        self._group = self._user_group() if self.root else -1

    def _user_group(self) -> int:
        try:
            pwd.getpwnam(self.settings.user)
            return grp.getgrnam(self.settings.user).gr_gid
        except KeyError:
            raise Invalid(
                "proxy.haproxy.user",
                self.settings.user,
                "there is no such user and group: name one, as Debian's haproxy",
            ) from None

    def prepare(self) -> None:
        """Make HAProxy's directory, with all that does not change."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        for path in (self.directory, *(self.directory / name for name in ("act", "maps", "errors", "tls"))):
            path.mkdir(exist_ok=True, mode=0o750)
            self.admit(path, 0o750)
        (self.directory / "replay.lua").write_bytes(files(__package__).joinpath("replay.lua").read_bytes())
        for status in ERRORS:
            (self.directory / "errors" / f"{status}.http").write_bytes(error_file(status, self._name))

    def admit(self, path: Path, mode: int) -> None:
        """Let HAProxy into a directory, or to a socket."""
        path.chmod(mode)
        if self.root:
            os.chown(path, 0, self._group)

    async def find(self, names: Iterable[str]) -> Config | None:
        """Find an HAProxy that runs already, and the configuration that it was given; None: none runs. Opens the
        activator's sockets."""
        config = self.config = await self._found()
        for name in names:
            path = self.directory / socket_of(name)
            number = config.sockets.get(name, -1) if config else -1
            found = copied(self._pidfd, number, path) if number >= 0 else None
            if found is None:
                found = bound(path)
                self.admit(path, 0o660)
            else:
                self._numbers[name] = number
            self.sockets[name] = found
        return config

    async def _found(self) -> Config | None:
        try:
            workers = await self._answering()
        except Unreachable:
            return None
        try:
            config = msgspec.json.decode((self.directory / "state.json").read_bytes(), type=Config)
        except (OSError, msgspec.MsgspecError) as error:
            # Another version of Hawker started it: it takes nothing new, and ends with what it has.
            _logger.warning("haproxy.not_led", pid=workers.master, error=str(error), cause="the proxy is opened")
            with suppress(ProcessLookupError):
                os.kill(workers.master, signal.SIGUSR1)
            return None
        self._watch(workers.master)
        return config

    async def _answering(self) -> Workers:
        """Wait for the master of an HAProxy that runs. One that is only busy is waited for: beside another HAProxy it
        would go on with what it has, at the same ports, and nobody would tell it anything. Raises `Unreachable`: there
        is none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S
        while True:
            try:
                return await self.runtime.refresh()
            except Unreachable as error:
                there = not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError | PermissionError)
                if not there or loop.time() > deadline:
                    raise
                await asyncio.sleep(LOOK_S)

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the activator's sockets in HAProxy's master, or as it will get them."""
        return self._numbers if self._master else {name: sock.fileno() for name, sock in self.sockets.items()}

    async def serve(self, config: Config, hosts: Hosts) -> None:
        """Have HAProxy serve with this configuration from now on: start it, or reload it. Raises `NotStarted`."""
        self._write(config, hosts)
        if self._master and self.config is not None:
            await self._check()
            await self._reload()
        else:
            await self._begin()
        self.config = config
        os.replace(self.directory / "state.new", self.directory / "state.json")

    async def end(self, within_s: float) -> None:
        """End HAProxy: it takes no more, and finishes what it has."""
        if not self._master:
            return
        loop = asyncio.get_running_loop()
        self._master = 0
        pidfd, self._pidfd = self._pidfd, -1
        loop.remove_reader(pidfd)
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
                with suppress(TimeoutError):
                    async with asyncio.timeout(within_s + 1):
                        await self._finished(gone)
                for which in (signal.SIGTERM, signal.SIGKILL):
                    if not gone.is_set():
                        signal.pidfd_send_signal(pidfd, which)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(5.0):
                            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._reap()
            (self.directory / "state.json").unlink(missing_ok=True)

    async def end_found(self, within_s: float) -> None:
        """End an HAProxy that runs already. Raises `Unreachable` when none does."""
        workers = await self.runtime.refresh()
        _logger.info("haproxy.ended", pid=workers.master, cause="the configuration has none any more")
        self._watch(workers.master)
        await self.end(within_s)

    def leave(self) -> None:
        """Let HAProxy serve on without this process."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._master, self._pidfd = 0, -1
        if self._child is not None:
            self._child.returncode = 0  # this process does not wait for it any more
            self._child = None

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _finished(self, gone: asyncio.Event) -> None:
        """Wait until it has no request under way. Users' connections without one would keep it waiting."""
        while not gone.is_set():
            with suppress(Unreachable):
                if not await self.runtime.requests():
                    return
            await asyncio.sleep(LOOK_S)

    def _write(self, config: Config, hosts: Hosts) -> None:
        for frontend in config.frontends:
            for writing in (False, True):
                of_hosts = hosts.get((frontend.public, writing), {})
                lines = [f"{host} {backend}\n" for host, backend in of_hosts.items()]
                Path(map_of(config.directory, frontend.public, writing=writing)).write_text("".join(lines))
        (self.directory / "haproxy.cfg").write_text(text(config))
        state = self.directory / "state.new"
        state.unlink(missing_ok=True)
        descriptor = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # HAProxy needs none of it
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(config))

    async def _check(self) -> None:
        done = await asyncio.create_subprocess_exec(
            *(self._program, "-c", "-q", "-f", str(self.directory / "haproxy.cfg")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await done.communicate()
        if done.returncode:
            raise NotStarted(f"HAProxy does not take its configuration: {said.decode('utf-8', 'replace')[-500:]}")

    async def _begin(self) -> None:
        for name in ("master.sock", "stats.sock"):
            (self.directory / name).unlink(missing_ok=True)
        self._child = self._spawned()
        try:
            await self._begun(self._child)
        except BaseException:
            self._reap()
            raise

    async def _begun(self, child: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S
        while True:
            if child.poll() is not None or loop.time() > deadline:
                raise NotStarted(f"HAProxy did not start: {self._said()}")
            try:
                workers = await self.runtime.refresh()
                if workers.serving:
                    await ask(self.runtime.path, ["show info"])
                    break
            except Unreachable:
                pass
            await asyncio.sleep(LOOK_S)
        self._watch(workers.master)

    def _spawned(self) -> subprocess.Popen[bytes]:
        self._numbers = self.numbers
        (self.directory / "log").unlink(missing_ok=True)
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(self._program, "-W", "-S", f"{self.directory}/master.sock,mode,600"),
                    *("-f", str(self.directory / "haproxy.cfg")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[sock.fileno() for sock in self.sockets.values()],
            )

    async def _reload(self) -> None:
        before = await self.runtime.refresh()
        os.kill(before.master, signal.SIGUSR2)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_S
        while True:
            try:
                now = await self.runtime.refresh()
                if now.serving not in (0, before.serving) and await self._answers(now):
                    return
            except Unreachable:
                pass  # the master restarts itself
            if loop.time() > deadline:
                raise NotStarted(f"HAProxy did not take another configuration: {self._said()}")
            await asyncio.sleep(LOOK_S)

    async def _answers(self, now: Workers) -> bool:
        """Whether the socket belongs to the new worker already."""
        said = await ask(self.runtime.path, ["show info"])
        return f"Pid: {now.serving}\n" in said

    def _watch(self, master: int) -> None:
        self._master = master
        self._pidfd = os.pidfd_open(master)
        asyncio.get_running_loop().add_reader(self._pidfd, self._gone)

    def _gone(self) -> None:
        self._reap()
        self.leave()
        self.config = None
        _logger.warning("haproxy.ended", said=self._said(), cause="HAProxy has ended by itself")
        self._ended()

    def _reap(self) -> None:
        """HAProxy has ended, or this process does not wait for its end any more."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def trim(self) -> None:
        """Empty the file with HAProxy's output, if that is much."""
        log = self.directory / "log"
        with suppress(OSError):
            if log.stat().st_size > LOG_MOST:
                os.truncate(log, 0)

    def _said(self) -> str:
        try:
            return (self.directory / "log").read_text("utf-8", "replace")[-500:]
        except OSError:
            return ""


async def end_left(settings: HaproxySettings, directory: Path, within_s: float) -> None:
    """End an HAProxy that an earlier agent left running, and that is not configured any more: it would hold its
    addresses, and answer nobody."""
    if not (directory / "master.sock").exists():
        return
    with suppress(Invalid, Unreachable, ProcessLookupError):  # there is none any more
        process = Process(settings, directory, "", lambda: None)
        await process.end_found(within_s)


_logger = get_logger()
