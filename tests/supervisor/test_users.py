"""Which user of the host a machine has: told by the owner of its directory, and one that nobody else has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hawker.supervisor.users import Owners

pytestmark = pytest.mark.root

FIRST = 3 << 20


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path


def made(work: Path, machine: str, user: int = 0) -> Path:
    directory = work / machine
    directory.mkdir()
    os.chown(directory, user, user)
    return directory


def test_two_machines_have_two_users_and_each_keeps_its_own(work: Path) -> None:
    owners = Owners(str(work))
    users = []
    for name in ("a", "b"):
        made(work, name)
        users.append(owners.of(name, FIRST))
    assert users == [FIRST, FIRST + 1]
    assert [owners.of(name, FIRST) for name in ("a", "b")] == users
    assert [Owners(str(work)).of(name, FIRST) for name in ("a", "b")] == users, "whoever comes after a supervisor"
    assert [(work / name).stat().st_gid for name in ("a", "b")] == users


def test_after_another_supervisor_nobody_gets_a_user_that_is_taken(work: Path) -> None:
    for number in (0, 1, 3):
        made(work, f"of-before-{number}", FIRST + number)
    made(work, "new")
    made(work, "newer")
    owners = Owners(str(work))
    assert [owners.of("new", FIRST), owners.of("newer", FIRST)] == [FIRST + 2, FIRST + 4]


def test_a_user_is_free_again_once_its_machine_is_gone_and_is_then_the_last_to_be_given(work: Path) -> None:
    made(work, "kept", FIRST)
    made(work, "gone")
    owners = Owners(str(work), 5)
    assert owners.of("gone", FIRST) == FIRST + 1
    (work / "gone").rmdir()
    one = made(work, "one")
    for number in range(2, 5):
        os.chown(one, 0, 0)
        assert owners.of("one", FIRST) == FIRST + number
    made(work, "next")
    assert owners.of("next", FIRST) == FIRST + 1


def test_where_all_are_taken_the_next_machine_is_refused(work: Path) -> None:
    for number in range(3):
        made(work, str(number), FIRST + number)
    made(work, "more")
    with pytest.raises(OSError, match=r"all 3 users .* destroy machines"):
        Owners(str(work), 3).of("more", FIRST)


def test_what_a_machine_has_written_as_another_user_stays_its_own_and_links_lead_to_nothing_of_others(
    work: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = tmp_path_factory.mktemp("elsewhere") / "file"
    stranger.touch()
    directory = made(work, "old")
    (directory / "below").mkdir()
    (directory / "below" / "file").touch()
    (directory / "link").symlink_to(stranger)
    (directory / "away").symlink_to(stranger.parent)
    user = Owners(str(work)).of("old", FIRST)
    assert {path.lstat().st_uid for path in (directory, *directory.rglob("*"))} == {user}
    assert (stranger.stat().st_uid, stranger.parent.stat().st_uid) == (0, 0)
