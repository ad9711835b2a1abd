"""A program that tells itself how it ended: what it says counts, also when its supervisor was killed meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import eventually

from hawker.supervisor import calls
from hawker.worker.drivers.base import Exit, Instance, Process
from hawker.worker.drivers.supervisor import Supervisor
from hawker.worker.drivers.wire import RunningSupervisor, SupervisorLost

LIMITS = calls.Limits(cpu_millis=100, memory_mib=64, pids=64)
KEY = "run/launch"


async def run(supervisor: Supervisor, script: str, **fields: Any) -> None:
    argv = ["sh", "-c", script]
    env = {"PATH": "/usr/bin:/bin"}
    await supervisor.call(calls.Start(key=KEY, machine="m", argv=argv, env=env, limits=LIMITS, **fields), Instance)


async def how(supervisor: Supervisor) -> tuple[object, ...]:
    ended = await supervisor.call(calls.Wait(key=KEY), Exit)
    return ended.code, ended.signal, ended.oom_killed, ended.error


@pytest.mark.parametrize(
    ("says", "ended"),
    [
        ('{"code": 5}', (5, None, False, "")),
        ('{"signal": 11}', (None, 11, False, "")),
        ('{"signal": 9, "oom_killed": true}', (None, 9, True, "")),
        ('{"error": "no such program"}', (None, None, False, "no such program")),
        ('{"started": 7}\n{"code": 2}\n{"co', (2, None, False, "")),
    ],
)
async def test_what_a_program_says_of_its_end_counts(
    supervisor: Supervisor, says: str, ended: tuple[object, ...]
) -> None:
    await run(supervisor, f"printf '%s' '{says}' >> /proc/self/fd/{{status}}; exit 99", status=True)
    assert await how(supervisor) == ended


@pytest.mark.parametrize(
    "says",
    [
        "5",
        "null",
        "[1, 2]",
        '"code"',
        "{}",
        '{"code": "5"}',
        '{"code": true}',
        '{"code": 256}',
        '{"code": -1}',
        '{"signal": 0}',
        '{"signal": 65}',
        '{"error": 7}',
        '{"code": 1' + "0" * 5000 + "}",
        "[" * 10_000,
    ],
)
async def test_what_is_no_end_counts_for_nothing_whoever_wrote_it(supervisor: Supervisor, says: str) -> None:
    script = f"printf '%s\\n' '{says}' >> /proc/self/fd/{{status}}; exit 3"
    await run(supervisor, f"printf '%s\\n' '{{\"code\": 4}}' >> /proc/self/fd/{{status}}; {script}", status=True)
    assert await how(supervisor) == (4, None, False, "")


async def test_an_error_that_is_no_text_or_a_very_long_one_is_told_all_the_same(supervisor: Supervisor) -> None:
    says = '{"error": "\\\\udcff' + "x" * 5000 + '"}'
    await run(supervisor, f"printf '%b' '{says}' >> /proc/self/fd/{{status}}; exit 3", status=True)
    assert (await how(supervisor))[3] == "?" + "x" * 999


async def test_one_that_says_more_than_an_end_is_ended_and_takes_no_more_of_the_hosts_memory(
    supervisor: Supervisor,
) -> None:
    await run(supervisor, "exec cat /dev/zero >> /proc/self/fd/{status}", status=True)
    assert await how(supervisor) == (None, signal.SIGKILL, False, "")
    assert not [path for path in (supervisor.directory / "run").iterdir() if path.name.endswith(".status")]


async def test_a_name_that_is_no_text_is_shown_as_far_as_it_is_one(supervisor: Supervisor) -> None:
    name = os.fsdecode(b"odd-\xff")
    await run(supervisor, f"mkdir '{name}' && cd '{name}' && echo there && exec sleep 60")

    async def moved() -> bool:
        [process] = await supervisor.call(calls.ListProcesses(key=KEY), list[Process], once=True)
        return bool(process.directory.endswith("/odd-?"))

    await eventually(moved, "it is in the directory")


async def test_one_that_does_not_say_how_it_ended_is_not_taken_for_well_ended(supervisor: Supervisor) -> None:
    await run(supervisor, "exit 0", status=True)
    assert await how(supervisor) == (None, None, False, "it ended with exit code 0 before it said how")


async def test_one_that_is_killed_before_it_says_is_known_to_be_killed(supervisor: Supervisor) -> None:
    await run(supervisor, "kill -9 $$", status=True)
    assert await how(supervisor) == (None, signal.SIGKILL, False, "")


async def test_what_it_says_is_not_lost_with_a_killed_supervisor(supervisor: Supervisor) -> None:
    script = """trap 'echo "{\\"code\\": 7}" >> /proc/$$/fd/{status}; exit 1' TERM; while :; do sleep 0.02; done"""
    await run(supervisor, script, status=True)
    first = (await supervisor.call(calls.Hello(), RunningSupervisor)).pid
    os.kill(first, signal.SIGKILL)

    async def replaced() -> bool:
        try:
            return bool((await supervisor.call(calls.Hello(), RunningSupervisor)).pid != first)
        except SupervisorLost:
            return False

    await eventually(replaced, "another supervisor serves")
    ended = await supervisor.call(calls.Stop(key=KEY, signal=signal.SIGTERM, grace_s=10), Exit)
    assert (ended.code, ended.error) == (7, "")


async def test_a_program_runs_where_it_is_told_to(supervisor: Supervisor, tmp_path: Path) -> None:
    await run(supervisor, '[ "$PWD" = /usr ] || exit 1', cwd="/usr")
    assert (await how(supervisor))[0] == 0


async def test_nobody_is_started_for_a_directory_that_is_not_used(tmp_path: Path) -> None:
    told: list[Exit] = []
    connection = Supervisor(tmp_path / "unused", "--no-cgroups")
    await connection.open(told.append)
    assert connection.unused
    await connection.shut_down(grace_s=0)
    await connection.close()
    assert not (tmp_path / "unused").exists()
