"""What every driver must do. A driver's tests subclass `Conformance` and the classes for what the driver can, and give
them a `driver` fixture.

The programs are scripts for any shell, busybox's too. Process ids are compared with others from inside only; that
nothing of an instance runs any more is asked of the host, by a word in the command lines that no other test uses.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace
from tests.kit.oci import Entry, directory
from tests.kit.waiting import eventually

from hawker.errors import ImageError
from hawker.worker.drivers.base import (
    Driver,
    Exit,
    File,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    LogLine,
    Refused,
    Root,
    StartFailed,
    Terminal,
    Tmpfs,
    UnknownInstance,
)
from hawker.worker.drivers.refusals import SupervisorLost
from hawker.worker.drivers.supervised import SupervisedDriver

PATH = "/usr/local/bin:/usr/bin:/bin"
AddImage = Callable[[str, Mapping[str, object], Sequence[Sequence[Entry]]], str]
_numbers = count(1)


def spec(*argv: str, image: str = "host", **env: str) -> InstanceSpec:
    """An instance of a machine of its own."""
    n = next(_numbers)
    return InstanceSpec(
        key=f"run{n:04d}/launch",
        machine=f"{n:014x}",
        image=image,
        argv=argv,
        env={"PATH": PATH, **env},
        limits=Limits(cpu_millis=100, memory_mib=64, pids=64),
    )


def shell(script: str, image: str = "host", **env: str) -> InstanceSpec:
    return spec("sh", "-c", script, image=image, **env)


def word() -> str:
    """A number that is in no other command line of this host: seconds to sleep, days of them."""
    return str(os.getpid() * 10_000 + next(_numbers))


class Opened:
    """An open driver and the exits it told of. `image` is one with a shell, for `spec` and `shell`; `add` makes
    further images of it: a reference, fields of its configuration, layers on top."""

    def __init__(self, driver: Driver, image: str = "host", add: AddImage | None = None) -> None:
        self.driver = driver
        self.image = image
        self.exits: dict[str, Exit] = {}
        self._add = add

    def spec(self, *argv: str, **env: str) -> InstanceSpec:
        return spec(*argv, image=self.image, **env)

    def shell(self, script: str, **env: str) -> InstanceSpec:
        return shell(script, image=self.image, **env)

    def add_image(self, reference: str, config: Mapping[str, object], *layers: Sequence[Entry]) -> str:
        assert self._add is not None
        return self._add(reference, config, layers)

    def on_exit(self, ended: Exit) -> None:
        self.exits[ended.key] = ended

    async def says(self, machine: str, text: str) -> None:
        """Wait until the machine's log holds a line with this text."""

        async def found() -> bool:
            return any(text in line.text for line in await self.lines(machine))

        await eventually(found, f"{machine} says {text}")

    async def lines(self, machine: str, tail: int = 1000) -> list[LogLine]:
        return [line async for line in self.driver.logs(machine, tail=tail)]

    async def run(self, one: InstanceSpec) -> list[str]:
        """Run it to its end, which must be a good one; what it said, on either stream."""
        await self.driver.start(one)
        ended = await self.driver.wait(one.key)
        lines = [line.text for line in await self.lines(one.machine) if line.instance == one.key]
        assert (ended.code, ended.error) == (0, ""), lines
        return lines

    async def supervisor(self) -> int:
        """The pid of the shim that keeps the instances."""
        assert isinstance(self.driver, SupervisedDriver)
        pid: int = (await self.driver.supervisor.call_once("hello"))["pid"]
        return pid

    async def replaced(self, old: int) -> bool:
        try:
            return await self.supervisor() != old
        except SupervisorLost:
            return False

    async def kill_supervisor(self) -> None:
        killed = await self.supervisor()
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: self.replaced(killed), "another supervisor serves")


@asynccontextmanager
async def opened(driver: Driver, image: str = "host", add: AddImage | None = None) -> AsyncIterator[Opened]:
    """Open a driver; at the end stop everything it runs."""
    it = Opened(driver, image, add)
    await driver.open(it.on_exit)
    try:
        yield it
    finally:
        await driver.stop_all(grace_s=0)
        await driver.close()


class Conformance:
    """The suite. `driver` yields an `Opened`. In `late_s` seconds a command certainly has begun."""

    late_s: ClassVar[float] = 0.3

    async def test_a_program_runs_and_its_exit_code_is_kept_until_destroy(self, driver: Opened) -> None:
        one = driver.shell("exit 7")
        started = await driver.driver.start(one)
        assert (started.key, started.machine) == (one.key, one.machine)
        ended = await driver.driver.wait(one.key)
        assert (ended.code, ended.signal, ended.oom_killed, ended.status) == (7, None, False, 7)
        assert (await driver.driver.inspect(one.key)).exit == ended
        assert driver.exits[one.key] == ended
        await driver.driver.destroy(one.key)
        with pytest.raises(UnknownInstance):
            await driver.driver.inspect(one.key)

    async def test_a_program_that_a_signal_ended_says_which(self, driver: Opened) -> None:
        one = driver.shell("kill -SEGV $$")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (ended.code, ended.signal, ended.status) == (None, signal.SIGSEGV, 128 + signal.SIGSEGV)

    async def test_the_same_key_starts_one_program(self, driver: Opened) -> None:
        one = driver.shell("echo here; sleep 60")
        first, second = await asyncio.gather(driver.driver.start(one), driver.driver.start(one))
        assert first == second
        await driver.says(one.machine, "here")
        assert len([line for line in await driver.lines(one.machine) if line.text == "here"]) == 1

    async def test_a_key_that_ended_is_not_started_again(self, driver: Opened) -> None:
        one = driver.shell("exit 0")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (await driver.driver.start(one)).exit == ended

    @pytest.mark.parametrize("argv", [("no-such-program",), ("/no/such/program",), ("/etc/passwd",)])
    async def test_what_cannot_be_started_is_refused_and_leaves_nothing(
        self, driver: Opened, argv: tuple[str, ...]
    ) -> None:
        one = driver.spec(*argv)
        with pytest.raises(StartFailed, match=argv[0]):
            await driver.driver.start(one)
        assert await driver.driver.recover() == []

    async def test_several_may_wait_and_also_after_the_end(self, driver: Opened) -> None:
        one = driver.shell("exit 3")
        await driver.driver.start(one)
        ends = await asyncio.gather(*(driver.driver.wait(one.key) for _ in range(3)))
        assert {e.code for e in (*ends, await driver.driver.wait(one.key))} == {3}

    async def test_unknown_keys_are_said_to_be_unknown(self, driver: Opened) -> None:
        for call in (
            driver.driver.inspect("x/y"),
            driver.driver.wait("x/y"),
            driver.driver.stop("x/y", signal=15, grace_s=1),
            driver.driver.signal("x/y", 15),
            driver.driver.exec("x/y", ["true"], timeout_s=5),
        ):
            with pytest.raises(UnknownInstance):
                await call
        await driver.driver.destroy("x/y")
        await driver.driver.purge("x")

    async def test_stop_asks_with_the_signal_first(self, driver: Opened) -> None:
        one = driver.shell("trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.05; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=20)
        assert ended.code == 5
        assert "asked" in [line.text for line in await driver.lines(one.machine)]

    async def test_a_program_can_be_interrupted(self, driver: Opened) -> None:
        """Nothing may be ignored on its behalf: SIGINT is how machines are stopped unless they say otherwise."""
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        assert (await driver.driver.stop(one.key, signal=signal.SIGINT, grace_s=20)).signal == signal.SIGINT

    async def test_stop_kills_what_ignores_the_signal_with_its_whole_tree(self, driver: Opened) -> None:
        mark = word()
        script = f"trap '' TERM; (setsid sleep {mark} &); sleep {mark} & echo up; while :; do sleep 0.05; done"
        one = driver.shell(script)
        pid = (await driver.driver.start(one)).pid
        await driver.says(one.machine, "up")
        assert len([p for p in await driver.driver.processes(one.key) if mark in p.command]) >= 3
        ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=0.1)
        assert ended.signal == signal.SIGKILL
        await gone(mark, pid)

    async def test_what_a_program_leaves_behind_ends_with_it(self, driver: Opened) -> None:
        mark = word()
        one = driver.shell(f"(setsid sh -c 'echo there; exec sleep {mark}' &) ; sleep 0.3; exit 0")
        pid = (await driver.driver.start(one)).pid
        await driver.driver.wait(one.key)
        assert [line.text for line in await driver.lines(one.machine)] == ["there"]
        await gone(mark, pid)

    async def test_a_running_instance_is_destroyed_only_by_force(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        pid = (await driver.driver.start(one)).pid
        with pytest.raises(InstanceRunning):
            await driver.driver.destroy(one.key)
        await driver.driver.destroy(one.key, force=True)
        await driver.driver.destroy(one.key, force=True)
        assert pid is not None
        assert not alive(pid)

    async def test_a_command_runs_beside_the_program(self, driver: Opened) -> None:
        one = driver.shell("pwd; sleep 60", GREETING="hello")
        await driver.driver.start(one)
        script = "echo $GREETING; cat; echo oh >&2; exit 3"
        done = await driver.driver.exec(one.key, ["sh", "-c", script], stdin=b"in\n", timeout_s=20)
        assert (done.code, done.stdout, done.stderr, done.timed_out) == (3, b"hello\nin\n", b"oh\n", False)
        where = await driver.driver.exec(one.key, ["pwd"], timeout_s=20)
        await driver.says(one.machine, where.stdout.decode().strip())

    async def test_a_command_is_killed_at_its_time_out_and_cannot_flood(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        mark = word()
        late = await driver.driver.exec(
            one.key, ["sh", "-c", f"echo on; sleep {mark}; echo never"], timeout_s=self.late_s
        )
        assert (late.timed_out, late.stdout) == (True, b"on\n")

        async def killed() -> bool:
            return not [p for p in await driver.driver.processes(one.key) if mark in p.command]

        await eventually(killed, "the command and what it started are gone")
        flood = await driver.driver.exec(one.key, ["sh", "-c", "head -c 3000000 /dev/zero"], timeout_s=20)
        assert len(flood.stdout) == 1 << 20
        with pytest.raises(StartFailed):
            await driver.driver.exec(one.key, ["no-such-program"], timeout_s=5)

    async def test_output_is_kept_line_by_line_also_the_last_without_a_newline(self, driver: Opened) -> None:
        one = driver.shell("echo one; echo two >&2; printf three")
        await driver.driver.start(one)
        await driver.driver.wait(one.key)
        lines = await driver.lines(one.machine)
        assert {(line.stream, line.text) for line in lines} == {
            ("stdout", "one"),
            ("stderr", "two"),
            ("stdout", "three"),
        }
        assert {line.instance for line in lines} == {one.key}
        assert [line.text for line in await driver.lines(one.machine, tail=1)] == [lines[-1].text]

    async def test_output_is_followed_as_it_comes(self, driver: Opened) -> None:
        one = driver.shell("mkfifo pipe; exec 3<>pipe; echo before; while read -r line; do echo $line; done < pipe")
        await driver.driver.start(one)
        await driver.says(one.machine, "before")
        following = driver.driver.logs(one.machine, tail=10, follow=True)
        assert (await anext(following)).text == "before"
        nxt = asyncio.ensure_future(anext(following))
        await driver.driver.exec(one.key, ["sh", "-c", "echo live > pipe"], timeout_s=20)
        assert (await asyncio.wait_for(nxt, 15)).text == "live"
        await following.aclose()  # type: ignore[attr-defined]  # an async generator

    async def test_use_is_counted(self, driver: Opened) -> None:
        one = driver.shell("echo up; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 60")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")

        async def worked() -> bool:
            return (await driver.driver.stats(one.key)).cpu_s > 0

        await eventually(worked, "cpu time is counted")
        stats = await driver.driver.stats(one.key)
        assert stats.memory_bytes > 0
        assert stats.processes >= 1

    async def test_listening_sockets_are_seen(self, driver: Opened) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        one = driver.spec("busybox", "nc", "-l", "-p", str(port))
        await driver.driver.start(one)

        async def listens() -> bool:
            found = [entry for p in await driver.driver.processes(one.key) for entry in p.listen]
            assert all(protocol == "tcp" and address.endswith(f":{port}") for protocol, address in found)
            return bool(found)

        await eventually(listens, "it is seen to listen")

    async def test_signals_reach_the_program(self, driver: Opened) -> None:
        one = driver.shell("trap 'echo usr1' USR1; echo up; while :; do sleep 0.05; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "usr1")

    async def test_a_suspended_program_stands_still_and_goes_on(self, driver: Opened) -> None:
        one = driver.shell("while :; do echo tick; sleep 0.02; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "tick")
        await driver.driver.suspend(one.key)
        assert (await driver.driver.inspect(one.key)).suspended
        readings: list[float] = []

        async def stands_still() -> bool:
            readings.append((await driver.driver.stats(one.key)).cpu_s)
            return len(readings) > 10 and len(set(readings[-10:])) == 1

        await eventually(stands_still, "it uses no cpu for a tenth of a second; it ticks fifty times a second")
        await driver.driver.resume(one.key)
        assert not (await driver.driver.inspect(one.key)).suspended
        before = len(await driver.lines(one.machine))

        async def goes_on() -> bool:
            return len(await driver.lines(one.machine)) > before

        await eventually(goes_on, "it ticks again")

    async def test_a_suspended_program_can_be_stopped(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        await driver.driver.suspend(one.key)
        assert (await driver.driver.stop(one.key, signal=15, grace_s=20)).signal == signal.SIGKILL

    async def test_it_takes_hold_again_of_what_runs_and_tells_what_ended(self, driver: Opened) -> None:
        lasting, short = driver.spec("sleep", "60"), driver.shell("sleep 0.2; exit 4")
        kept = await driver.driver.start(lasting)
        pid = (await driver.driver.start(short)).pid
        await driver.driver.close()
        driver.exits.clear()
        await gone(pid=pid)
        await driver.driver.open(driver.on_exit)
        found = {i.key: i for i in await driver.driver.recover()}
        assert found[lasting.key] == kept
        assert (await driver.driver.wait(short.key)).code == 4
        await eventually(lambda: told(driver, short), "the exit is told")

    async def test_after_stop_all_nothing_runs_and_the_ends_are_known_to_the_next(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        started: Instance = await driver.driver.start(one)
        await driver.driver.stop_all(grace_s=5)
        await driver.driver.close()
        assert started.pid is not None
        assert not alive(started.pid)
        await driver.driver.open(driver.on_exit)
        assert (await driver.driver.inspect(one.key)).exit is not None


async def told(driver: Opened, one: InstanceSpec) -> bool:
    return one.key in driver.exits


class Telling:
    """For drivers that see what ends a program as the kernel does."""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGUSR1])
    async def test_every_signal_that_ends_a_program_is_told_exactly(
        self, driver: Opened, number: signal.Signals
    ) -> None:
        one = driver.shell(f"kill -{number.value} $$")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (ended.code, ended.signal, ended.oom_killed, ended.error) == (None, number, False, "")

    async def test_a_suspended_program_is_the_same_process_afterwards(self, driver: Opened) -> None:
        one = driver.shell("n=0; trap 'echo $$ $n' USR1; echo up; while :; do n=$((n+1)); sleep 0.02; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")

        async def asked() -> tuple[int, int]:
            before = len(await driver.lines(one.machine))
            await driver.driver.signal(one.key, signal.SIGUSR1)

            async def answered() -> bool:
                return len(await driver.lines(one.machine)) > before

            await eventually(answered, "it tells who it is")
            pid, counted = (await driver.lines(one.machine))[before].text.split()
            return int(pid), int(counted)

        pid, counted = await asked()
        await driver.driver.suspend(one.key)
        await driver.driver.suspend(one.key)
        await driver.driver.resume(one.key)
        await driver.driver.resume(one.key)
        again, further = await asked()
        assert again == pid
        assert further >= counted


class Talking:
    """For drivers with `terminal`."""

    async def test_a_command_is_talked_to_in_a_terminal_of_its_own(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        terminal = await driver.driver.terminal(one.key, ["sh"], tty=True, columns=91, rows=33, env={"PS1": "ready>"})
        try:
            heard = Heard(terminal)
            await heard.until("ready>")
            await terminal.write(b"test -t 0 && test -t 1 && stty size\n")
            await heard.until("33 91")
            await terminal.resize(100, 40)
            await terminal.write(b"stty size\n")
            await heard.until("40 100")
            mark = word()
            await terminal.write(f"sleep {mark}\n".encode())

            async def sleeps() -> bool:
                return any(p.command == f"sleep {mark}" for p in await driver.driver.processes(one.key))

            await eventually(sleeps, "the command sleeps")
            await terminal.write(b"\x03")  # from the keyboard: there is job control
            await terminal.write(b"echo o''n; exit 6\n")
            await heard.until("on")
            await heard.to_the_end()
            assert await terminal.wait() == (6, None)
        finally:
            await terminal.close()

    async def test_without_a_terminal_the_streams_are_apart(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60", GREETING="hello")
        await driver.driver.start(one)
        script = "echo $GREETING $MORE; cat; echo oh >&2; kill -USR1 $$"
        terminal = await driver.driver.terminal(one.key, ["sh", "-c", script], tty=False, env={"MORE": "you"})
        try:
            heard = Heard(terminal)
            await heard.until("hello you")
            await terminal.write(b"given\n")
            await heard.until("given")
            await terminal.end_input()
            await heard.to_the_end()
            assert heard.streams == {"stdout": b"hello you\ngiven\n", "stderr": b"oh\n"}
            assert await terminal.wait() == (128 + signal.SIGUSR1, signal.SIGUSR1)
        finally:
            await terminal.close()

    @pytest.mark.parametrize("tty", [False, True])
    async def test_what_is_talked_to_is_killed_when_the_talk_is_closed(self, driver: Opened, tty: bool) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        mark = word()
        script = f"trap '' HUP; echo up; sleep {mark}; sleep {mark}"
        terminal = await driver.driver.terminal(one.key, ["sh", "-c", script], tty=tty)
        await Heard(terminal).until("up")
        await terminal.close()
        await terminal.close()

        async def killed() -> bool:
            return not [p for p in await driver.driver.processes(one.key) if mark in p.command]

        await eventually(killed, "nothing of the command is left")
        assert (await driver.driver.inspect(one.key)).exit is None

    async def test_much_goes_through_a_talk_both_ways(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        terminal = await driver.driver.terminal(one.key, ["cat"], tty=False)
        try:
            sent = bytes(range(256)) * 4096

            async def say() -> None:
                await terminal.write(sent)
                await terminal.end_input()

            heard = Heard(terminal)
            await asyncio.gather(say(), heard.to_the_end())
            assert heard.streams["stdout"] == sent
            assert await terminal.wait() == (0, None)
        finally:
            await terminal.close()

    async def test_what_cannot_be_talked_to_is_refused(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        with pytest.raises(UnknownInstance):
            await driver.driver.terminal(one.key, ["sh"], tty=True)
        await driver.driver.start(one)
        for tty in (False, True):
            with pytest.raises(StartFailed, match="no-such-program"):
                await driver.driver.terminal(one.key, ["no-such-program"], tty=tty)


class Limited:
    """For drivers with `limits` and `resize`."""

    async def test_want_of_memory_is_told_apart(self, driver: Opened) -> None:
        one = driver.shell("dd if=/dev/zero of=/dev/null bs=200M count=1; kill -9 $$")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (ended.oom_killed, ended.signal) == (True, signal.SIGKILL)

    async def test_a_fork_bomb_meets_its_limit(self, driver: Opened) -> None:
        one = driver.shell("for i in $(seq 200); do sleep 65 & done; wait")
        await driver.driver.start(one)
        await driver.says(one.machine, "fork")  # the shell's complaint that it could not

    async def test_memory_grows_and_shrinks_while_a_program_runs(self, driver: Opened) -> None:
        use = "dd if=/dev/zero bs=100M count=1 of=/dev/null; echo had $?"
        one = driver.shell(f"trap '{use}' USR1; echo up; while :; do sleep 0.02; done")
        pid = (await driver.driver.start(one)).pid
        await driver.says(one.machine, "up")
        await driver.driver.resize(one.key, replace(one.limits, memory_mib=256))
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "had 0")
        await driver.driver.resize(one.key, replace(one.limits, memory_mib=64))
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "had 137")
        assert (await driver.driver.inspect(one.key)).pid == pid

    async def test_memory_is_not_made_less_than_is_in_use(self, driver: Opened) -> None:
        one = driver.shell("x=$(head -c 24000000 /dev/zero | tr '\\0' a); echo up; sleep 60; :")
        one = replace(one, limits=replace(one.limits, memory_mib=200))
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        with pytest.raises(Refused, match="16 MiB"):
            await driver.driver.resize(one.key, replace(one.limits, memory_mib=16))
        await driver.driver.resize(one.key, replace(one.limits, memory_mib=150, cpu_millis=500, dedicated=True))
        assert (await driver.driver.inspect(one.key)).exit is None


class Imaged:
    """For drivers of images."""

    async def test_an_image_is_prepared_again_and_again_and_a_missing_one_is_refused(self, driver: Opened) -> None:
        await driver.driver.prepare(driver.image)
        await driver.driver.prepare(driver.image)
        with pytest.raises(ImageError):
            await driver.driver.prepare("no-such-image")
        one = replace(driver.shell("true"), image="no-such-image")
        with pytest.raises(ImageError):
            await driver.driver.start(one)
        assert await driver.driver.recover() == []

    async def test_a_program_sees_its_image_and_nothing_of_the_host(self, driver: Opened) -> None:
        there = await driver.run(driver.shell("head -n 1 /etc/passwd; cd /; ls -d bin lib usr/lib 2>/dev/null; true"))
        assert there == ["root:x:0:0:root:/root:/bin/sh", "bin"]

    async def test_command_environment_directory_and_user_are_the_images_where_nothing_else_is_said(
        self, driver: Opened
    ) -> None:
        image = driver.add_image(
            "configured",
            {
                "entrypoint": ("sh", "-c", 'echo "$@"; echo $A $B $HOME; pwd; id -u; id -g; id -G', "sh"),
                "cmd": ("from", "image"),
                "env": (f"PATH={PATH}", "A=image", "B=image"),
                "user": "user",
                "working_dir": "/srv/app",
            },
            [directory("srv"), directory("srv/app")],
        )
        plain = replace(driver.spec(), image=image, env={"B": "machine"})
        common = ["image machine /home/user", "/srv/app", "1000", "1000", "1000 2000"]
        assert await driver.run(plain) == ["from image", *common]
        other = replace(driver.spec(), image=image, env={"B": "machine"}, cmd=("other",))
        assert await driver.run(other) == ["other", *common]
        alone = replace(driver.spec(), image=image, env={}, entrypoint=("id", "-u"), user="0:2000")
        assert await driver.run(alone) == ["0"]
        whole = replace(driver.spec("id", "-g"), image=image, user="0:2000")
        assert await driver.run(whole) == ["2000"]

    async def test_an_unknown_user_is_refused(self, driver: Opened) -> None:
        with pytest.raises(StartFailed, match="nobody-knows"):
            await driver.driver.start(replace(driver.shell("true"), user="nobody-knows"))
        assert await driver.driver.recover() == []

    async def test_a_command_beside_it_has_its_user_and_environment(self, driver: Opened) -> None:
        one = replace(driver.spec("sleep", "60", COLOUR="red"), user="user")
        await driver.driver.start(one)
        done = await driver.driver.exec(one.key, ["sh", "-c", "id -u; echo $COLOUR $HOME"], timeout_s=20)
        assert done.stdout == b"1000\nred /home/user\n"

    async def test_files_are_there_before_the_program(self, driver: Opened) -> None:
        files = [
            File(path="/etc/app/with space.conf", content=b"one\n"),
            File(path="/bin/tool", content=b"#!/bin/sh\necho two\n", mode=0o755),
        ]
        one = replace(driver.shell("cat '/etc/app/with space.conf'; tool; stat -c %a /bin/tool"), files=files)
        assert await driver.run(one) == ["one", "two", "755"]

    async def test_a_tmpfs_is_bounded(self, driver: Opened) -> None:
        script = (
            "grep -c ' /cache tmpfs ' /proc/mounts; head -c 9000000 /dev/zero > /cache/a || echo full; wc -c < /cache/a"
        )
        lines = await driver.run(replace(driver.shell(script), tmpfs=[Tmpfs(path="/cache", size_mib=4)]))
        assert (lines[0], "full" in lines, lines[-1]) == ("1", True, str(4 << 20))

    async def test_a_read_only_root_cannot_be_written_to(self, driver: Opened) -> None:
        one = replace(
            driver.shell("echo a > /a || echo refused; echo b > /tmp/b && echo written"), root=Root(read_only=True)
        )
        one = replace(one, tmpfs=[Tmpfs(path="/tmp", size_mib=1)])
        lines = await driver.run(one)
        assert "refused" in lines
        assert "written" in lines

    async def test_each_start_finds_the_image_as_it_is_unless_the_root_is_kept(self, driver: Opened) -> None:
        script = "ls /etc/motd /new 2>/dev/null; rm -f /etc/passwd; echo a > /etc/motd; echo b > /new; ls / | wc -l"
        first = driver.shell(script)
        once = await driver.run(first)
        await driver.driver.destroy(first.key)
        assert await driver.run(replace(first, key=f"{first.key}2")) == once
        kept = replace(driver.shell(script), root=Root(persist=True))
        await driver.run(kept)
        await driver.driver.destroy(kept.key)
        again = replace(
            driver.shell("ls /etc/motd /new; ls /etc/passwd || echo gone"), root=kept.root, machine=kept.machine
        )
        lines = await driver.run(again)
        assert "/etc/motd" in lines
        assert "/new" in lines
        assert "gone" in lines
        await driver.driver.destroy(again.key)
        await driver.driver.purge(kept.machine)
        anew = replace(driver.shell("ls /new || echo gone"), root=kept.root, machine=kept.machine)
        assert "gone" in await driver.run(anew)

    @pytest.mark.parametrize("persist", [False, True])
    async def test_a_machine_that_fills_its_disk_meets_its_bound(self, driver: Opened, persist: bool) -> None:
        script = "dd if=/dev/zero of=/big bs=1M count=40 || echo full; rm /big; echo room > /small && cat /small"
        one = replace(driver.shell(script), root=Root(size_mib=32, persist=persist))
        lines = await driver.run(one)
        assert "full" in lines
        assert lines[-1] == "room"

    async def test_it_has_a_name(self, driver: Opened) -> None:
        script = "hostname; grep -c named /etc/hosts"
        assert await driver.run(replace(driver.shell(script), hostname="named")) == ["named", "1"]
        one = driver.shell("hostname")
        assert await driver.run(one) == [one.machine]


class Killed:
    """For drivers with a supervisor. `factory` is `module:function`, which makes the driver of a directory."""

    factory: ClassVar[str]

    async def test_it_runs_on_when_its_daemon_is_killed(self, driver: Opened, tmp_path: Path) -> None:
        module, _, function = self.factory.partition(":")
        place = tmp_path / "elsewhere"
        code = DAEMON.format(module=module, function=function)
        with subprocess.Popen(  # noqa: ASYNC220  # a real process to kill
            [sys.executable, "-c", code, str(place), driver.image], stdout=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stdout is not None
            line = await asyncio.to_thread(daemon.stdout.readline)
            daemon.kill()
        key, machine, pid = line.split()
        made: Driver = getattr(__import__(module, fromlist=[function]), function)(place)
        async with opened(made, driver.image) as it:
            (found,) = await it.driver.recover()
            assert (found.key, found.pid) == (key, int(pid))
            assert alive(int(pid))
            await it.says(machine, "here")
            ended = await it.driver.stop(key, signal=signal.SIGTERM, grace_s=20)
            assert (ended.code, ended.signal) == (5, None)

    async def test_it_runs_on_when_its_supervisor_is_killed(self, driver: Opened) -> None:
        one = driver.shell("trap 'exit 5' TERM; while :; do echo tick; sleep 0.05; done")
        started = await driver.driver.start(one)
        await driver.says(one.machine, "tick")
        await driver.kill_supervisor()
        assert started.pid is not None
        assert alive(started.pid)
        assert (await driver.driver.recover()) == [started]
        before = len(await driver.lines(one.machine))

        async def goes_on() -> bool:
            return len(await driver.lines(one.machine)) > before

        await eventually(goes_on, "its output is kept again")
        assert (await driver.driver.exec(one.key, ["echo", "hello"], timeout_s=20)).stdout == b"hello\n"
        ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=10)
        if self.keeps_status():
            assert (ended.code, ended.signal, ended.error) == (5, None, "")
        assert not alive(started.pid)

    async def test_what_is_killed_with_its_supervisor_is_told_as_ended(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        started = await driver.driver.start(one)
        assert started.pid is not None
        os.kill(await driver.supervisor(), signal.SIGKILL)
        os.kill(started.pid, signal.SIGKILL)
        await eventually(lambda: told(driver, one), "the exit is told")
        assert driver.exits[one.key].status != 0
        await driver.driver.destroy(one.key)
        assert await driver.driver.recover() == []

    async def test_after_a_reboot_nothing_runs_and_what_is_kept_is_there(self, driver: Opened) -> None:
        mark = word()
        one = replace(driver.shell(f"echo a > kept; echo up; sleep {mark}"), root=Root(persist=True))
        other = driver.shell(f"echo up; sleep {mark}")
        for each in (one, other):
            await driver.driver.start(each)
            await driver.says(each.machine, "up")
        await self.reboot(driver, mark)
        await driver.driver.open(driver.on_exit)
        assert [instance for instance in await driver.driver.recover() if instance.exit is None] == []
        for each in (one, other):
            await driver.driver.destroy(each.key, force=True)
        again = replace(driver.shell("cat kept"), root=one.root, machine=one.machine)
        again = replace(again, key=f"{again.key}2")
        assert await driver.run(again) == ["a"]

    async def reboot(self, driver: Opened, mark: str) -> None:
        """Everything gone at once: the daemon's connection, the supervisor, the machines, what is in memory."""
        assert isinstance(driver.driver, SupervisedDriver)
        place = driver.driver.supervisor.directory
        pids = [await driver.supervisor(), *[i.pid for i in await driver.driver.recover() if i.pid]]
        await driver.driver.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            await gone(pid=pid)
        for pid in marked(mark):  # without cgroups nobody else would: the kernel of this host goes on
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await gone(mark)
        if (place / "run").is_symlink():
            shutil.rmtree((place / "run").readlink())

    def keeps_status(self) -> bool:
        """Whether the status of a program that is no child of the supervisor can be known."""
        return kernel() >= (6, 15)


DAEMON = """
import asyncio, sys
from pathlib import Path
from {module} import {function} as make
from tests.live.driver_conformance import shell

async def main():
    driver = make(Path(sys.argv[1]))
    await driver.open(lambda exit_: None)
    one = shell("trap 'exit 5' TERM; echo here; while :; do sleep 0.05; done", image=sys.argv[2])
    started = await driver.start(one)
    while not [line async for line in driver.logs(one.machine)]:
        await asyncio.sleep(0.01)
    print(one.key, one.machine, started.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Heard:
    """What a `Terminal` said."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.streams: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    async def until(self, text: str) -> None:
        async with asyncio.timeout(15):
            while text.encode() not in self.streams["stdout"]:
                assert await self._more(), f"{text!r} is not in {self.streams}"

    async def to_the_end(self) -> None:
        async with asyncio.timeout(15):
            while await self._more():
                pass

    async def _more(self) -> bool:
        chunk = await self._terminal.read()
        if chunk is None:
            return False
        self.streams[chunk[0]] += chunk[1]
        return True


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


async def gone(mark: str = "", pid: int | None = None) -> None:
    """Wait until no process with this word in its command line is on the host, nor the one with this id."""

    async def nothing() -> bool:
        return not (pid and alive(pid)) and not (mark and marked(mark))

    await eventually(nothing, f"nothing of {mark} {pid} runs", seconds=5)


def marked(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                if mark.encode() in file.read() and alive(int(name)):
                    found.append(int(name))
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
