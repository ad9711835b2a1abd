"""A container that is being made: the runtime makes it, and its init waits at its first instruction until it is
released.

Its record is written just before the release, so that no program runs that the next supervisor does not know of. Should
the supervisor be killed before that, the container ends by itself, for the pipe it waits at closes. The next supervisor
removes a container whose program was not seen to begin (`taking_over`); this one removes it as soon as the daemon that
asked for it is gone.
"""

from __future__ import annotations

import base64
import contextlib
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from hawker.supervisor import mounts, proc
from hawker.supervisor.calls import MakeContainer, MakeTree
from hawker.supervisor.common import Common
from hawker.supervisor.container import (
    ID,
    Container,
    clear_directory,
    complaint,
    directory_of,
    new_record,
    read_pid,
    runtime_argv,
    unmount_all,
)
from hawker.supervisor.disks import disks_of
from hawker.supervisor.files import RecordFile
from hawker.supervisor.instance import STREAMS, group_of
from hawker.supervisor.loop import Timer
from hawker.supervisor.output import Pipe
from hawker.supervisor.roots import Root, Roots
from hawker.supervisor.status_file import STATUS, words
from hawker.supervisor.wire import Connection

PLACE: Final = "@directory@"  # in the configuration, for the container's own directory
GROUP: Final = "@group@"  # and for its control group
STATUS_FD, GO_FD = 3, 4
MADE_S: Final = 60.0  # how long the runtime may take
R = TypeVar("R", bound=MakeContainer | MakeTree)


class Making(Generic[R]):
    """What is the same for a container of a runtime and for a tree with our init. `failed` is told the kind of error
    and why, once nothing is left of it."""

    def __init__(self, request: R, connection: Connection, common: Common, roots: Roots) -> None:
        self.key = request.key
        self.machine = request.machine
        self.connection = connection
        self.common = common
        self.pid = 0
        self._request = request
        self._roots = roots
        self._path = common.files.instance(self.key)
        self._directory = directory_of(self._path)
        self._group = group_of(self.machine, self.key)
        name = "kept" if request.root.persist else os.path.basename(self._path)
        self._root = Root(self.machine, name, request.root.size_mib)
        first = request.users if isinstance(request, MakeTree) else request.ids
        self._ids = mounts.IdMap(first) if first is not None else None
        self._disks: list[str] = []
        self._pipes: list[Pipe] = []
        self._go = -1
        self._watch = -1
        self._rooting = False  # its root is being made
        self._working = 0  # the runtime's pid while it works
        self._patience: Timer | None = None  # with it
        self._failure: tuple[str, str] | None = None
        self._over = False
        self._instance: Container | None = None  # once it is written down
        self._status: int | None = None
        self._made: Callable[[int], None] = lambda pid: None
        self._started: Callable[[Container], None] | None = None
        self._failed: Callable[[str, str], None] = lambda kind, why: None

    # --- making ------------------------------------------------------------------------------------------------------

    def begin(self, made: Callable[[int], None], failed: Callable[[str, str], None]) -> None:
        """`made` is told the pid of the first process, whose namespaces are there."""
        self._made, self._failed = made, failed
        self._rooting = True
        try:
            clear_directory(self._directory)
            self._roots.drop(self._root)
            self._roots.make(self._root, self._rooted)
        except OSError as error:
            self._rooted(f"the container cannot be made: {error}")

    def _rooted(self, why: str) -> None:
        self._rooting = False
        if self._failure:
            self._undo()
            return
        if why:
            self.fail("StartFailed", why)
            return
        try:
            self._lay_out()
            self._spawn()
        except (OSError, ValueError) as error:
            self.fail("StartFailed", f"the container cannot be made: {error}")

    def _lay_out(self) -> None:
        """The container's directory, with everything mounted that it is made of."""
        raise NotImplementedError

    def _spawn(self) -> None:
        raise NotImplementedError

    def _made_instance(self) -> Container:
        raise NotImplementedError

    def _below(self, own_disk: str, mounted: Iterable[str]) -> list[str]:
        """The disks below everything that the machine sees."""
        found = disks_of([self.common.directory, *self._request.layers, *mounted])
        return [*([own_disk] if own_disk else []), *found]

    def _open_ends(self) -> dict[int, int]:
        """The descriptors that the container gets from us, by the numbers that it knows them by. Close them once it has
        them."""
        ends: dict[int, int] = {}
        try:
            for number, stream in enumerate(STREAMS, 1):
                self._pipes.append(Pipe(f"{self._path}.{stream}", stream[0], self.key))
                ends[number] = self._pipes[-1].open_for_child()
                os.fchown(ends[number], self._request.owner, -1)  # so that it can be opened again as /dev/stdout
            status = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            ends[STATUS_FD] = os.open(self._path + STATUS, status, 0o600)
            ends[GO_FD], self._go = os.pipe2(os.O_CLOEXEC)
        except OSError:
            for fd in ends.values():
                os.close(fd)
            raise
        return ends

    # --- releasing ----------------------------------------------------------------------------------------------------

    def release(self, started: Callable[[Container], None], failed: Callable[[str, str], None]) -> None:
        """Release the program. `started` is told once it runs, or has run."""
        self._started, self._failed = started, failed
        if self._status is not None:
            self._look()
            return
        self._instance = self._made_instance()
        self._instance.roots, self._instance.children = self._roots, self.common.children
        try:
            self._watch = self.common.writes.watch(self._path + STATUS, self._look)
            self._instance.write_down()
        except OSError as error:
            self.fail("StartFailed", f"the container cannot be recorded: {error}")
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended: we shall be told
            os.write(self._go, b"g")

    def _look(self) -> None:
        """Find out whether the init has said that the program runs, or why it does not."""
        if self._over or self._started is None:
            return
        for said in words(self._path + STATUS):
            if "started" in said and self._instance:
                self._finish(self._instance, self._started)
                return
            if "error" in said:
                self.fail("StartFailed", str(said["error"]))
                return
        if self._status is not None:
            self.fail("StartFailed", f"the container ended with {self._status} before its program was started")

    def _finish(self, instance: Container, started: Callable[[Container], None]) -> None:
        """Hand it over: its program runs, and it is an instance like any other from now on."""
        self._end_waiting()
        instance.pipes = self._pipes
        self.common.children.forget(self.pid)
        instance.status = self._status
        started(instance)

    def _ended(self, status: int) -> None:
        """Note that its first process has ended before it became an instance."""
        self._status = status
        if self._failure is None:
            self._look()

    # --- undoing -----------------------------------------------------------------------------------------------------

    def fail(self, kind: str, why: str) -> None:
        """Remove all of it, then tell."""
        if self._failure or self._over:
            return
        self._failure = kind, why
        self._end_waiting()
        if self._working:
            self.common.kill_marked(self.common.mark(self.machine, self.key))  # `_runtime_ended` goes on
        elif not self._rooting:  # else `_rooted` does
            self._undo()

    def end(self, gone: Callable[[str, str], None]) -> None:
        """Remove it: nobody wants it any more. This may be repeated; the last caller is told."""
        self._failed = gone
        self.fail("UnknownInstance", f"{self.key} was given up")

    def _undo(self) -> None:
        """Kill first what a killed runtime has left: it may still clear up, in the place of the next try."""
        mark = self.common.mark(self.machine, self.key)
        self.common.kill_marked(mark, lambda: self.common.remove_group(self._group, self._undone))

    def _undone(self) -> None:
        assert self._failure
        try:
            for pipe in self._pipes:
                pipe.remove()
            self._pipes = []
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path + STATUS)
            RecordFile(self._path).remove()
            clear_directory(self._directory)
            self._roots.drop(self._root)
        except OSError:  # it is told all the same; the next try clears up first, and so does the next supervisor
            traceback.print_exc()
        self._failed(*self._failure)

    def _end_waiting(self) -> None:
        self._over = True
        if self._go >= 0:
            os.close(self._go)
            self._go = -1
        if self._watch >= 0:
            self.common.writes.forget(self._watch)
            self._watch = -1


class ContainerMaking(Making[MakeContainer]):
    """A runtime makes it."""

    def _lay_out(self) -> None:
        request, directory = self._request, self._directory
        make_directory(directory, 0o700, self._ids)
        for name in ("rootfs", "files", "state"):
            make_directory(f"{directory}/{name}", 0o711)
        for each in request.files:
            write_new(f"{directory}/files/{each.name}", base64.b64decode(each.content), each.mode, each.owner)
        for number, (source, read_only) in enumerate(request.mounts):
            target = f"{directory}/mount-{number}"
            if os.path.isdir(source):
                os.mkdir(target)
            else:
                write_new(target, b"", 0o600, 0)
            mounts.bind(source, target, read_only=read_only, ids=self._ids)
        if self._ids:  # the container's root may not go where ours may
            write_new(f"{directory}/init", b"", 0o600, 0)
            mounts.bind(request.init, f"{directory}/init", read_only=True)
        group = f"/{self.common.group_prefix}/{self._group}"
        config = request.config.replace(GROUP, group).replace(PLACE, directory)
        write_new(f"{directory}/config.json", config.encode(), 0o600, 0)
        own_disk = self._roots.mount(self._root, request.layers, f"{directory}/disk", f"{directory}/rootfs", self._ids)
        self._disks = self._below(own_disk, [source for source, _ in request.mounts])

    def _spawn(self) -> None:
        ends = self._open_ends()
        try:
            directory = self._directory
            command = ["run", "--detach", "--bundle", directory, "--pid-file", f"{directory}/pid"]
            argv = runtime_argv(
                self._request.runtime, directory, f"{directory}/log", *command, "--preserve-fds", "2", ID
            )
            env = {"PATH": os.defpath, proc.MARKER: self.common.mark(self.machine, self.key)}
            self.common.children.expect(True)
            try:
                self._working = self.common.children.spawn(argv, env, ends, self._runtime_ended)
            except OSError:
                self.common.children.expect(False)
                raise
            self._patience = self.common.loop.later(MADE_S, self._late)
        finally:
            for fd in ends.values():
                os.close(fd)

    def _runtime_ended(self, status: int) -> None:
        self._working = 0
        if self._patience:
            self._patience.cancel()
        self.pid = read_pid(f"{self._directory}/pid")
        if self.pid and status == 0:
            self.common.children.watch(self.pid, self._ended)
        self.common.children.expect(False)
        if self._failure:
            self._undo()
        elif status < 0:
            self.fail("RuntimeKilled", f"{os.path.basename(self._request.runtime)} was ended by signal {-status}")
        elif status or not self.pid:
            why = complaint(f"{self._directory}/log") or f"exit code {status}"
            self.fail("StartFailed", f"{os.path.basename(self._request.runtime)}: {why}")
        elif why := self._unlimited():
            self.fail("StartFailed", why)
        else:
            self._made(self.pid)
            self.common.loop.later(0, self._unmount)  # the kernel takes its time, and nobody has to wait for it

    def _unlimited(self) -> str:
        """Limit what a runtime does not: it has no word for what the kernel writes later. What went wrong, or ""."""
        try:
            if self.common.groups:
                self.common.groups.limit_disks(self._group, self._request.limits, self._disks)
        except OSError as error:
            return f"what the container reads and writes cannot be limited: {error}"
        return ""

    def _unmount(self) -> None:
        """The container has its own mounts by now."""
        with contextlib.suppress(OSError):  # it has ended, and its directory is gone
            unmount_all(self._directory)

    def _late(self) -> None:
        if self._working:
            self.fail(
                "StartFailed", f"{os.path.basename(self._request.runtime)} made no container within {MADE_S:.0f} s"
            )

    def _made_instance(self) -> Container:
        note = dict(self._request.note)
        record = new_record(self.key, self.machine, self.pid, self._group, note, self._request.runtime, self._root)
        return Container(record, self.common.files, self.common.mark(self.machine, self.key), self.common.groups)


def make_directory(path: str, mode: int, ids: mounts.IdMap | None = None) -> None:
    """Make a directory of this mode, whatever the umask is. The root of a container with these users may pass through
    it, too."""
    os.mkdir(path, 0o700)
    if ids:
        os.chown(path, -1, ids.base)
        mode |= 0o010
    os.chmod(path, mode)


def write_new(path: str, content: bytes, mode: int, owner: int, directory: int | None = None) -> None:
    """Make a file that is not there yet, in the directory of this descriptor if one is given. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        os.fchown(fd, owner, owner)
        os.fchmod(fd, mode)
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)
