"""What drivers must do that have an ability not all have: to tell signals, to be talked to, to bound what runs."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Heard, Opened
from tests.kit.processes import word
from tests.kit.tiers import full
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import Refused, StartFailed, UnknownInstance


class Telling:
    """For drivers that see what ends a program as the kernel does."""

    @pytest.mark.parametrize(
        "number", [signal.SIGKILL, *full(signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGUSR1)]
    )
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
        await driver.suspending.suspend(one.key)
        await driver.suspending.suspend(one.key)
        await driver.suspending.resume(one.key)
        await driver.suspending.resume(one.key)
        again, further = await asked()
        assert again == pid
        assert further >= counted


class Talking:
    """For drivers with `terminal`."""

    async def test_a_command_is_talked_to_in_a_terminal_of_its_own(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        terminal = await driver.terminals.terminal(
            one.key, ["sh"], tty=True, columns=91, rows=33, env={"PS1": "ready>"}
        )
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
        terminal = await driver.terminals.terminal(one.key, ["sh", "-c", script], tty=False, env={"MORE": "you"})
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

    async def test_what_is_talked_to_is_killed_when_the_talk_is_closed(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        for tty in (False, True):
            mark = word()
            script = f"trap '' HUP; echo up; sleep {mark}; sleep {mark}"
            terminal = await driver.terminals.terminal(one.key, ["sh", "-c", script], tty=tty)
            await Heard(terminal).until("up")
            await terminal.close()
            await terminal.close()

            async def killed(mark: str = mark) -> bool:
                return not [p for p in await driver.driver.processes(one.key) if mark in p.command]

            await eventually(killed, "nothing of the command is left")
        assert (await driver.driver.inspect(one.key)).exit is None

    async def test_much_goes_through_a_talk_both_ways(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        terminal = await driver.terminals.terminal(one.key, ["cat"], tty=False)
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
            await driver.terminals.terminal(one.key, ["sh"], tty=True)
        await driver.driver.start(one)
        for tty in (False, True):
            with pytest.raises(StartFailed, match="no-such-program"):
                await driver.terminals.terminal(one.key, ["no-such-program"], tty=tty)


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
        await driver.resizing.resize(one.key, dataclasses.replace(one.limits, memory_mib=256))
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "had 0")
        await driver.resizing.resize(one.key, dataclasses.replace(one.limits, memory_mib=64))
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "had 137")
        assert (await driver.driver.inspect(one.key)).pid == pid

    async def test_memory_is_not_made_less_than_is_in_use(self, driver: Opened) -> None:
        one = driver.shell("x=$(head -c 24000000 /dev/zero | tr '\\0' a); echo up; sleep 60; :")
        one = replace(one, limits=dataclasses.replace(one.limits, memory_mib=200))
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        with pytest.raises(Refused, match="16 MiB"):
            await driver.resizing.resize(one.key, dataclasses.replace(one.limits, memory_mib=16))
        await driver.resizing.resize(
            one.key, dataclasses.replace(one.limits, memory_mib=150, cpu_millis=500, dedicated=True)
        )
        assert (await driver.driver.inspect(one.key)).exit is None
