"""What machines write, in a file system of bounded size: an empty one is formatted once and copied after that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hawker.supervisor.children import Children
from hawker.supervisor.loop import Loop
from hawker.supervisor.roots import KEPT, Root, Roots
from hawker.supervisor.trash import Trash

pytestmark = pytest.mark.root


class Made:
    """A supervisor's roots with its loop, turned until what was asked is done."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.children = Children(self.loop)
        self.roots = Roots(str(directory), self.children, Trash(str(directory), self.children, self.loop))

    def make(self, *roots: Root) -> list[str]:
        told: list[str] = []
        for root in roots:
            self.roots.make(root, told.append)
        while len(told) < len(roots):  # without the supervisor's handlers of signals, which would be the tests' too
            self.loop.later(0.001, self.children.reap)
            self.loop.turn()
        return told


def blocks(path: Path) -> int:
    return os.stat(path).st_blocks * 512


def test_machines_of_one_size_share_one_formatting_and_nothing_else(tmp_path: Path) -> None:
    made = Made(tmp_path)
    machines = [Root(f"m{n}", "one", 64) for n in range(3)]
    assert made.make(*machines) == ["", "", ""]
    assert [path.name for path in (tmp_path / "blank").iterdir()] == ["64.ext4"]
    files = [tmp_path / "roots" / root.machine / "one.ext4" for root in machines]
    assert len({os.stat(file).st_ino for file in files}) == 3
    blank = (tmp_path / "blank" / "64.ext4").read_bytes()
    assert all(file.read_bytes() == blank for file in files)
    assert all(blocks(file) < 2 << 20 for file in files)  # of 64 MiB


def test_one_that_is_kept_has_a_journal_and_is_taken_as_it_is(tmp_path: Path) -> None:
    made = Made(tmp_path)
    root = Root("m", KEPT, 64)
    assert made.make(root) == [""]
    file = tmp_path / "roots" / "m" / "kept.ext4"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert made.make(root) == [""]
    assert file.read_bytes()[-1:] == b"x"
    assert "cannot grow" in made.make(Root("m", KEPT, 128))[0]
    assert [path.name for path in (tmp_path / "blank").iterdir()] == ["64-kept.ext4"]


def test_a_size_that_cannot_be_formatted_leaves_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path)
    (problem,) = made.make(Root("m", "one", 1 << 40))
    assert problem
    assert list((tmp_path / "blank").iterdir()) == []
    assert list((tmp_path / "roots" / "m").iterdir()) == []
