"""A supervisor's files: what a kill, a reboot and a change of place leave of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hawker.supervisor.files import Files, RecordFile

KEY = "01JD/launch"


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "supervisor"


def record(files: Files, **fields: object) -> RecordFile:
    kept = RecordFile(files.instance(KEY))
    kept.write(dict(fields))
    return kept


def known(files: Files) -> list[dict[str, object]]:
    return [RecordFile(path).read() for path in files.recorded()]


def test_later_fields_of_a_record_win(home: Path) -> None:
    kept = record(Files(str(home), ""), pid=7, suspended=False)
    kept.write({"suspended": True})
    assert kept.read() == {"pid": 7, "suspended": True}


def test_a_line_that_a_kill_cut_off_is_not_read(home: Path) -> None:
    files = Files(str(home), "")
    kept = record(files, pid=7)
    with open(files.instance(KEY) + ".record", "ab") as file:
        file.write(b'{"suspended": tr')
    assert kept.read() == {"pid": 7}


def test_records_lie_in_memory_while_the_supervisor_runs_and_on_disk_after_it(home: Path, memory: Path) -> None:
    files = Files(str(home), str(memory))
    record(files, pid=7)
    assert (home / "run").is_symlink()
    assert len(list(memory.rglob("*.record"))) == 1
    files.close()
    assert not (home / "run").is_symlink()
    assert list(memory.iterdir()) == []
    assert known(Files(str(home), str(memory))) == [{"pid": 7}]
    assert (home / "run").is_symlink()


def test_the_next_supervisor_finds_the_records_of_one_that_was_killed(home: Path, memory: Path) -> None:
    record(Files(str(home), str(memory)), pid=7)
    assert known(Files(str(home), str(memory))) == [{"pid": 7}]
    assert len(list(memory.iterdir())) == 1


def test_a_reboot_empties_the_memory(home: Path, memory: Path) -> None:
    record(Files(str(home), str(memory)), pid=7)
    for path in sorted(memory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    files = Files(str(home), str(memory))
    assert known(files) == []
    record(files, pid=8)
    assert known(files) == [{"pid": 8}]


@pytest.mark.root
def test_a_directory_in_memory_that_belongs_to_somebody_else_is_not_used(home: Path, memory: Path) -> None:
    record(Files(str(home), str(memory)), pid=7)
    (theirs,) = memory.iterdir()
    os.chown(theirs, 12345, -1)
    assert known(Files(str(home), str(memory))) == []
    assert (home / "run").resolve() != theirs


def test_pipes_in_use_on_disk_stay_there(home: Path, memory: Path) -> None:
    files = Files(str(home), "")
    record(files, pid=7)
    os.mkfifo(files.instance(KEY) + ".out")
    assert known(Files(str(home), str(memory))) == [{"pid": 7}]
    assert not (home / "run").is_symlink()


def test_pipes_without_a_record_are_removed(home: Path) -> None:
    files = Files(str(home), "")
    record(files, pid=7)
    for path in (files.instance(KEY), files.instance("01JE/launch")):
        os.mkfifo(path + ".out")
    files.remove_unrecorded()
    assert sorted(os.listdir(home / "run")) == ["01JD.launch.out", "01JD.launch.record"]


def test_a_record_goes_on_after_a_line_that_a_full_disk_cut_off(home: Path) -> None:
    files = Files(str(home), "")
    kept = record(files, pid=7)
    with open(files.instance(KEY) + ".record", "ab") as file:
        file.write(b'{"suspended": tr')
    kept.write({"exit": {"code": 0}})
    assert kept.read() == {"pid": 7, "exit": {"code": 0}}


def test_a_start_that_was_cut_off_takes_no_records_with_it(home: Path, memory: Path) -> None:
    files = Files(str(home), str(memory))
    record(files, pid=7)
    cut_off = files.instance("01JE/launch")
    Path(cut_off + ".record").touch()
    os.mkfifo(cut_off + ".out")
    files.close()
    after = Files(str(home), str(memory))
    assert known(after) == [{"pid": 7}]
    assert len(list(memory.iterdir())) == 1


@pytest.mark.parametrize("to_disk", [True, False])
def test_a_kill_at_any_point_of_a_move_loses_no_record(home: Path, memory: Path, to_disk: bool) -> None:
    """Every call that changes the file system is the last one, once."""
    for cut in range(1, 30):
        home, there = home.with_name(f"home{cut}"), memory / str(cut)
        there.mkdir()
        files = Files(str(home), str(there))
        record(files, pid=7)
        if not to_disk:
            files.close()
        pid = os.fork()
        if pid == 0:
            change = files.close if to_disk else partial(Files, str(home), str(there))
            os._exit(0 if cut_after(cut, change) else 1)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert known(Files(str(home), str(there))) == [{"pid": 7}], f"cut at {cut}"
        if finished:
            assert cut > 4
            return
    raise AssertionError("the move never ended")


def cut_after(count: int, change: Callable[[], object]) -> bool:
    """Run `change` in a process of its own, which ends before the call number `count`. True when it came to its end."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.copyfile"):
            seen += 1
            if seen == count:
                os._exit(1)

    sys.addaudithook(hook)
    change()
    return True


def test_a_log_without_its_newest_file_is_purged_whole(home: Path) -> None:
    files = Files(str(home), "")
    for suffix in (".1", ".2"):
        Path(files.log("a") + suffix).touch()
    files.purge_log("a")
    assert os.listdir(home / "logs") == []


def test_purging_a_machine_removes_its_logs_and_nobody_elses(home: Path) -> None:
    files = Files(str(home), "")
    for machine in ("a", "ab"):
        for suffix in ("", ".1", ".2"):
            Path(files.log(machine) + suffix).touch()
    files.purge_log("a")
    files.purge_log("a")
    assert sorted(os.listdir(home / "logs")) == ["ab", "ab.1", "ab.2"]
