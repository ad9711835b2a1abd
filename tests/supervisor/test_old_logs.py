"""The last words of destroyed machines: kept whole lines, a bounded number of bytes and files, for an hour."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hawker.supervisor import old_logs
from hawker.supervisor.files import Files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path), "")


def kept(files: Files) -> dict[str, bytes]:
    directory = Path(old_logs.place(files.directory))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_purged_machines_log_is_kept_and_a_second_purge_changes_nothing(files: Files) -> None:
    Path(files.log("a")).write_bytes(b"one\ntwo\n")
    os.utime(files.log("a"), (1, 1))
    files.purge_log("a")
    files.purge_log("a")
    assert os.listdir(f"{files.directory}/logs") == []
    assert kept(files) == {"a": b"one\ntwo\n"}
    assert old_logs.forget(files.directory) == 1, "it is as old as its machine's end"


def test_of_a_long_log_whole_lines_of_its_end_are_kept(files: Files) -> None:
    line = b"x" * 99 + b"\n"
    Path(files.log("a")).write_bytes(b"newest\n")
    Path(files.log("a") + ".1").write_bytes(line * 1000)
    Path(files.log("a") + ".2").write_bytes(b"oldest\n")
    files.purge_log("a")
    tail = kept(files)["a"]
    assert tail == line * ((old_logs.TAIL_BYTES - 7) // 100) + b"newest\n"
    assert os.listdir(f"{files.directory}/logs") == []


def test_a_log_that_was_just_rotated_is_kept_too(files: Files) -> None:
    Path(files.log("a") + ".1").write_bytes(b"last\n")
    files.purge_log("a")
    assert kept(files) == {"a": b"last\n"}


@pytest.mark.parametrize("away_s", [old_logs.KEEP_S + 1, -old_logs.KEEP_S - 1], ids=["old", "the clock was set back"])
def test_after_its_time_nothing_is_left_whoever_left_it(files: Files, away_s: float) -> None:
    now_s = time.time()
    for name, at_s in (("old", now_s - away_s), ("new", now_s)):
        path = f"{old_logs.place(files.directory)}/{name}"
        Path(path).write_bytes(b"one\n")
        os.utime(path, (at_s, at_s))
    assert old_logs.forget(files.directory) == 1
    assert list(kept(files)) == ["new"]


def test_of_very_many_the_newest_are_kept(files: Files) -> None:
    for n in range(5):
        path = f"{old_logs.place(files.directory)}/{n}"
        Path(path).touch()
        os.utime(path, (time.time() - 10 + n,) * 2)
    assert old_logs.forget(files.directory, 3) == 3
    assert sorted(kept(files)) == ["2", "3", "4"]
    assert old_logs.forget(f"{files.directory}/nowhere") == 0


def test_a_disk_that_takes_no_more_keeps_no_machine_from_being_purged(files: Files) -> None:
    os.rmdir(old_logs.place(files.directory))
    Path(files.log("a")).write_bytes(b"one\n")
    files.purge_log("a")
    assert os.listdir(f"{files.directory}/logs") == []
