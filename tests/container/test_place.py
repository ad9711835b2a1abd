"""Where what is compiled once is kept for all workers of a host: it is run, so nobody else may have put it there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hawker.init import place


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory that only its owner changes, whatever the mode of those above it says of their group."""
    before = os.umask(0o022)
    try:
        (tmp_path / "home").mkdir()
        yield tmp_path / "home"
    finally:
        os.umask(before)


def test_a_directory_that_only_its_owner_can_change_is_taken(home: Path) -> None:
    assert place.is_ours_alone(home)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_that_others_may_put_files_into_is_not_taken(home: Path, mode: int) -> None:
    home.chmod(mode)
    assert not place.is_ours_alone(home)


def test_a_directory_that_others_may_replace_is_not_taken(home: Path) -> None:
    (home / "hawker").mkdir()
    home.chmod(0o777)
    assert not place.is_ours_alone(home / "hawker")
    home.chmod(0o1777)  # as /tmp: there only the owner may
    assert place.is_ours_alone(home / "hawker")


def test_a_link_to_a_directory_is_not_taken(home: Path) -> None:
    (home / "real").mkdir()
    (home / "link").symlink_to("real")
    assert not place.is_ours_alone(home / "link")


@pytest.mark.root
def test_another_users_directory_and_one_below_it_are_not_taken(home: Path) -> None:
    (home / "hawker").mkdir()
    os.chown(home, 12345, 12345)
    assert not place.is_ours_alone(home)
    assert not place.is_ours_alone(home / "hawker")


def test_one_does_its_work_at_a_time(tmp_path: Path) -> None:
    there: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with place.alone(tmp_path):
            there.append(number)
            most.append(len(there))
            threading.Event().wait(0.01)
            there.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert most == [1] * 8
