"""What a supervisor is asked and finds, where something is wrong with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import wait_until

from hawker.errors import Unreachable
from hawker.supervisor import calls
from hawker.worker.drivers.base import Exit, Instance, StartFailed, UnknownInstance
from hawker.worker.drivers.supervised import Made
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.terminal import converse
from hawker.worker.drivers.wire import RunningSupervisor, encoded

LIMITS = calls.Limits(cpu_millis=100, memory_mib=64, pids=64)
KEY = "run/launch"


async def run(supervisor: Supervisor) -> int:
    """Gives the supervisor's pid."""
    await supervisor.call(calls.Start(key=KEY, machine="m", argv=["/bin/sleep", "60"], env={}, limits=LIMITS), Instance)
    return (await supervisor.call(calls.Hello(), RunningSupervisor)).pid


def container(*, runtime: str, size_mib: int) -> calls.MakeContainer:
    return calls.MakeContainer(
        key=KEY,
        machine="m",
        runtime=runtime,
        init="",
        config="",
        layers=[],
        root=calls.RootLayer(size_mib=size_mib),
        ids=None,
        mounts=[],
        files=[],
        owner=0,
        limits=LIMITS,
    )


async def test_commands_that_cannot_be_started_leave_no_descriptors(supervisor: Supervisor) -> None:
    pid = await run(supervisor)
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for argv in (["a\0b"], ["/nowhere/at/all"]):
        with pytest.raises(StartFailed):
            await supervisor.call(calls.Execute(key=KEY, argv=argv, stdin="", env={}, timeout_s=1), once=True)
    with pytest.raises(StartFailed):
        await supervisor.call(calls.Execute(key=KEY, argv=["true"], stdin="", env={"A=B": ""}, timeout_s=1), once=True)
    await supervisor.call(calls.Hello(), RunningSupervisor)  # answered once all of the last request is done
    assert len(os.listdir(f"/proc/{pid}/fd")) == before


async def test_a_record_of_a_newer_version_is_taken_over_as_far_as_it_is_known(supervisor: Supervisor) -> None:
    pid = await run(supervisor)
    os.kill(pid, signal.SIGKILL)
    record = supervisor.directory / "run" / "run.launch.record"
    record.write_text(record.read_text() + '\n{"of_tomorrow": [1]}\n')
    [shown] = await supervisor.call(calls.ListInstances(), list[Instance])
    assert (shown.key, shown.exit) == (KEY, None)
    assert (await supervisor.call(calls.Hello(), RunningSupervisor)).pid != pid


async def test_an_end_that_is_none_costs_nobody_the_connection(supervisor: Supervisor) -> None:
    pid = await run(supervisor)
    os.kill(pid, signal.SIGKILL)
    odd = {"key": "odd/launch", "machine": "m", "pid": 1, "start_ticks": 1, "started_at_ms": 1, "group": ""}
    record = supervisor.directory / "run" / "odd.launch.record"
    record.write_text(json.dumps(odd | {"exit": {"key": 5}}) + "\n")
    async with asyncio.timeout(10):
        shown = await supervisor.call(calls.ListInstances(), list[dict[str, Any]])
        assert {each["key"] for each in shown} == {KEY, "odd/launch"}


async def test_a_purge_removes_a_machines_files_and_nobody_elses_and_lets_nobody_wait(supervisor: Supervisor) -> None:
    await run(supervisor)
    work = supervisor.directory / "work"
    for machine in ("a", "ab"):
        (work / machine / "deep" / "deeper").mkdir(parents=True)
    outside = supervisor.directory / "outside"
    outside.mkdir()
    (work / "a" / "link").symlink_to(outside)
    await supervisor.call(calls.Purge(machine="a"))
    await supervisor.call(calls.Purge(machine="a"))
    assert sorted(os.listdir(work)) == ["ab", "m"]
    trash = supervisor.directory / "trash"
    await asyncio.to_thread(wait_until, lambda: not os.listdir(trash), "what was removed is gone")
    assert outside.is_dir()


async def test_what_a_killed_supervisor_was_removing_is_removed_by_the_next(supervisor: Supervisor) -> None:
    pid = await run(supervisor)
    os.kill(pid, signal.SIGKILL)
    left = supervisor.directory / "trash" / "17" / "deep"
    left.mkdir(parents=True)
    await supervisor.call(calls.Hello(), RunningSupervisor)
    await asyncio.to_thread(wait_until, lambda: not os.listdir(left.parents[1]), "it is gone")


@pytest.mark.root
async def test_a_container_whose_daemon_ends_while_its_disk_is_formatted_leaves_nothing(tmp_path: Path) -> None:
    connection = Supervisor(tmp_path / "there", "--mounts", "--no-cgroups")
    request = container(runtime="none", size_mib=64)
    there = tmp_path / "there"
    (there / "roots" / "m" / "kept").mkdir(parents=True)
    sock = await connection.dial()
    await asyncio.get_running_loop().sock_sendall(sock, encoded(0, request, None))
    sock.close()
    try:
        await asyncio.to_thread(wait_until, (there / "blank" / "64.ext4").exists, "its disk is formatted")
        with pytest.raises(UnknownInstance):  # answered once what followed on that is done
            await connection.call(calls.DiscardContainer(key=KEY), once=True)
        assert os.listdir(there / "roots" / "m") == ["kept"]
    finally:
        await connection.shut_down(grace_s=0)
        await connection.close()


@pytest.mark.parametrize("runs", [True, False])
async def test_a_destroy_that_the_host_hinders_says_so_and_can_be_repeated(supervisor: Supervisor, runs: bool) -> None:
    """Here a directory stands in the way of a file that is to be removed."""
    await run(supervisor)
    record = supervisor.directory / "run" / "run.launch.record"
    in_the_way = record.with_name("run.launch.status")
    (in_the_way / "full").mkdir(parents=True)
    async with asyncio.timeout(30):
        if not runs:
            assert (await supervisor.call(calls.Stop(key=KEY, signal=9, grace_s=5), Exit)).signal == 9
        for _ in range(2):
            with pytest.raises(Unreachable, match="Is a directory"):
                await supervisor.call(calls.Destroy(key=KEY, force=True))
        [shown] = await supervisor.call(calls.ListInstances(), list[Instance])
        assert shown.exit
        assert shown.exit.signal == 9
        (in_the_way / "full").rmdir()
        in_the_way.rmdir()
        await supervisor.call(calls.Destroy(key=KEY))
    assert await supervisor.call(calls.ListInstances(), list[Instance]) == []
    assert not record.exists()


async def test_a_purge_that_the_host_hinders_says_so_and_can_be_repeated(supervisor: Supervisor) -> None:
    await run(supervisor)
    in_the_way = supervisor.directory / "logs" / "other"
    in_the_way.mkdir()
    with pytest.raises(Unreachable, match="Is a directory"):
        await supervisor.call(calls.Purge(machine="other"))
    in_the_way.rmdir()
    await supervisor.call(calls.Purge(machine="other"))


@pytest.mark.root
async def test_a_container_that_the_host_leaves_no_place_for_can_be_made_once_it_does(tmp_path: Path) -> None:
    """Here a file stands in the way of the machine's directory."""
    there = tmp_path / "there"
    connection = Supervisor(there, "--mounts", "--no-cgroups")
    request = container(runtime="/no/runtime", size_mib=0)
    try:
        await connection.call(calls.Hello(), RunningSupervisor)
        (there / "roots" / "m").write_text("in the way")
        for _ in range(2):
            async with asyncio.timeout(30):
                with pytest.raises(StartFailed, match=r"cannot be made: .*Not a directory"):
                    await connection.call(request, Made, once=True)
        (there / "roots" / "m").unlink()
        with pytest.raises(StartFailed, match=r"cannot be made: .*/no/runtime"):
            await connection.call(request, Made, once=True)
        assert os.listdir(there / "roots") == []
    finally:
        await connection.shut_down(grace_s=0)
        await connection.close()


async def test_a_record_of_which_a_power_cut_left_nonsense_keeps_no_supervisor_from_starting(
    supervisor: Supervisor,
) -> None:
    pid = await run(supervisor)
    os.kill(pid, signal.SIGKILL)
    directory = supervisor.directory / "run"
    (directory / "torn.launch.record").write_bytes(bytes(100) + b'\n{"suspended": true}\n')
    (directory / "odd.launch.record").write_bytes(b"5\n[1]\n")
    async with asyncio.timeout(30):
        assert [shown.key for shown in await supervisor.call(calls.ListInstances(), list[Instance])] == [KEY]
    assert [path.name for path in directory.glob("*.record") if path.stat().st_size > 6] == ["run.launch.record"]


async def test_a_command_is_talked_to_though_another_machine_has_just_ended(supervisor: Supervisor) -> None:
    """Every connection is told of that, also the one that waits for its command."""
    await run(supervisor)
    loop, sock = asyncio.get_running_loop(), await supervisor.dial()

    class Dialled:
        async def dial(self) -> socket.socket:
            return sock

    await loop.sock_sendall(sock, b'{"id": 7, "op": "inspect", "key": "%s"}\n' % KEY.encode())
    assert b'"id": 7' in await loop.sock_recv(sock, 4096)
    echo = calls.Converse(key=KEY, argv=["/bin/echo", "here"], env={}, tty=False, columns=80, rows=24)
    short = calls.Start(key="short/launch", machine="n", argv=["/bin/true"], env={}, limits=LIMITS)
    await supervisor.call(short, Instance)
    await supervisor.call(calls.Wait(key="short/launch"), Exit)
    talk = await converse(Dialled(), echo)
    assert await talk.read() == ("stdout", b"here\n")
    assert await talk.wait() == (0, None)
    await talk.close()


@pytest.mark.root
async def test_what_cannot_be_cleared_keeps_no_supervisor_from_starting(tmp_path: Path) -> None:
    connection = Supervisor(tmp_path / "there", "--mounts", "--no-cgroups")
    try:
        pid = await run(connection)
        os.kill(pid, signal.SIGKILL)
        directory = connection.directory / "run"
        (directory / "odd.launch.d" / "rootfs" / "full").mkdir(parents=True)
        (directory / "odd" / "full").mkdir(parents=True)
        (directory / "other.launch.d").mkdir()
        (directory / "other.out").touch()
        async with asyncio.timeout(30):
            assert [shown.key for shown in await connection.call(calls.ListInstances(), list[Instance])] == [KEY]
        assert {path.name for path in directory.iterdir()} >= {"odd.launch.d", "odd"}
        assert not {path.name for path in directory.iterdir()} & {"other.launch.d", "other.out"}
    finally:
        await connection.shut_down(grace_s=0)
        await connection.close()
