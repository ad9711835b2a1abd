"""What every driver must do. A driver's tests subclass `Conformance` and give it a `driver` fixture.

The programs are shell scripts of the host, so a driver of images needs one with a shell.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from tests.kit.waiting import eventually

from hawker.supervisor import proc
from hawker.worker.drivers.base import (
    Driver,
    Exit,
    Instance,
    InstanceRunning,
    InstanceSpec,
    Limits,
    LogLine,
    StartFailed,
    UnknownInstance,
)

PATH = "/usr/local/bin:/usr/bin:/bin"
_numbers = count(1)


def spec(*argv: str, **env: str) -> InstanceSpec:
    """An instance of a machine of its own."""
    n = next(_numbers)
    return InstanceSpec(
        key=f"run{n:04d}/launch",
        machine=f"{n:014x}",
        image="host",
        argv=argv,
        env={"PATH": PATH, **env},
        limits=Limits(cpu_millis=100, memory_mib=64, pids=64),
    )


def shell(script: str, **env: str) -> InstanceSpec:
    return spec("sh", "-c", script, **env)


class Opened:
    """An open driver and the exits it told of."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.exits: dict[str, Exit] = {}

    def on_exit(self, ended: Exit) -> None:
        self.exits[ended.key] = ended

    async def says(self, machine: str, text: str) -> None:
        """Wait until the machine's log holds a line with this text."""

        async def found() -> bool:
            return any(text in line.text for line in await self.lines(machine))

        await eventually(found, f"{machine} says {text}")

    async def lines(self, machine: str, tail: int = 1000) -> list[LogLine]:
        return [line async for line in self.driver.logs(machine, tail=tail)]


@asynccontextmanager
async def opened(driver: Driver) -> AsyncIterator[Opened]:
    """Open a driver; at the end stop everything it runs."""
    it = Opened(driver)
    await driver.open(it.on_exit)
    try:
        yield it
    finally:
        await driver.stop_all(grace_s=0)
        await driver.close()


class Conformance:
    """The suite. `driver` yields an `Opened`."""

    async def test_a_program_runs_and_its_exit_code_is_kept_until_destroy(self, driver: Opened) -> None:
        one = shell("exit 7")
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
        one = shell("kill -SEGV $$")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (ended.code, ended.signal, ended.status) == (None, signal.SIGSEGV, 128 + signal.SIGSEGV)

    async def test_the_same_key_starts_one_program(self, driver: Opened) -> None:
        one = shell("echo here; sleep 60")
        first, second = await asyncio.gather(driver.driver.start(one), driver.driver.start(one))
        assert first == second
        await driver.says(one.machine, "here")
        assert len([line for line in await driver.lines(one.machine) if line.text == "here"]) == 1

    async def test_a_key_that_ended_is_not_started_again(self, driver: Opened) -> None:
        one = shell("exit 0")
        await driver.driver.start(one)
        ended = await driver.driver.wait(one.key)
        assert (await driver.driver.start(one)).exit == ended

    @pytest.mark.parametrize("argv", [("no-such-program",), ("/no/such/program",), ("/etc/passwd",)])
    async def test_what_cannot_be_started_is_refused_and_leaves_nothing(
        self, driver: Opened, argv: tuple[str, ...]
    ) -> None:
        one = spec(*argv)
        with pytest.raises(StartFailed, match=argv[0]):
            await driver.driver.start(one)
        assert await driver.driver.recover() == []

    async def test_several_may_wait_and_also_after_the_end(self, driver: Opened) -> None:
        one = shell("exit 3")
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
        one = shell("trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.05; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=20)
        assert ended.code == 5
        assert "asked" in [line.text for line in await driver.lines(one.machine)]

    async def test_a_program_can_be_interrupted(self, driver: Opened) -> None:
        """Nothing may be ignored on its behalf: SIGINT is how machines are stopped unless they say otherwise."""
        one = spec("sleep", "60")
        await driver.driver.start(one)
        assert (await driver.driver.stop(one.key, signal=signal.SIGINT, grace_s=20)).signal == signal.SIGINT

    async def test_stop_kills_what_ignores_the_signal_with_its_whole_tree(self, driver: Opened) -> None:
        one = shell("trap '' TERM; (setsid sleep 61 &); sleep 62 & echo up; while :; do sleep 0.05; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        pids = [p.pid for p in await driver.driver.processes(one.key)]
        assert len(pids) >= 3
        ended = await driver.driver.stop(one.key, signal=signal.SIGTERM, grace_s=0.1)
        assert ended.signal == signal.SIGKILL
        await dead(*pids)

    async def test_what_a_program_leaves_behind_ends_with_it(self, driver: Opened) -> None:
        one = shell("(setsid sh -c 'echo $$; exec sleep 63' &) ; sleep 0.3; exit 0")
        await driver.driver.start(one)
        await driver.driver.wait(one.key)
        (line,) = await driver.lines(one.machine)
        await dead(int(line.text))

    async def test_a_running_instance_is_destroyed_only_by_force(self, driver: Opened) -> None:
        one = spec("sleep", "60")
        pid = (await driver.driver.start(one)).pid
        with pytest.raises(InstanceRunning):
            await driver.driver.destroy(one.key)
        await driver.driver.destroy(one.key, force=True)
        await driver.driver.destroy(one.key, force=True)
        assert pid is not None
        assert not alive(pid)

    async def test_a_command_runs_beside_the_program(self, driver: Opened) -> None:
        one = shell("pwd; sleep 60", GREETING="hello")
        await driver.driver.start(one)
        script = "echo $GREETING; cat; echo oh >&2; exit 3"
        done = await driver.driver.exec(one.key, ["sh", "-c", script], stdin=b"in\n", timeout_s=20)
        assert (done.code, done.stdout, done.stderr, done.timed_out) == (3, b"hello\nin\n", b"oh\n", False)
        where = await driver.driver.exec(one.key, ["pwd"], timeout_s=20)
        await driver.says(one.machine, where.stdout.decode().strip())

    async def test_a_command_is_killed_at_its_time_out_and_cannot_flood(self, driver: Opened) -> None:
        one = spec("sleep", "60")
        await driver.driver.start(one)
        late = await driver.driver.exec(one.key, ["sh", "-c", "echo $$; sleep 64; echo never"], timeout_s=0.3)
        assert late.timed_out
        assert b"never" not in late.stdout
        await dead(int(late.stdout))
        flood = await driver.driver.exec(one.key, ["sh", "-c", "head -c 3000000 /dev/zero"], timeout_s=20)
        assert len(flood.stdout) == 1 << 20
        with pytest.raises(StartFailed):
            await driver.driver.exec(one.key, ["no-such-program"], timeout_s=5)

    async def test_output_is_kept_line_by_line_also_the_last_without_a_newline(self, driver: Opened) -> None:
        one = shell("echo one; echo two >&2; printf three")
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
        one = shell("echo before; while read -r line; do echo $line; done < pipe", A="b")
        await driver.driver.start(shell_with_pipe(one))
        await driver.says(one.machine, "before")
        following = driver.driver.logs(one.machine, tail=10, follow=True)
        assert (await anext(following)).text == "before"
        nxt = asyncio.ensure_future(anext(following))
        await driver.driver.exec(one.key, ["sh", "-c", "echo live > pipe"], timeout_s=20)
        assert (await asyncio.wait_for(nxt, 15)).text == "live"
        await following.aclose()  # type: ignore[attr-defined]  # an async generator

    async def test_use_is_counted(self, driver: Opened) -> None:
        one = shell("echo up; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 60")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")

        async def worked() -> bool:
            return (await driver.driver.stats(one.key)).cpu_s > 0

        await eventually(worked, "cpu time is counted")
        stats = await driver.driver.stats(one.key)
        assert stats.memory_bytes > 0
        assert stats.processes >= 1

    async def test_listening_sockets_are_seen(self, driver: Opened) -> None:
        code = "import socket,time; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
        code += "time.sleep(60)"
        one = spec("python3", "-c", code)
        await driver.driver.start(one)

        async def listens() -> bool:
            told = await driver.lines(one.machine)
            return bool(told) and any(p.listen for p in await driver.driver.processes(one.key))

        await eventually(listens, "a socket listens")
        (line,) = await driver.lines(one.machine)
        listening = [entry for p in await driver.driver.processes(one.key) for entry in p.listen]
        assert [tuple(entry) for entry in listening] == [("tcp", f"127.0.0.1:{line.text}")]

    async def test_signals_reach_the_program(self, driver: Opened) -> None:
        one = shell("trap 'echo usr1' USR1; echo up; while :; do sleep 0.05; done")
        await driver.driver.start(one)
        await driver.says(one.machine, "up")
        await driver.driver.signal(one.key, signal.SIGUSR1)
        await driver.says(one.machine, "usr1")

    async def test_a_suspended_program_stands_still_and_goes_on(self, driver: Opened) -> None:
        one = shell("while :; do echo tick; sleep 0.02; done")
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
        one = spec("sleep", "60")
        await driver.driver.start(one)
        await driver.driver.suspend(one.key)
        assert (await driver.driver.stop(one.key, signal=15, grace_s=20)).signal == signal.SIGKILL

    async def test_it_takes_hold_again_of_what_runs_and_tells_what_ended(self, driver: Opened) -> None:
        lasting, short = spec("sleep", "60"), shell("sleep 0.2; exit 4")
        kept = await driver.driver.start(lasting)
        await driver.driver.start(short)
        await driver.driver.close()
        driver.exits.clear()

        async def ended() -> bool:
            return not alive_marked(short.key)

        await eventually(ended, "the short program has ended")
        await driver.driver.open(driver.on_exit)
        found = {i.key: i for i in await driver.driver.recover()}
        assert found[lasting.key] == kept
        assert (await driver.driver.wait(short.key)).code == 4
        await eventually(lambda: told(driver, short), "the exit is told")

    async def test_after_stop_all_nothing_runs_and_the_ends_are_known_to_the_next(self, driver: Opened) -> None:
        one = spec("sleep", "60")
        started: Instance = await driver.driver.start(one)
        await driver.driver.stop_all(grace_s=5)
        await driver.driver.close()
        assert started.pid is not None
        assert not alive(started.pid)
        await driver.driver.open(driver.on_exit)
        assert (await driver.driver.inspect(one.key)).exit is not None


async def told(driver: Opened, one: InstanceSpec) -> bool:
    return one.key in driver.exits


def shell_with_pipe(one: InstanceSpec) -> InstanceSpec:
    """The same, with a named pipe in its directory that it reads."""
    script = f"mkfifo pipe; exec 3<>pipe; {one.argv[2]}"
    return InstanceSpec(
        key=one.key, machine=one.machine, image=one.image, argv=("sh", "-c", script), env=one.env, limits=one.limits
    )


async def dead(*pids: int) -> None:
    """Wait until processes that were killed are gone: one that is dying has no environment left to be known by, and is
    for a moment not a zombie yet."""

    async def gone() -> bool:
        return not any(map(alive, pids))

    await eventually(gone, f"{pids} are dead", seconds=5)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def alive_marked(key: str) -> bool:
    """Whether a live process carries an instance's mark."""
    return any(proc.marker(pid).endswith(f":{key}") for pid in proc.everyone())
