"""A program that tells itself how it ended: what it says counts, also when its supervisor was killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.waiting import eventually

from hawker.worker.drivers.base import Exit
from hawker.worker.drivers.refusals import SupervisorLost
from hawker.worker.drivers.supervised import Supervisor

LIMITS = {"cpu_millis": 100, "memory_mib": 64, "dedicated": False, "pids": 64}
KEY = "run/launch"


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    connection = Supervisor(tmp_path / "there", "--no-cgroups")
    await connection.open(lambda ended: None)
    yield connection
    await connection.shut_down(grace_s=0)
    await connection.close()


async def run(supervisor: Supervisor, script: str, **fields: object) -> None:
    argv = ["sh", "-c", script]
    env = {"PATH": "/usr/bin:/bin"}
    await supervisor.call("start", key=KEY, machine="m", argv=argv, env=env, limits=LIMITS, **fields)


async def how(supervisor: Supervisor) -> tuple[object, ...]:
    ended = await supervisor.call("wait", key=KEY)
    return ended["code"], ended["signal"], ended["oom_killed"], ended["error"]


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


async def test_one_that_does_not_say_how_it_ended_is_not_taken_for_well_ended(supervisor: Supervisor) -> None:
    await run(supervisor, "exit 0", status=True)
    assert await how(supervisor) == (None, None, False, "it ended with exit code 0 before it said how")


async def test_one_that_is_killed_before_it_says_is_known_to_be_killed(supervisor: Supervisor) -> None:
    await run(supervisor, "kill -9 $$", status=True)
    assert await how(supervisor) == (None, signal.SIGKILL, False, "")


async def test_what_it_says_is_not_lost_with_a_killed_supervisor(supervisor: Supervisor) -> None:
    script = """trap 'echo "{\\"code\\": 7}" >> /proc/$$/fd/{status}; exit 1' TERM; while :; do sleep 0.02; done"""
    await run(supervisor, script, status=True)
    first = (await supervisor.call_once("hello"))["pid"]
    os.kill(first, signal.SIGKILL)

    async def replaced() -> bool:
        try:
            return bool((await supervisor.call_once("hello"))["pid"] != first)
        except SupervisorLost:
            return False

    await eventually(replaced, "another supervisor serves")
    ended = await supervisor.call("stop", key=KEY, signal=signal.SIGTERM, grace_s=10)
    assert (ended["code"], ended["error"]) == (7, "")


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
