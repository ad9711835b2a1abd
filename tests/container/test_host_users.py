"""Which of the host's users machines get: no two the same, whatever happens to the worker and to their files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.kit.tiers import costly

from hawker.errors import Unreachable
from hawker.worker.drivers.users import COUNT, FIRST, MANY, NoUsers, Users

MACHINES = strategies.sampled_from([f"m{n}" for n in range(8)])


class Ranges(RuleBasedStateMachine):
    """Six ranges for eight machines, whose files take their time to go."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        for name in ("uid", "gid"):
            (self.place / name).write_text(f"other:1:5\nroot:100000:{2 * COUNT}\nroot:1000000:{4 * COUNT + 5}\n")
        self.files: dict[str, int] = {}  # of machines, and whose users own them
        self.has: dict[str, int] = {}
        self.start()

    def teardown(self) -> None:
        shutil.rmtree(self.place)

    @rule()
    def start(self) -> None:
        """Anew, after whatever ended the one before."""
        self.users = Users(self.place / "users", [self.place / "uid", self.place / "gid"])
        self.users.hold(lambda machine: machine in self.files)

    @rule()
    def cut_off(self) -> None:
        """Killed while it wrote."""
        (self.place / "users.new").write_bytes(b'{"machines":{"m1"')
        self.start()

    @rule(machine=MACHINES)
    def make(self, machine: str) -> None:
        taken = {*self.has.values(), *self.files.values()}
        if len(taken) == 6 and machine not in self.has and machine not in self.files:
            with pytest.raises(NoUsers, match="give root users for 6 machines, which are taken"):
                self.users.of(machine)
            return
        first = self.users.of(machine)
        assert self.has.setdefault(machine, first) == first
        self.files[machine] = first

    @rule(machine=MACHINES)
    def destroy(self, machine: str) -> None:
        self.users.release(machine)
        self.has.pop(machine, None)

    @rule(machine=MACHINES)
    def removed(self, machine: str) -> None:
        if machine not in self.has:
            self.files.pop(machine, None)

    @invariant()
    def no_two_machines_and_no_files_of_another_have_the_same_users(self) -> None:
        owners = {**self.files, **self.has}
        assert len(set(owners.values())) == len(owners)
        assert all(self.files[machine] == first for machine, first in self.has.items())

    @invariant()
    def they_are_those_that_the_system_gives(self) -> None:
        starts = {100000, 100000 + COUNT, *(1000000 + n * COUNT for n in range(4))}
        assert {*self.has.values()} <= starts


TestRanges = Ranges.TestCase
TestRanges.settings = settings(max_examples=costly(8), stateful_step_count=25, deadline=None)

ALLOCATING = """
import sys
from itertools import count
from pathlib import Path
from hawker.worker.drivers.users import Users

users = Users(Path(sys.argv[1]), [])
for number in count():
    print(f"m{number}", users.of(f"m{number}"), flush=True)
"""


def test_what_was_said_before_a_kill_holds_after_it(tmp_path: Path) -> None:
    told: dict[str, int] = {}
    for lines in (1, 3, 10):
        argv = [sys.executable, "-c", ALLOCATING, str(tmp_path / "users")]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            said = [child.stdout.readline() for _ in range(lines)]
            child.kill()
            said += [line for line in child.stdout if line.endswith("\n")]
        for line in said:
            machine, first = line.split()
            assert told.setdefault(machine, int(first)) == int(first)
    assert len(set(told.values())) == len(told) >= 10


def usual(tmp_path: Path, subordinate: str = "") -> Users:
    (tmp_path / "sub").write_text(subordinate)
    return Users(tmp_path / "users", [tmp_path / "sub", tmp_path / "none"])


def test_without_a_word_of_the_system_they_are_beyond_all_others(tmp_path: Path) -> None:
    users = usual(tmp_path)
    firsts = [users.of(f"m{number}") for number in range(50)]
    assert len(set(firsts)) == 50
    assert all((first - FIRST) % COUNT == 0 and FIRST < first <= FIRST + MANY * COUNT for first in firsts)


def test_those_that_the_system_gives_to_others_are_left_out(tmp_path: Path) -> None:
    first = usual(tmp_path).of("a")
    (tmp_path / "users").unlink()
    assert abs(usual(tmp_path, f"somebody:{first + 7}:1\nnonsense\nx:y:z\n").of("a") - first) >= COUNT


def test_users_without_groups_of_the_same_number_are_no_use(tmp_path: Path) -> None:
    for name, first in (("uid", 100_000), ("gid", 100_000 + COUNT)):
        (tmp_path / name).write_text(f"root:{first}:{2 * COUNT}\n")
    users = Users(tmp_path / "users", [tmp_path / "uid", tmp_path / "gid"])
    assert users.of("a") == 100_000 + COUNT
    with pytest.raises(NoUsers, match=r"uid and .*gid give root users for 1 machines, which are taken"):
        users.of("b")


def test_a_machine_of_before_keeps_its_users_and_no_other_gets_them(tmp_path: Path) -> None:
    new = usual(tmp_path).of("new")
    (tmp_path / "users").unlink()
    users = usual(tmp_path)
    users.keep({"old": new})  # what the other would have got
    users.keep({"old": 5, "older": new})  # two that had the same keep them
    assert (users.of("old"), users.of("older")) == (new, new)
    assert users.of("new") != new
    users.release("old")
    assert users.of("newer") not in (new, users.of("new"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("{")
    with pytest.raises(Unreachable, match="users cannot be read, which says what users machines have"):
        usual(tmp_path).of("a")
