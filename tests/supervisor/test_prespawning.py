"""A prespawned start: its process waits at a gate, runs as soon as somebody opens the gate, and leaves nothing when
nobody does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit import cgroups
from tests.kit.processes import alive, gone, marked, word
from tests.kit.waiting import eventually, until

from hawker.init.build import program
from hawker.init.place import shared
from hawker.supervisor import calls
from hawker.worker.drivers.base import Exit, Instance, StartFailed, Stats
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.wire import RunningSupervisor

LIMITS = calls.Limits(cpu_millis=100, memory_mib=64, pids=64)
KEY = "run/launch"


class Prespawning(Supervisor):
    ends: list[Exit]

    async def waiting(self, *argv: str) -> int:
        """The process that waits to become this program."""
        assert self.prespawn(start(*argv))
        assert await self.call(calls.ListInstances(), list[Instance]) == []
        return int(json.loads((self.directory / "run/run.launch.record").read_bytes())["pid"])

    async def four_blank(self) -> bool:
        return len(await self.blank()) == 4

    async def blank(self) -> list[int]:
        """Processes that were told nothing yet."""
        own = (await self.call(calls.Hello(), RunningSupervisor)).pid
        return [pid for pid in children_of(own) if "standby-" in command(pid)[0]]


both = pytest.mark.parametrize(
    "supervisor",
    ["--no-cgroups", pytest.param("", marks=pytest.mark.root)],
    ids=["no-cgroups", "cgroups"],
    indirect=True,
)


@pytest.fixture
async def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Prespawning]:
    connection = Prespawning(tmp_path / "there", *filter(None, [getattr(request, "param", "--no-cgroups")]))
    connection.ends = []
    await connection.open(connection.ends.append)
    connection.keep_standby(str(program("standby", shared() or tmp_path)))
    await connection.call(calls.Hello(), RunningSupervisor)
    yield connection
    await connection.shut_down(grace_s=0)
    await connection.close()


def start(*argv: str, key: str = KEY) -> calls.Start:
    return calls.Start(key=key, machine="m", argv=argv, env={"A": ""}, limits=LIMITS)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] or [""]
    except FileNotFoundError:
        return [""]


@both
async def test_its_process_becomes_the_program_once_that_is_ordered(supervisor: Prespawning) -> None:
    mark = word()
    pid = await supervisor.waiting("/bin/sh", "-c", 'test "$1" = "" && exec sleep $2', "-", "", mark)
    assert marked(mark) == []
    started = await supervisor.call(start("/bin/sh", "-c", 'test "$1" = "" && exec sleep $2', "-", "", mark), Instance)
    assert started.pid == pid
    await until(lambda: command(pid) == ["sleep", mark])
    await until(lambda: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])  # once its libraries are loaded
    assert os.getpgid(pid) == os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == str(supervisor.directory / "work" / "m")
    assert (await supervisor.call(calls.ReadStats(key=KEY), Stats)).processes == 1
    os.kill(pid, signal.SIGTERM)
    assert (await supervisor.call(calls.Wait(key=KEY), Exit)).signal == signal.SIGTERM


async def test_it_runs_as_soon_as_its_daemon_lets_it_go_and_is_what_the_order_finds(supervisor: Prespawning) -> None:
    mark = word()
    pid = await supervisor.waiting("/bin/sleep", mark)
    assert supervisor.release_start(KEY)
    await until(lambda: marked(mark) == [pid])
    assert await supervisor.call(calls.ListInstances(), list[Instance]) == []
    started = await supervisor.call(start("/bin/sleep", mark), Instance)
    assert started.pid == pid
    assert not supervisor.release_start(KEY)


@pytest.mark.parametrize("end", ["no order", "daemon gone", "supervisor killed", "another order"])
async def test_what_was_let_go_is_known_whether_or_not_it_was_ordered(supervisor: Prespawning, end: str) -> None:
    """Whoever is killed between the two: whoever asks for that start later has it."""
    mark = word()
    pid = await supervisor.waiting("/bin/sleep", mark)
    assert supervisor.release_start(KEY)
    if end == "daemon gone":
        await supervisor.close()
        await supervisor.open(lambda ended: None)
    elif end == "supervisor killed":
        await until(lambda: marked(mark) == [pid])
        os.kill((await supervisor.call(calls.Hello(), RunningSupervisor)).pid, signal.SIGKILL)
    elif end == "another order":
        assert (await supervisor.call(start("/bin/sleep", word()), Instance)).pid == pid

    async def known() -> bool:
        return [each.pid for each in await supervisor.call(calls.ListInstances(), list[Instance])] == [pid]

    await eventually(known, "the program is known")
    assert marked(mark) == [pid]
    assert (await supervisor.call(start("/bin/sleep", mark), Instance)).pid == pid
    assert marked(mark) == [pid]


@both
async def test_the_end_of_what_was_let_go_is_told_without_an_order(supervisor: Prespawning) -> None:
    await supervisor.waiting("/bin/sh", "-c", "exit 7")
    assert supervisor.release_start(KEY)
    await until(lambda: [ended.code for ended in supervisor.ends] == [7])
    assert (await supervisor.call(start("/bin/sh", "-c", "exit 7"), Instance)).exit == supervisor.ends[0]


@both
async def test_what_was_let_go_is_destroyed_with_its_key(supervisor: Prespawning) -> None:
    mark = word()
    await supervisor.waiting("/bin/sleep", mark)
    assert supervisor.release_start(KEY)
    await supervisor.call(calls.Destroy(key=KEY, force=True))
    await nothing_left(supervisor, mark, but=("m",))  # its machine has been there, and may start again


async def test_another_order_starts_another_process(supervisor: Prespawning) -> None:
    mark, other = word(), word()
    pid = await supervisor.waiting("/bin/sleep", mark)
    started = await supervisor.call(start("/bin/sleep", other), Instance)
    assert started.pid != pid
    await gone(pid=pid)
    assert started.pid
    assert alive(started.pid)


async def test_one_that_ended_while_it_waited_is_started_anew(supervisor: Prespawning) -> None:
    mark = word()
    pid = await supervisor.waiting("/bin/sleep", mark)
    os.kill(pid, signal.SIGKILL)
    await gone(pid=pid)
    started = await supervisor.call(start("/bin/sleep", mark), Instance)
    await until(lambda: command(started.pid or 0) == ["/bin/sleep", mark])


@pytest.mark.parametrize("released", [False, True], ids=["ordered", "let go"])
async def test_a_program_that_the_kernel_does_not_take_is_told_of_as_ever(
    supervisor: Prespawning, tmp_path: Path, released: bool
) -> None:
    broken = tmp_path / word()
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    pid = await supervisor.waiting(str(broken))
    if released:
        assert supervisor.release_start(KEY)
        await gone(pid=pid)
    with pytest.raises(StartFailed, match=r"cannot be started: .*Exec format error"):
        await supervisor.call(start(str(broken)), Instance)
    await nothing_left(supervisor, broken.name)


@both
@pytest.mark.parametrize("end", ["no order", "daemon gone", "supervisor killed", "destroyed", "host shuts down"])
async def test_it_leaves_nothing_without_its_order(supervisor: Prespawning, end: str) -> None:
    mark = word()
    pid = await supervisor.waiting("/bin/sleep", mark)
    if end == "daemon gone":
        await supervisor.close()
        await supervisor.open(lambda ended: None)
    elif end == "supervisor killed":
        os.kill((await supervisor.call(calls.Hello(), RunningSupervisor)).pid, signal.SIGKILL)
    elif end == "destroyed":
        await supervisor.call(calls.Destroy(key=KEY, force=True))
    elif end == "host shuts down":
        await supervisor.shut_down(grace_s=0)
        await supervisor.open(lambda ended: None)
    await gone(pid=pid)
    await nothing_left(supervisor, mark)


async def nothing_left(supervisor: Prespawning, mark: str, but: tuple[str, ...] = ()) -> None:
    """`but` are the machines that keep their directories."""
    await gone(mark)
    assert await supervisor.call(calls.ListInstances(), list[Instance]) == []

    async def clean() -> bool:
        await supervisor.call(calls.Hello(), RunningSupervisor)
        files = [name for name in os.listdir(supervisor.directory / "run") if not name.startswith("blank.")]
        files += [name for name in os.listdir(supervisor.directory / "work") if name not in but]
        return not files and not cgroups.machine_groups(supervisor.directory)

    await eventually(clean, "its files, its directory and its group are removed")


@pytest.mark.parametrize("end", ["daemon gone", "supervisor killed"])
async def test_processes_are_kept_ready_as_long_as_a_daemon_is_there(supervisor: Prespawning, end: str) -> None:
    await eventually(supervisor.four_blank, "four wait to be told something")
    first = await supervisor.blank()
    pid = await supervisor.waiting("/bin/sleep", word())
    assert pid in first
    await eventually(supervisor.four_blank, "another one has taken its place")
    kept = await supervisor.blank()
    if end == "daemon gone":
        await supervisor.close()
    else:
        os.kill((await supervisor.call(calls.Hello(), RunningSupervisor)).pid, signal.SIGKILL)
    for each in kept:
        await gone(pid=each)


async def test_however_many_are_taken_one_after_the_other_each_is_a_process_of_its_own_and_four_wait_again(
    supervisor: Prespawning,
) -> None:
    mark = word()
    await eventually(supervisor.four_blank, "four wait to be told something")
    first = await supervisor.blank()
    keys = [f"run-{number}/launch" for number in range(12)]
    for key in keys:
        assert supervisor.prespawn(start("/bin/sleep", mark, key=key))
    started = [await supervisor.call(start("/bin/sleep", mark, key=key), Instance) for key in keys]
    pids = [each.pid or 0 for each in started]
    assert len(set(pids)) == 12
    assert set(first) < set(pids)
    await until(lambda: sorted(marked(mark)) == sorted(pids))
    await eventually(supervisor.four_blank, "others have taken their places")
