"""An instance's beginning and its taking over, where something is wrong."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import wait_until

from hawker.supervisor import proc
from hawker.supervisor.calls import Limits, Start
from hawker.supervisor.cgroups import V2
from hawker.supervisor.common import Common
from hawker.supervisor.container import CONTAINER, Container
from hawker.supervisor.files import Files, RecordFile
from hawker.supervisor.instance import Instance, Record
from hawker.supervisor.programs import CannotStart, Invocation
from hawker.supervisor.starting import start

KEY = "01JD/launch"
LIMITS = Limits(cpu_millis=62, memory_mib=64, dedicated=False, pids=100)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path), "")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_program_s_environment_is_known_from_its_first_moment_on_also_on_a_busy_host() -> None:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(40):
            with subprocess.Popen(["sleep", "60"], env={"A": "b", "PATH": os.environ["PATH"]}) as program:
                found = proc.environ_of_program(program.pid)
                program.kill()
            assert found.get("A") == "b"
    finally:
        for each in busy:
            each.kill()
            each.wait()


def test_a_program_without_an_environment_has_none() -> None:
    with subprocess.Popen(["/usr/bin/sleep", "60"], env={}) as program:
        found = proc.environ_of_program(program.pid)
        program.kill()
    assert found == {}


def test_a_process_that_has_the_number_of_one_that_ended_is_left_alone(
    files: Files, stranger: subprocess.Popen[bytes]
) -> None:
    path = files.instance(KEY)
    record = Record(key=KEY, machine="m", pid=stranger.pid, start_ticks=1, started_at_ms=1, group="")
    instance = Instance(record, files, f"test:m:{KEY}", None)
    instance.write_down()
    instance.take_over(RecordFile(path).read())
    assert instance.main_ended
    assert instance.kill_tree()
    assert stranger.poll() is None
    instance.finish()


def test_a_container_whose_number_another_process_has_by_now_is_that_process_no_harm(
    files: Files, stranger: subprocess.Popen[bytes]
) -> None:
    record = Record(
        key=KEY, machine="m", pid=stranger.pid, start_ticks=1, started_at_ms=1, group="", kind=CONTAINER, status=True
    )
    container = Container(record, files, f"test:m:{KEY}", None)
    container.write_down()
    container.take_over(RecordFile(files.instance(KEY)).read())
    assert container.main_ended
    assert container.members() == []  # with the stranger's namespace: everybody here
    for pipe in container.pipes:
        pipe.remove()


def test_a_program_that_cannot_be_recorded_does_not_run(tmp_path: Path) -> None:
    common = Common(str(tmp_path), cgroups=False)
    in_the_way = Path(common.files.instance(KEY) + ".record")
    in_the_way.mkdir()
    mark = common.mark("m", KEY)
    with pytest.raises(CannotStart, match="cannot be recorded"):
        start(Start(key=KEY, machine="m", argv=["sleep", "60"], env={}, limits=LIMITS), common, None)
    wait_until(lambda: not [pid for pid in proc.everyone() if proc.marker(pid) == mark], "the program is gone")
    os.waitpid(-1, os.WNOHANG)
    assert os.listdir(tmp_path / "run") == ["01JD.launch.record"]
    in_the_way.rmdir()
    common.files.close()


@pytest.mark.parametrize("terminal", [None, (80, 24)])
def test_a_command_that_cannot_be_put_under_the_limits_of_its_program_does_not_run(
    files: Files, tmp_path: Path, terminal: tuple[int, int] | None
) -> None:
    root = tmp_path / "cgroup"
    for place in (root, root / "hawker-1"):
        place.mkdir()
        (place / "cgroup.subtree_control").touch()
    (root / "cgroup.controllers").write_text("cpu memory pids\n")
    record = Record(key=KEY, machine="m", pid=os.getpid(), start_ticks=1, started_at_ms=1, group="gone")
    mark = f"test:{tmp_path}:{KEY}"
    instance = Instance(record, files, mark, V2(root, "hawker-1"))
    os.mkdir(instance.work)
    null = os.open(os.devnull, os.O_RDWR)
    before = set(os.listdir("/proc/self/fd"))
    command = Invocation(["sleep", "60"], {}, dict.fromkeys(range(3), null), terminal)
    with pytest.raises(FileNotFoundError):
        instance.run_beside(command, lambda pids, master, why: None)
    wait_until(lambda: not [pid for pid in proc.everyone() if proc.marker(pid) == mark], "the command is gone")
    os.waitpid(-1, os.WNOHANG)
    assert set(os.listdir("/proc/self/fd")) <= before
    os.close(null)
