"""What every driver must do. A driver's tests subclass `Conformance` and the classes for what the driver can
(`abilities`, `images`, `kills`), and give them a `driver` fixture.

The programs are scripts for any shell, busybox's too. Process ids are compared with others from inside only; that
nothing of an instance runs any more is asked of the host, by a word in the command lines that no other test uses.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import ClassVar

import pytest
from msgspec.structs import replace
from tests.kit.drivers import Opened, told
from tests.kit.processes import alive, gone, word
from tests.kit.tiers import full
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import Instance, InstanceRunning, StartFailed, UnknownInstance


class Conformance:
    """The suite. `driver` yields an `Opened`. In `late_s` seconds a command certainly has begun."""

    late_s: ClassVar[float] = 0.3

    async def test_a_program_runs_and_its_exit_code_is_kept_until_destroy(self, driver: Opened) -> None:
        """Several may wait for it, and also after the end; and what ended is not started again."""
        one = driver.shell("exit 7")
        started = await driver.driver.start(one)
        assert (started.key, started.machine) == (one.key, one.machine)
        ended, *others = await asyncio.gather(*(driver.driver.wait(one.key) for _ in range(3)))
        assert (ended.code, ended.signal, ended.oom_killed, ended.status) == (7, None, False, 7)
        assert [*others, await driver.driver.wait(one.key)] == [ended] * 3
        assert (await driver.driver.inspect(one.key)).exit == ended
        assert driver.exits[one.key] == ended
        assert (await driver.driver.start(one)).exit == ended
        await driver.driver.destroy(one.key)
        with pytest.raises(UnknownInstance):
            await driver.driver.inspect(one.key)

    async def test_a_program_that_a_signal_ended_says_which(self, driver: Opened) -> None:
        one = driver.shell("kill -SEGV $$")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (ended.code, ended.signal, ended.status) == (None, signal.SIGSEGV, 128 + signal.SIGSEGV)

    async def test_a_program_with_a_terminal_has_it_for_input_output_and_errors(self, driver: Opened) -> None:
        """And it is the terminal of its session; what it shows is one stream. Nobody types: whoever reads waits."""
        script = "test -t 0 && test -t 1 && test -t 2 && tty; stty size; echo mine > /dev/tty; echo oh >&2; echo $TERM"
        one = replace(driver.shell(f"{script}; read line; exit 9"), tty=True)
        await driver.driver.start(one)
        await driver.says(one.machine, "xterm")
        assert (await driver.driver.inspect(one.key)).exit is None
        assert (await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=20)).signal == signal.SIGTERM
        name, *rest = [(line.stream, line.text) for line in await driver.lines(one.machine)]
        assert name[1].startswith("/dev/pts/")
        assert {name[0], *(stream for stream, _ in rest)} == {"stdout"}
        assert [text for _, text in rest] == ["24 80", "mine", "oh", "xterm"]

    async def test_the_same_key_starts_one_program(self, driver: Opened) -> None:
        one = driver.shell("echo here; sleep 60")
        first, second = await asyncio.gather(driver.driver.start(one), driver.driver.start(one))
        assert first == second
        await driver.says(one.machine, "here")
        assert len([line for line in await driver.lines(one.machine) if line.text == "here"]) == 1

    @pytest.mark.parametrize("program", ["no-such-program", "/etc/passwd", *full("/no/such/program")])
    async def test_what_cannot_be_started_is_refused_and_leaves_nothing(self, driver: Opened, program: str) -> None:
        one = driver.spec(program)
        with pytest.raises(StartFailed, match=program):
            await driver.driver.start(one)
        assert await driver.driver.recover() == []

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

    async def test_signals_reach_the_program_and_stop_asks_with_one_first(self, driver: Opened) -> None:
        one = driver.shell(
            "trap 'echo usr1' USR1; trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.05; done"
        )
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "usr1")
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

    async def test_a_command_runs_beside_the_program_is_killed_at_its_time_out_and_cannot_flood(
        self, driver: Opened
    ) -> None:
        one = driver.shell("pwd; sleep 60", GREETING="hello")
        await driver.driver.start(one)
        script = "echo $GREETING; cat; echo oh >&2; exit 3"
        done = await driver.driver.exec(one.key, ["sh", "-c", script], stdin=b"in\n", timeout_s=20)
        assert (done.code, done.stdout, done.stderr) == (3, b"hello\nin\n", b"oh\n")
        assert (done.timed_out, done.truncated) == (False, False)
        where = await driver.driver.exec(one.key, ["pwd"], timeout_s=20)
        await driver.says(one.machine, where.stdout.decode().strip())
        mark = word()
        late = await driver.driver.exec(
            one.key, ["sh", "-c", f"echo on; sleep {mark}; echo never"], timeout_s=self.late_s
        )
        assert (late.timed_out, late.stdout) == (True, b"on\n")

        async def killed() -> bool:
            return not [p for p in await driver.driver.processes(one.key) if mark in p.command]

        await eventually(killed, "the command and what it started are gone")
        flood = await driver.driver.exec(one.key, ["sh", "-c", "head -c 3000000 /dev/zero"], timeout_s=20)
        assert (len(flood.stdout), flood.truncated) == (1 << 20, True)
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

    async def test_a_suspended_program_stands_still_and_goes_on(self, driver: Opened) -> None:
        one = driver.shell("while :; do echo tick; sleep 0.02; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "tick")
        await driver.suspending.suspend(one.key)
        assert (await driver.driver.inspect(one.key)).suspended
        readings: list[float] = []

        async def stands_still() -> bool:
            readings.append((await driver.driver.stats(one.key)).cpu_s)
            return len(readings) > 10 and len(set(readings[-10:])) == 1

        await eventually(stands_still, "it uses no cpu for a tenth of a second; it ticks fifty times a second")
        await driver.suspending.resume(one.key)
        assert not (await driver.driver.inspect(one.key)).suspended
        before = len(await driver.lines(one.machine))

        async def goes_on() -> bool:
            return len(await driver.lines(one.machine)) > before

        await eventually(goes_on, "it ticks again")

    async def test_a_suspended_program_can_be_stopped(self, driver: Opened) -> None:
        one = driver.spec("sleep", "60")
        await driver.driver.start(one)
        await driver.suspending.suspend(one.key)
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
