"""A start that was foreseen: its process waits for the order, and leaves nothing when that does not come."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit import cgroups
from tests.kit.processes import alive, gone, marked, word
from tests.kit.waiting import eventually, until

from hawker.init.build import program
from hawker.init.place import shared
from hawker.worker.drivers.base import StartFailed
from hawker.worker.drivers.supervisor import Supervisor

LIMITS = {"cpu_millis": 100, "memory_mib": 64, "dedicated": False, "pids": 64}
KEY = "run/launch"


@pytest.fixture
def hold(tmp_path: Path) -> str:
    return str(program("hold", shared() or tmp_path))


@pytest.fixture(params=["--no-cgroups", pytest.param("", marks=pytest.mark.root)], ids=["no-cgroups", "cgroups"])
async def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Supervisor]:
    connection = Supervisor(tmp_path / "there", *filter(None, [request.param]))
    await connection.open(lambda ended: None)
    await connection.call("hello")
    yield connection
    await connection.shut_down(grace_s=0)
    await connection.close()


def order(*argv: str) -> dict[str, Any]:
    return {"key": KEY, "machine": "m", "argv": list(argv), "env": {}, "limits": LIMITS, "status": False}


async def waiting(supervisor: Supervisor, hold: str, mark: str) -> int:
    """The process that waits to become `sleep` with this mark."""
    supervisor.foresee(hold=hold, **order("/bin/sleep", mark))
    await until(lambda: bool(marked(mark)))
    assert await supervisor.call("list") == []
    [pid] = marked(mark)
    return pid


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


async def test_its_process_becomes_the_program_once_that_is_ordered(supervisor: Supervisor, hold: str) -> None:
    mark = word()
    pid = await waiting(supervisor, hold, mark)
    assert command(pid)[0] == hold
    started = await supervisor.call("start", **order("/bin/sleep", mark))
    assert started["pid"] == pid
    await until(lambda: command(pid) == ["/bin/sleep", mark])
    assert {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")} == {0, 1, 2}
    assert (await supervisor.call("stats", key=KEY))["processes"] == 1
    os.kill(pid, signal.SIGTERM)
    assert (await supervisor.call("wait", key=KEY))["signal"] == signal.SIGTERM


async def test_another_order_starts_another_process(supervisor: Supervisor, hold: str) -> None:
    mark, other = word(), word()
    pid = await waiting(supervisor, hold, mark)
    started = await supervisor.call("start", **order("/bin/sleep", other))
    assert started["pid"] != pid
    await gone(pid=pid)
    assert alive(started["pid"])


async def test_one_that_ended_while_it_waited_is_started_anew(supervisor: Supervisor, hold: str) -> None:
    mark = word()
    pid = await waiting(supervisor, hold, mark)
    os.kill(pid, signal.SIGKILL)
    await gone(pid=pid)
    started = await supervisor.call("start", **order("/bin/sleep", mark))
    await until(lambda: command(started["pid"]) == ["/bin/sleep", mark])


async def test_a_program_that_the_kernel_does_not_take_is_told_of_as_ever(
    supervisor: Supervisor, hold: str, tmp_path: Path
) -> None:
    broken = tmp_path / word()
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    supervisor.foresee(hold=hold, **order(str(broken)))
    await until(lambda: bool(marked(broken.name)))
    with pytest.raises(StartFailed, match=r"cannot be started: .*Exec format error"):
        await supervisor.call("start", **order(str(broken)))
    await nothing_left(supervisor, broken.name)


@pytest.mark.parametrize("end", ["no order", "daemon gone", "supervisor killed", "destroyed"])
async def test_it_leaves_nothing_without_its_order(supervisor: Supervisor, hold: str, end: str) -> None:
    mark = word()
    await waiting(supervisor, hold, mark)
    if end == "daemon gone":
        await supervisor.close()
        await supervisor.open(lambda ended: None)
    elif end == "supervisor killed":
        os.kill((await supervisor.call("hello"))["pid"], signal.SIGKILL)
    elif end == "destroyed":
        await supervisor.call("destroy", key=KEY, force=True)
    await nothing_left(supervisor, mark)


async def nothing_left(supervisor: Supervisor, mark: str) -> None:
    await gone(mark)
    assert await supervisor.call("list") == []

    async def clean() -> bool:
        await supervisor.call("hello")
        files = os.listdir(supervisor.directory / "run")
        return not files and not cgroups.machine_groups(supervisor.directory)

    await eventually(clean, "its files and its group are removed")
